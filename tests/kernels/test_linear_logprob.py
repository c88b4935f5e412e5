"""Promises of linear_logprob as a differentiable function: its gradients are those of float64."""

import random
from typing import Any

import losses
import pytest
import torch
from backends import TAKE_FP16
from losses import error, in_float64, leaves, problem, scored, spy

from kernels import linear_logprob, torch_backend

OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0},
    {"chunk_rows": 5},
    {"exact": True},
    {"temperature": 0.7},
]


@pytest.mark.parametrize("seed", range(8))
def test_values_and_gradients_are_those_of_float64(backend: str, seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.randint(1, 40), draw.randint(1, 30), draw.randint(2, 300)
    p = problem(*shape, draw.choice([0.3, 1, 6]), seed)
    options = OPTIONS[seed % len(OPTIONS)]
    if seed == 6:
        options = {"temperature": torch.linspace(0.5, 2, len(p["hidden"]))}
    bf16 = seed % 2 == 1
    if bf16:
        p |= {k: p[k].bfloat16() for k in ("hidden", "weight")}
    *values, dx, dw = scored(p, backend=backend, **options)
    *expected, dx64, dw64 = in_float64(p, **options)
    for value, exact in zip(values, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-5)
    assert dx.dtype == p["hidden"].dtype and dw.dtype == p["weight"].dtype
    assert max(error(dx, dx64), error(dw, dw64)) < (2.5e-3 if bf16 else 1e-5)


def test_float64_is_differentiated_in_float64() -> None:
    p = {k: x.double() if k in ("hidden", "weight") else x for k, x in problem().items()}
    for mine, exact in zip(scored(p, backend="torch"), in_float64(p), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", TAKE_FP16)
@pytest.mark.parametrize("compiled", [False, True])
def test_fp16_gradients_are_those_of_float64(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem()
    p |= {k: p[k].half() for k in ("hidden", "weight")}
    if compiled:  # the ops' fakes tell the compiler the types
        monkeypatch.setattr(losses, "linear_logprob", torch.compile(linear_logprob, backend="aot_eager"))
        p["hidden"] = (2 * p["hidden"]) / 2
    *_, dx, dw = scored(p, backend=name)
    *_, dx64, dw64 = in_float64(p)
    assert dx.dtype == torch.float16 and max(error(dx, dx64), error(dw, dw64)) < 1e-3


def test_log_sum_exp_and_hits_by_hand() -> None:
    weight = torch.tensor([[0.0], [1.0], [2.0]])
    out = linear_logprob(torch.tensor([[1.0], [1.0], [-1.0]]), weight, torch.tensor([2, 1, 0]))
    total = 1 + 2.718281828459045 + 7.38905609893065
    expected = torch.tensor([total, total, 1 + 1 / 2.718281828459045 + 1 / 7.38905609893065]).log()
    torch.testing.assert_close(out.logsumexp, expected)
    assert out.is_argmax.tolist() == [True, False, True]


def test_tokens_without_upstream_gradient_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    spy(monkeypatch, torch_backend, "row_grads", lambda z, *_: rows.append(len(z)))
    q = leaves(problem(24))
    logp = linear_logprob(q["hidden"], q["weight"], q["targets"], backend="torch", chunk_rows=4).logprobs
    logp[:3].sum().backward()
    assert rows == [3] and not q["hidden"].grad[3:].any() and q["hidden"].grad[:3].any(1).all()


def test_scoring_gives_the_same_bits_with_and_without_gradients(backend: str) -> None:
    q = leaves(problem())
    arguments = q["hidden"], q["weight"], q["targets"]
    recorded = linear_logprob(*arguments, backend=backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            plain = linear_logprob(*arguments, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(recorded, plain, strict=True))
        assert recorded.logprobs.requires_grad and not plain.logprobs.requires_grad
    assert not recorded.logsumexp.requires_grad


def test_no_tokens_give_zero_gradients(backend: str) -> None:
    *_, dx, dw = scored(problem(0), backend=backend)
    assert dx.shape == (0, 13) and not dw.any()
