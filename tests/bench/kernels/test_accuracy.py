"""accuracy.py: errors are the true ones, and a backend that fails is a line."""

import json
from pathlib import Path

import pytest
import torch

from bench.kernels import accuracy
from bench.kernels.problem import log_probs, make_problem


def test_accuracy_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.json"
    accuracy.main(["--quick", "--device=cpu", "--backends=torch", f"--out={out}"])
    records = json.loads(out.read_text())["records"]
    assert not [r for r in records if r.get("error")] and len(records) >= 15
    assert all(r["met"] is None for r in records)  # bars hold at full sizes only
    text = capsys.readouterr().out
    for r in records:
        assert f"{r['value']:.2e}" in text and r["check"] in text


def test_a_backend_that_fails_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.json"
    accuracy.main(["--quick", "--device=cpu", "--backends=nonsense,torch", "--checks=chunks", f"--out={out}"])
    records = json.loads(out.read_text())["records"]
    assert "nonsense" in records[0]["error"] and records[1]["value"] < 2e-3
    assert "error: ValueError" in capsys.readouterr().out


def test_the_gemms_error_is_the_accumulators() -> None:
    p = make_problem(16, 64, 300, torch.bfloat16)
    truth = accuracy.logits64(p.hidden.detach(), p.weight.detach())
    torch.testing.assert_close(truth, p.hidden.detach().double() @ p.weight.detach().double().t())
    found = accuracy.mm_error(p, truth)
    assert 0 < found["logits_max_abs"] < 1e-4 and 0 < found["logp_max_abs"] < 1e-4
    shifted = accuracy.mm_error(p, truth + torch.eye(16, 300, dtype=torch.float64))
    assert shifted["logits_max_abs"] == pytest.approx(1, abs=1e-4)


def test_log_probs_keep_their_digits_near_zero_and_far_below() -> None:
    z = torch.tensor([[0.0, 40.0, 1.0], [900.0, 0.0, 0.0]], dtype=torch.float64)
    near, far = log_probs(z, torch.tensor([1, 2]))
    # log(1 + e^-40 + e^-39) to its own digits; log1p of a sum of 1e-17 is that sum
    assert float(near) == pytest.approx(-(2.718281828459045**-40 + 2.718281828459045**-39), rel=1e-12)
    assert float(far) == pytest.approx(-900, rel=1e-12)


def test_before_rounding_finds_the_error_under_it() -> None:
    g = torch.Generator().manual_seed(0)
    true = torch.randn(300, 200, dtype=torch.float64, generator=g)
    wrong = true * (1 + 3e-3 * torch.randn(true.shape, dtype=torch.float64, generator=g))
    rounded = accuracy.relative(wrong.bfloat16(), true)
    assert rounded > 3.3e-3
    assert accuracy.before_rounding(rounded, true) == pytest.approx(3e-3, rel=0.02)
