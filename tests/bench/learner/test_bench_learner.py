"""bench.learner: both sides make the same step on the same batch, and what is counted is what is fed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bench import harness
from bench.learner import step as learner_step
from bench.learner import throughput
from bench.learner.step import MODELS, StepProblem

TINY = StepProblem("tiny", "cpu", "float32", 3, 4, 8, 12, 0.8, 40, 64, 2, False)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    learner_step.save_model(TINY, str(tmp_path))
    return str(tmp_path)


def test_ours_and_plain_make_the_same_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[torch.nn.Module] = []
    load = AutoModelForCausalLM.from_pretrained

    def keep(*args: Any, **kwargs: Any) -> Any:
        models.append(load(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", keep)
    batch, name = learner_step.make_batch(TINY), "model.layers.0.mlp.up_proj.weight"
    before = load_file(Path(folder) / "model.safetensors")[name]
    losses = [learner_step.PROVIDERS[side](TINY, folder)(batch) for side in ("ours", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    moved = [m.get_parameter(name).detach() - before for m in models]
    # AdamW's first step is about lr times the gradient's sign: it differs where that is about zero.
    assert float(moved[0].abs().mean()) > 0.5 * learner_step.LR
    assert float((moved[0] - moved[1]).abs().gt(0.01 * learner_step.LR).float().mean()) < 1e-3


def test_tokens_are_counted_as_documented() -> None:
    p = replace(TINY, sigma=0.0, prompts=2, group=3, median=10, micro_batch_tokens=1000)
    batch = learner_step.make_batch(p)
    prompts = [len(batch[0].prompt_ids), len(batch[3].prompt_ids)]
    found = learner_step.lengths(batch, p)
    assert found["useful"] == sum(prompts) + 60 and found["loss"] == 60 and found["micro_batches"] == 1
    assert found["fed_ours"] <= sum(prompts) + 6 * 9  # a completion's last token is not fed
    assert found["fed_plain"] == 2 * (prompts[0] + 10) + 2 * (max(prompts) + 10) + 2 * (prompts[1] + 10)
    a, b = prompts
    pairs = a * (a + 1) // 2 + b * (b + 1) // 2 + 3 * sum(a + b + 2 * i for i in range(1, 10))
    assert 0.9 * pairs < found["pairs"] <= pairs  # less what random completions share
    layers, width = 2, 64
    body = layers * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    flops = learner_step.flops(p, found)
    assert flops["matmul"] == 6 * (body * found["fed_ours"] + 512 * 64 * 60)
    assert flops["attention"] == 12 * width * layers * found["pairs"]


def test_lengths_spread_as_asked() -> None:
    p = replace(TINY, prompts=100, group=8, median=256, sigma=0.8, longest=2048)
    n = np.array([len(s.token_ids) for s in learner_step.make_batch(p)])
    assert np.median(n) == pytest.approx(256, rel=0.02) and n.max() == 2048
    assert np.log(n).std() == pytest.approx(0.8, rel=0.05)
    assert sum(float(s.token_weights.sum()) for s in learner_step.make_batch(p)) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_named_shapes_have_their_models_size(name: str) -> None:
    head, body = (sum(w.numel() for w in weights) for weights in learner_step.linear_weights(name))
    millions = {"tiny": 0.1, "smollm2-135m": 134.5, "qwen3-0.6b": 596, "qwen3-4b": 4022}
    assert (head + body) / 1e6 == pytest.approx(millions[name], rel=0.01 if name != "tiny" else 0.2)


def test_a_failing_side_is_a_line_and_the_other_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(function: Any, what: str, *rest: Any, environment: dict[str, str]) -> dict[str, Any]:
        assert {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} <= set(environment)
        if what == "gemm":
            return {"flops_per_s": 2e9, "product": "some product"}
        if what == "plain":
            raise RuntimeError("killed")
        return {"seconds": [2.0], "peak_bytes": 10**9}

    monkeypatch.setattr(throughput, "alone", measured)
    assert harness.run("learner", throughput, ["--batch=tiny", "--rounds=2"]) == 1
    out = capsys.readouterr().out
    counted = learner_step.lengths(learner_step.make_batch(learner_step.TINY), learner_step.TINY)
    share = learner_step.flops(learner_step.TINY, counted)["matmul"] / 2e9 / 2.0
    assert "plain: round 2: RuntimeError: killed" in out
    assert f"{share:.3f}" in out and f"{counted['useful'] / 2.0:.4g}" in out and "of plain" not in out
    head = {"options": {"batch": "tiny", "dtype": "float32", "threads": 1}, "commit": "x"}
    head |= {"machine": {"cpu": "x", "isa": "y"}, "versions": {"torch": "z"}}
    times = {"ours": (2.0, 7), "plain": (5.0, 21)}
    rows = [{"what": name, "seconds": [s], "peak_bytes": b * 10**9} for name, (s, b) in times.items()]
    assert "ours: 2.50 × the useful tokens/s of plain (bar 1.5), 0.33 × its" in throughput.describe(
        head, rows
    )


def test_completions_longer_than_the_warm_up_are_measured(folder: str) -> None:
    p = replace(TINY, median=80, longest=120, micro_batch_tokens=512)
    for side in learner_step.PROVIDERS:
        assert len(throughput.measure_here(side, p, folder, 1, 1)["seconds"]) == 1


@pytest.mark.slow
def test_both_are_measured_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    assert harness.run("learner", throughput, ["--batch=tiny", "--rounds=1", f"--out={out}"]) == 0
    for row in harness.read(out)[1][1:]:
        assert row["seconds"][0] > 0 and row["peak_bytes"] > 1e8
    text = capsys.readouterr().out
    assert "ours" in text and "plain" in text and "GFLOP/s" in text
