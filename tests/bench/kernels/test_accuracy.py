"""accuracy.py: errors are the true ones, and a backend that fails is a line."""

import pytest
import torch

from bench.harness import run
from bench.kernels import accuracy
from bench.kernels.problem import log_probs, make_problem


def test_every_check_runs_and_a_backend_that_fails_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels.accuracy", accuracy, ["--quick", "--backends=nonsense,torch"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("chunks: nonsense: ValueError") for line in lines)
    errors = [line for line in lines if "torch" in line and "e-0" in line]
    assert len(errors) >= 15 and not any("met" in line for line in errors)  # bars hold at full sizes only


def test_the_gemms_error_is_the_accumulators() -> None:
    p = make_problem(16, 64, 300, torch.bfloat16)
    truth = accuracy.logits64(p.hidden.detach(), p.weight.detach())
    torch.testing.assert_close(truth, p.hidden.detach().double() @ p.weight.detach().double().t())
    assert 0 < accuracy.worst(accuracy.gemm_logprobs(p), log_probs(truth, p.targets)) < 1e-4


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
