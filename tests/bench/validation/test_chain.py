"""The textbook's loss is the fused one, and the check of the chain computes what it says."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import kernels
from bench import harness
from bench.validation import chain
from trainer.learner import policy_model


@pytest.mark.usefixtures("restored_loss")
def test_the_naive_loss_is_the_fused_one() -> None:
    naive = importlib.reload(importlib.import_module("bench.validation.naive_loss"))
    assert policy_model.policy_loss is naive.naive_policy_loss
    rng = torch.Generator().manual_seed(0)
    n, h, v = 12, 8, 50
    hidden, weight = (torch.randn(rows, h, generator=rng, requires_grad=True) for rows in (n, v))
    targets = torch.randint(v, (n,), generator=rng)
    per_token = {
        "logprobs_gen": -6 + 2 * torch.randn(n, generator=rng), "advantages": torch.randn(n, generator=rng),
        "token_weights": torch.rand(n, generator=rng),
    }  # fmt: skip
    found = [
        loss(hidden, weight, targets, objective=naive.cispo, temperature=0.7, **per_token)
        for loss in (kernels.policy_loss, naive.naive_policy_loss)
    ]
    grads = [torch.autograd.grad(out.loss, (hidden, weight)) for out in found]
    torch.testing.assert_close(found[1].loss, found[0].loss)
    torch.testing.assert_close(found[1].logprobs, found[0].logprobs)
    torch.testing.assert_close(grads[1], grads[0])
    assert 0 < float(found[0].stats["ratio/truncated"]) < 1
    for name, value in found[0].stats.items():
        if name != "entropy":
            torch.testing.assert_close(found[1].stats[name], value)
    with pytest.raises(ValueError, match="entropy_bonus"):
        naive.naive_policy_loss(
            hidden, weight, targets, objective=naive.cispo, temperature=1.0, entropy_bonus=0.1, **per_token
        )


@pytest.fixture
def restored_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_model, "policy_loss", policy_model.policy_loss)


def make_run(folder: Path, hours: float, loss_s: float, curve: list[tuple[float, float]]) -> None:
    folder.mkdir()
    roles = {
        "learner": {"devices": 1, "seconds": {"loss_head": loss_s, "forward_backward": 3000 - loss_s}},
        "engine": {"devices": 1, "seconds": {"generate": 2000}},
    }
    books = {"devices_total": 2, "compute": {"total": hours}, "roles": roles}
    (folder / "ledger.json").write_text(json.dumps(books))
    (folder / "config.yaml").write_text(yaml.safe_dump({"pipeline": {"scheme": "pipeline_rl"}}))
    rows = [{"compute/total": c, "eval/pass_rate": r} for c, r in curve]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rates(folder: Path) -> Path:
    options = {"rows": 100, "hidden": 8, "vocab": 50, "dtype": "float32"}
    lines: list[dict[str, Any]] = [{"options": options, "machine": {"cpu": "x"}, "commit": "y"}]
    lines += [{"provider": "ours (cpu)", "ms": 10.0}, {"provider": "naive FP32", "ms": 20.0}]
    path = folder / "rates.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_shift_worked_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss takes 1,000 of the learner's 3,000 s, the naive one 2,000: 7,200 s of wall become 8,200."""
    factor = 8200 / 7200
    for seed, above in ((0, 0.0), (1, 0.02)):
        line = [(c, above + c / 10) for c in (0.0, 2.0, 4.0)]
        make_run(tmp_path / f"scalerl-{seed}", 4, 1000, line)
        slower = [(c * factor, r + 0.001) for c, r in line]
        make_run(tmp_path / f"scalerl-naive-{seed}", 4 * factor, 2000, slower)
    out = tmp_path / "out.jsonl"
    options = [str(tmp_path), f"--kernel-rates={rates(tmp_path)}", f"--out={out}"]
    assert harness.run("validation.chain", chain, options) == 0
    _, (row,) = harness.read(out)
    assert [p["predicted"] for p in row["pairs"]] == pytest.approx([factor, factor])
    shift = row["shift"]
    assert shift["budgets"][0] == 2 and shift["budgets"][-1] == 4
    assert shift["ours"][-1] == pytest.approx(0.41)
    assert shift["predicted"][-1] == pytest.approx(0.01 + 0.4 / factor)
    assert np.subtract(shift["measured"], shift["predicted"]) == pytest.approx(np.full(9, 0.001))
    # seeds differ by .02: sd .01414, t(.95, 2) = 2.920; two means of two runs differ by sd · √2 / √2
    assert shift["seed_margin"] == pytest.approx(2.920 * 0.01414, rel=1e-3)
    text = capsys.readouterr().out
    assert "1.139 predicted, 1.139 measured" in text and "+0.0010, within the seed margin of 0.0413" in text


def test_a_folder_without_pairs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [str(tmp_path), f"--kernel-rates={rates(tmp_path)}"]
    assert harness.run("validation.chain", chain, options) == 1
    assert "expected runs scalerl-N and scalerl-naive-N" in capsys.readouterr().out
    assert harness.run("validation.chain", chain, [str(tmp_path)]) == 1
    assert "--kernel-rates FILE" in capsys.readouterr().err
