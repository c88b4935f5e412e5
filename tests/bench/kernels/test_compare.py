"""compare.py and its parts: errors are the true ones, every provider is a line, the table is the JSON's."""

import os
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import harness, measure
from bench.harness import Row
from bench.kernels import compare, providers
from bench.kernels.problem import LossAnswer, errors_of, make_problem, relative, solve
from bench.kernels.providers import Provider, all_providers, naive
from kernels.reference import reference_loss
from trainer.accounting.kernel_rates import measured_heads, read_rates

TINY = ["--rows=32", "--hidden=8", "--vocab=40", "--chunk=8", "--rounds=2", "--threads=1", "--no-memory"]


def tiny(dtype: torch.dtype = torch.float32) -> Any:
    return make_problem(32, 8, 40, dtype, chunk_rows=8)


def rows_of(tmp_path: Path, *options: str) -> dict[str, Row]:
    """The rows that the command writes, by case."""
    out = tmp_path / "compare.jsonl"
    harness.run("kernels.compare", compare, [*TINY, *options, f"--out={out}"])
    return {row["case"]: row for row in harness.read(out)[1]}


def test_on_a_gpu_ours_takes_the_rows_that_its_memory_allows_as_it_is_shipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device, rows in (("cpu", 8), ("cuda", None)):
        monkeypatch.setattr(providers, "DEVICE", device)
        runs = [x.run for x in all_providers(tiny()) if x.name.startswith("ours (")]
        assert runs and {run.keywords["chunk_rows"] for run in runs if isinstance(run, partial)} == {rows}


def test_the_oracle_is_the_textbooks() -> None:
    p = tiny()
    hidden, weight = (x.detach().double().requires_grad_() for x in (p.hidden, p.weight))
    loss, logp, entropy = reference_loss(
        hidden, weight, p.targets, p.logprobs_gen, p.advantages, p.token_weights, max_ratio=4.0
    )
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    truth = solve(p)
    for given, true in zip(
        (truth.loss, truth.logprobs, truth.entropy, truth.d_hidden, truth.d_weight),
        (loss, logp, entropy, d_hidden, d_weight), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(given, true, rtol=1e-10, atol=1e-14)


def test_errors_are_those_that_were_put_in() -> None:
    truth = solve(tiny())
    wrong = LossAnswer(
        truth.loss * 1.5,
        truth.logprobs.index_add(0, torch.tensor([3]), torch.tensor([-0.25], dtype=torch.float64)),
        truth.entropy + 0.125,
        truth.d_hidden * 1.01,
        -truth.d_weight,
    )
    errors = errors_of(wrong, truth)
    expected = {"loss_rel": 0.5, "logp_max_abs": 0.25, "entropy_max_abs": 0.125}
    assert errors == pytest.approx(expected | {"d_hidden_rel": 0.01, "d_weight_rel": 2.0})


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        relative(torch.zeros(3, 2), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_providers_solve_the_same_problem(dtype: torch.dtype) -> None:
    p = tiny(dtype)
    p = replace(p, token_weights=torch.linspace(0.2, 1.8, 32) / 32)  # tokens need not weigh the same
    truth, bar = solve(p), 1e-5 if dtype == torch.float32 else 3e-2
    solved = 0
    for case in all_providers(p):
        try:
            errors = errors_of(case.run(p), truth)
        except ImportError:  # a peer that is not installed
            continue
        gradients = [errors.get("d_hidden_rel", 0.0), errors.get("d_weight_rel", 0.0)]
        assert max(gradients) < (3e-2 if "bf16" in case.name else bar), case.name
        solved += bool(errors)
    assert solved >= 4  # ours by both backends, and both naive ones


@pytest.mark.slow
def test_the_command_measures_time_memory_and_errors_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compare.jsonl"
    options = [*TINY[:-1], "--only=bare,naive FP32", f"--out={out}"]
    assert harness.run("kernels.compare", compare, options) == 0
    head, rows = harness.read(out)
    assert head["machine"]["isa"] and head["versions"]["torch"] == str(torch.__version__)
    times = [row["ms"] for row in rows if row["case"].startswith("naive FP32: round")]
    by_case = {row["case"]: row for row in rows}
    assert len(times) == 2 and min(times) > 0 and by_case["naive FP32: memory"]["peak_bytes"] >= 0
    assert by_case["naive FP32: errors"]["errors"]["d_weight_rel"] < 1e-5
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if line.startswith("| naive FP32  "))
    assert f"{sum(times) / 2:.2f}" in line and "3 bare GEMMs, chunked " in text
    heads = measured_heads(read_rates(out), "float32")
    assert [head.name for head in heads] == ["naive FP32"]


def test_a_failing_peer_is_a_line_and_a_wrong_one_is_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(p: Any) -> LossAnswer:
        raise RuntimeError("cannot do\nthis")

    def wrong(p: Any, dlogp: float) -> LossAnswer:
        right = naive(p, torch.float32)
        assert right.d_weight is not None and right.logprobs is not None
        return replace(right, d_weight=right.d_weight * 1.02, logprobs=right.logprobs + dlogp)

    named = {"broken": failing, "wrong": partial(wrong, dlogp=0.03), "nan": partial(wrong, dlogp=torch.nan)}
    monkeypatch.setattr(compare, "all_providers", lambda p: [Provider(*x) for x in named.items()])
    rows = rows_of(tmp_path)
    assert rows["broken: errors"]["error"] == "RuntimeError: cannot do this" and "broken: round 1" not in rows
    errors = rows["wrong: errors"]["errors"]
    assert (errors["d_weight_rel"], errors["logp_max_abs"]) == pytest.approx((0.02, 0.03), rel=1e-3)
    assert rows["nan: errors"]["errors"]["logp_max_abs"] is None and "nan: round 2" in rows
    assert "broken: errors: RuntimeError: cannot do this" in capsys.readouterr().out


def test_what_takes_too_long_has_errors_and_is_not_timed(tmp_path: Path) -> None:
    row = rows_of(tmp_path, "--only=naive FP32", "--max-seconds=0")
    assert list(row) == ["naive FP32: errors"]
    assert row["naive FP32: errors"]["note"].startswith("not timed")
    assert row["naive FP32: errors"]["errors"]["d_weight_rel"] < 1e-5


def peak_of_256_mb() -> int:
    def take() -> None:
        torch.ones(64 << 20)

    take()
    return measure.resident_peak_bytes(take)


def test_resident_memory_is_what_a_call_takes() -> None:
    assert 250e6 < measure.alone(peak_of_256_mb) < 400e6  # other tests' memory may stay with a process


def test_what_ends_a_process_of_its_own_is_an_error() -> None:
    assert measure.alone(os.getenv, "BENCH_X", environment={"BENCH_X": "1"}) == "1"
    with pytest.raises(BrokenExecutor):
        measure.alone(os.abort)
