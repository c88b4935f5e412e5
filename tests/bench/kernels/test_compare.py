"""compare.py and its parts: errors are the true ones, every provider is a line, the table is the JSON's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measure
from bench.kernels import compare
from bench.kernels.problem import LossAnswer, errors_of, make_problem, relative, solve, subset
from bench.kernels.providers import Provider, all_providers, naive
from kernels.reference import reference_loss

TINY = ["--rows=32", "--hidden=8", "--vocab=40", "--chunk=8", "--rounds=2", "--threads=1"]


def tiny(dtype: torch.dtype = torch.float32) -> Any:
    return make_problem(32, 8, 40, dtype, chunk_rows=8)


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "compare.json"
    compare.main([*TINY, "--device=cpu", *options, f"--out={out}"])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


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
    found = errors_of(wrong, truth)
    expected = {"loss_rel": 0.5, "logp_max_abs": 0.25, "entropy_max_abs": 0.125}
    assert found == pytest.approx(expected | {"d_hidden_rel": 0.01, "d_weight_rel": 2.0})


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        relative(torch.zeros(3, 2), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_providers_solve_the_same_problem(dtype: torch.dtype) -> None:
    p = tiny(dtype)
    p = replace(p, token_weights=torch.linspace(0.2, 1.8, 32) / 32)  # tokens need not weigh the same
    truth, bar = solve(p), 1e-5 if dtype == torch.float32 else 3e-2
    solved = 0
    for case in all_providers(p, ["torch"]):
        try:
            found = errors_of(case.run(p), truth)
        except ImportError:  # a peer that is not installed
            continue
        gradients = [found.get("d_hidden_rel", 0.0), found.get("d_weight_rel", 0.0)]
        assert max(gradients) < (3e-2 if "bf16" in case.name else bar), case.name
        solved += bool(found)
    assert solved >= 3  # ours on torch, and both naive ones


def test_a_subset_weighs_its_tokens_as_before() -> None:
    p = tiny()
    assert torch.equal(subset(p, 5).token_weights, p.token_weights[:5])
    torch.testing.assert_close(solve(subset(p, 32)).d_weight, solve(p).d_weight)


def test_the_command_runs_to_its_end_and_the_json_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(tmp_path, "--only=bare,naive FP32")
    assert record["shape"] == {"N": 32, "H": 8, "V": 40}
    assert record["command"].startswith("python -m bench.kernels.compare --rows=32")
    assert {"machine", "versions", "commit", "dtype", "chunk_rows", "rounds"} <= set(record)
    assert record["machine"]["isa"] and record["versions"]["torch"] == str(torch.__version__)
    for case in record["cases"]:
        assert len(case["rounds_ms"]) == 2 and case["ms"]["low"] <= case["ms"]["median"] <= case["ms"]["high"]
        if "bare" not in case["name"]:
            assert case["peak_bytes"] >= 0 and case["memory_method"] and case["errors"]["d_weight_rel"] < 1e-5
    lines = capsys.readouterr().out.splitlines()
    for case in record["cases"]:
        line = next(text for text in lines if text.startswith(f"{case['name']}  "))
        assert f"{case['ms']['median']:.2f}" in line
        if case["errors"]:
            assert f"{case['errors']['logp_max_abs']:.1e}" in line


def test_a_missing_peer_and_a_failing_one_are_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(p: Any) -> LossAnswer:
        import no_such_peer  # type: ignore[import-not-found]

        return no_such_peer.answer(p)

    def failing(p: Any) -> LossAnswer:
        raise RuntimeError("cannot do\nthis")

    made = [
        Provider("gone", missing),
        Provider("broken", failing),
        Provider("fine", lambda p: naive(p, torch.float32)),
    ]
    monkeypatch.setattr(compare, "all_providers", lambda p: made)
    record = run(tmp_path, "--no-memory")
    assert [c.get("error") for c in record["cases"]] == [
        "ModuleNotFoundError: No module named 'no_such_peer'", "RuntimeError: cannot do this", None,
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "error: ModuleNotFoundError" in out and "error: RuntimeError: cannot do this" in out


def test_a_wrong_provider_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(p: Any) -> LossAnswer:
        right = naive(p, torch.float32)
        assert right.d_weight is not None and right.logprobs is not None
        return replace(right, d_weight=right.d_weight * 1.02, logprobs=right.logprobs + 0.03)

    def nan(p: Any) -> LossAnswer:
        right = naive(p, torch.float32)
        assert right.logprobs is not None
        return replace(right, logprobs=right.logprobs * torch.nan)

    monkeypatch.setattr(compare, "all_providers", lambda p: [Provider("wrong", wrong), Provider("nan", nan)])
    record = run(tmp_path, "--no-memory")
    cases = record["cases"]
    assert cases[0]["errors"]["d_weight_rel"] == pytest.approx(0.02, rel=1e-3)
    assert cases[0]["errors"]["logp_max_abs"] == pytest.approx(0.03, rel=1e-3)
    assert cases[1]["errors"]["logp_max_abs"] is None  # JSON has no NaN
    assert record["not_finite"] == ["cases.1.errors.logp_max_abs"]


def test_what_would_take_too_long_is_a_line_with_errors_of_few_rows(tmp_path: Path) -> None:
    (case,) = run(tmp_path, "--no-memory", "--only=naive FP32", "--max-seconds=0")["cases"]
    assert (
        "ms" not in case and case["skipped"].startswith("not timed") and case["errors"]["d_weight_rel"] < 1e-5
    )


def test_bad_options_say_what_was_expected() -> None:
    with pytest.raises(SystemExit, match="at least 1"):
        compare.main(["--rows=0"])
    with pytest.raises(SystemExit, match="no provider's name contains that"):
        compare.main([*TINY, "--only=nobody"])


def test_calls_take_turns_and_each_round_begins_with_another() -> None:
    order: list[str] = []
    measure.interleaved({name: lambda name=name: order.append(name) for name in "abc"}, 3, "cpu")
    assert order == list("abcbcacab")


def test_resident_memory_is_what_a_call_takes() -> None:
    def take() -> None:
        torch.ones(64 << 20)  # 256 MB

    take()
    peak, method = measure.resident_peak_bytes(take)
    assert method
    if method.startswith("VmHWM"):
        assert 250e6 < peak < 400e6
