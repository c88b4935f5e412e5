"""Promises of the distillation from a teacher's top-k: log-probs, KL and gradients are those of float64."""

import math
from typing import Any

import pytest
import torch
from losses import error, problem
from torch import Tensor

from kernels import distillation, forward_kl, topk_logprob

K = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0, "temperature": 0.8},
    "temperature per token": {"temperature": torch.linspace(0.5, 2.0, 23)},
}


def teacher(p: dict[str, Tensor], k: int = K) -> tuple[Tensor, Tensor]:
    """(N, V) log-probs of another model, and the ids of its k most likely tokens; some rows share ids."""
    logits = 2 * torch.randn(len(p["hidden"]), len(p["weight"]), generator=torch.Generator().manual_seed(9))
    logits[:, :2] += 6
    return logits.log_softmax(1), logits.topk(k).indices


def student(
    p: dict[str, Tensor], softcap: float = 0.0, temperature: Any = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """(N, V) log-probs by whole float64 logits, and their leaves."""
    leaves = [p[k].double().requires_grad_() for k in ("hidden", "weight")]
    z = leaves[0] @ leaves[1].T
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return (z / torch.as_tensor(temperature).double().reshape(-1, 1)).log_softmax(1), leaves


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_log_probs_kl_and_gradients_are_those_of_float64(
    name: str, bf16: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "GATHER_BYTES", 4 * K * 13 * 4)  # four rows at a time
    p, options = problem(std=2.0), OPTIONS[name]
    if bf16:
        p |= {k: p[k].bfloat16() for k in ("hidden", "weight")}
    log_q, ids = teacher(p)
    exact, leaves = student(p, **options)
    log_p, q = exact.gather(1, ids), log_q.gather(1, ids).double()
    r, s = 1 - q.exp().sum(1), 1 - log_p.exp().sum(1)
    kl = (q.exp() * (q - log_p)).sum(1) + r * (r / s).log()
    w = p["token_weights"].double()
    expected = torch.autograd.grad((w * kl).sum(), leaves)

    mine = [p[k].clone().requires_grad_() for k in ("hidden", "weight")]
    logprobs = topk_logprob(mine[0], mine[1], ids, backend=backend, **options)
    loss = forward_kl(logprobs, log_q.gather(1, ids))
    gradients = torch.autograd.grad((p["token_weights"] * loss).sum(), mine)
    torch.testing.assert_close(logprobs.double(), log_p, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(loss.double(), kl, rtol=2e-5, atol=2e-5)
    assert [x.dtype for x in gradients] == [x.dtype for x in mine]
    assert max(error(*pair) for pair in zip(gradients, expected, strict=True)) < (6e-3 if bf16 else 1e-5)


def test_in_float64_with_all_tokens_it_is_the_whole_kl() -> None:
    p = {k: x.double() if k in ("hidden", "weight") else x for k, x in problem().items()}
    v = len(p["weight"])
    log_q, ids = teacher(p, v)
    log_q = log_q.double()
    exact, leaves = student(p)
    whole = (log_q.exp() * (log_q - exact)).sum(1)
    mine = [p[k].clone().requires_grad_() for k in ("hidden", "weight")]
    loss = forward_kl(topk_logprob(mine[0], mine[1], ids, backend="torch"), log_q.gather(1, ids))
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    gradients, expected = torch.autograd.grad(loss.sum(), mine), torch.autograd.grad(whole.sum(), leaves)
    assert max(error(*pair) for pair in zip(gradients, expected, strict=True)) < 1e-6
    for k in (1, 3, 10):  # less is known of fewer tokens, and the KL is smaller
        part = forward_kl(exact.gather(1, ids[:, :k]), log_q.gather(1, ids[:, :k]))
        assert bool((part <= whole + 1e-6).all())


def test_worked_by_hand() -> None:
    """q .5, .25 (rest .25), π .25, .25 (rest .5): .5 ln 2 + 0 + .25 ln .5 = .25 ln 2. Its derivatives in
    log π: −q_j + r π_j / s, that is −.5 + .125 and −.25 + .125."""
    logprobs = torch.tensor([[0.25, 0.25]]).log().requires_grad_()
    loss = forward_kl(logprobs, torch.tensor([[0.5, 0.25]]).log())
    assert loss.tolist() == pytest.approx([0.25 * math.log(2)], rel=1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([-0.375, -0.125], rel=1e-6)


def test_it_is_trl_s_divergence_with_a_tail() -> None:
    utils = pytest.importorskip("trl.experimental.sdft.loss_utils", reason="trl is missing")
    g = torch.Generator().manual_seed(2)
    mine, other = (torch.randn(50, 40, generator=g).mul(3).log_softmax(1)[:, :8] for _ in range(2))
    theirs = utils.compute_divergence(utils.add_tail_bucket(mine), utils.add_tail_bucket(other), 0.0)
    torch.testing.assert_close(forward_kl(mine, other), theirs, rtol=1e-5, atol=1e-6)


def test_certain_students_and_teachers_make_no_nan() -> None:
    certain = torch.tensor([[0.0, -200.0], [-1e-8, -20.0], [-0.7, -0.7]]).requires_grad_()
    for teacher_logprobs in (certain.detach(), certain.detach().flip(0)):
        loss = forward_kl(certain, teacher_logprobs)
        (gradient,) = torch.autograd.grad(loss.sum(), certain)
        assert bool(loss.isfinite().all()) and bool(gradient.isfinite().all())
    impossible = torch.tensor([[0.0, float("-inf")]] * 3)
    assert bool(forward_kl(certain, impossible).isfinite().all())
    assert forward_kl(certain, certain).tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_two_runs_have_the_same_bits_and_wrong_shapes_are_a_clear_error() -> None:
    p = problem()
    _, ids = teacher(p)
    weight = p["weight"].requires_grad_()
    runs = [torch.autograd.grad(topk_logprob(p["hidden"], weight, ids).sum(), weight)[0] for _ in range(2)]
    assert torch.equal(*runs)
    with pytest.raises(ValueError, match=r"ids: expected shape \(N, k\)"):
        topk_logprob(p["hidden"], weight, p["targets"])
    with pytest.raises(ValueError, match="ids: expected shape"):
        topk_logprob(p["hidden"], weight, ids[1:])
    padded = ids.clone()
    padded[3, -1] = -1
    with pytest.raises(ValueError, match="ids from -1"):
        topk_logprob(p["hidden"], weight, padded)
    with pytest.raises(ValueError, match=r"log-probs \(N, k\) of both, given \(2, 3\) and \(2, 1\)"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 1))


def test_a_frozen_weight_gets_no_gradient_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    hidden, (_, ids) = p["hidden"].requires_grad_(), teacher(p)
    logprobs = [
        topk_logprob(hidden, w, ids).sum() for w in (p["weight"].clone().requires_grad_(), p["weight"])
    ]
    whole = torch.autograd.grad(logprobs[0], hidden)[0]
    monkeypatch.delattr(torch, "zeros_like")  # which makes that gradient
    assert torch.equal(torch.autograd.grad(logprobs[1], hidden)[0], whole)
