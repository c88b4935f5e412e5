"""Promises of kernels/adapters.py: each gives the values and gradients of the function that it stands for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import TRACED, error, problem
from torch import Tensor

from kernels import adapters

TOLERANCE = 1e-5  # relative, in FP32
Call = Callable[..., Any]
CHUNKED = adapters.ChunkedLogProbFunction.apply


def compare(ours: Call, theirs: Call, seed: int = 0) -> None:
    """Both, of (hidden, weight, targets): equal values, and equal gradients for random upstream ones."""
    p = problem(24, 16, 91, seed=seed)
    results = []
    for function in (ours, theirs):
        hidden, weight = (p[k].clone().requires_grad_() for k in ("hidden", "weight"))
        values = function(hidden, weight, p["targets"])
        values = [x for x in (values if isinstance(values, tuple) else (values,)) if x is not None]
        g = torch.Generator().manual_seed(1)
        loss = sum((x * torch.randn(x.shape, generator=g)).sum() for x in values if x.requires_grad)
        assert isinstance(loss, Tensor)
        results.append([*values, *torch.autograd.grad(loss, (hidden, weight))])
    assert len(results[0]) == len(results[1])
    for mine, other in zip(*results, strict=True):
        assert mine.shape == other.shape  # of booleans the error is 0 or more than the tolerance
        assert error(mine.detach(), other.detach().double()) < TOLERANCE


def masked(y: Tensor) -> Tensor:
    """The targets, of which every fourth is not in the loss."""
    return y.where(torch.arange(len(y)) % 4 != 0, -100)


@pytest.mark.parametrize("outputs", [(), ("entropy",), ("entropy", "mean_logits", "is_top1")])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (None, 0.5), (4.0, 1.5)])
def test_trl_s_chunked_log_prob(outputs: tuple[str, ...], softcap: float | None, scale: float) -> None:
    peer = pytest.importorskip("trl.kernels", reason="trl is missing: requirements/examples.txt")
    if softcap is not None:
        outputs = tuple(x for x in outputs if x != "mean_logits")

    def call(f: Any) -> Call:
        return lambda h, w, y: f.apply(h, w, None, y, 0.7, 32, softcap, scale, outputs)

    compare(call(adapters.ChunkedLogProbFunction), call(peer.ChunkedLogProbFunction))


@pytest.mark.parametrize("entropy", [False, True])
def test_liger_s_fused_linear_scaled_cross_entropy(entropy: bool) -> None:
    peer = pytest.importorskip(
        "liger_kernel.ops.fused_linear_scaled_cross_entropy",
        reason="liger is missing: requirements/tests.txt",
    )

    def call(f: Call) -> Call:
        return lambda h, w, y: f(h, w, masked(y), 0.7, return_entropy=entropy)

    theirs = peer.LigerFusedLinearScaledCrossEntropyFunction.apply
    compare(call(adapters.liger_scaled_cross_entropy), call(theirs))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "prime-rl"])
def test_log_probs_and_entropy_of_verl_and_prime_rl(reduction: str) -> None:
    """Theirs need CUDA or packages of their own; this is their formula in float64."""

    def theirs(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        log_pi = torch.log_softmax(h.double() @ w.double().T / 0.7, 1)
        logp = log_pi.gather(1, y[:, None])[:, 0]
        logp = getattr(logp, reduction)() if reduction in ("sum", "mean") else logp
        return logp, -(log_pi.exp() * log_pi).sum(1)

    def ours(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if reduction == "prime-rl":
            scale = torch.full((len(y),), 1 / 0.7)
            return adapters.SequenceChunkedLogProbEntropy.apply(h, w, y, scale, 512)
        return adapters.verl_linear_cross_entropy(h[None], w, y[None], 0.7, reduction)  # (1, T, H) as in verl

    compare(ours, theirs)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it since 2.13")
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_torch_s_linear_cross_entropy(reduction: str) -> None:
    def call(f: Call) -> Call:
        return lambda h, w, y: f(h, w, masked(y), reduction=reduction)

    compare(call(adapters.linear_cross_entropy), call(F.linear_cross_entropy))


@pytest.mark.parametrize("number", [None, 40, torch.tensor(40)])
@pytest.mark.parametrize("shifted", [False, True])
def test_transformers_causal_lm_loss(number: Any, shifted: bool) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    def batch(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return h.view(2, 12, -1), masked(y).view(2, 12)

    def ours(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        h, labels = batch(h, y)
        return adapters.causal_lm_loss(h, w, labels, number, shift_labels=labels if shifted else None)

    def theirs(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        h, labels = batch(h, y)
        return ForCausalLMLoss(h @ w.T, labels, len(w), number, shift_labels=labels if shifted else None)

    compare(ours, theirs)


@pytest.mark.parametrize(
    "loss",
    [adapters.linear_cross_entropy, lambda h, w, y: adapters.causal_lm_loss(h, w, y, shift_labels=y)],
)
def test_a_mean_of_no_token_is_0_and_compiled_without_a_graph_break(loss: Call) -> None:
    p = problem()
    hidden = p["hidden"].requires_grad_()
    out = torch.compile(loss, backend="eager", fullgraph=TRACED)(hidden, p["weight"], 0 * p["targets"] - 100)
    out.backward()
    assert out == 0 and hidden.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize(
    "call",
    [
        lambda h, w, y: CHUNKED(h, w, w[:, 0], y, 1.0, 32),
        lambda h, w, y: CHUNKED(h, w, None, y, 1.0, 32, outputs=("log_sum_sq_probs",)),
        lambda h, w, y: CHUNKED(h, w, None, y, 1.0, 32, 5.0, 1.0, ("mean_logits",)),
        lambda h, w, y: adapters.verl_linear_cross_entropy(h, w, y, 1.0, "batchmean"),
        lambda h, w, y: adapters.liger_scaled_cross_entropy(h, w, y, selected_token_ids=y),
        lambda h, w, y: adapters.linear_cross_entropy(h, w, y, reduction="batchmean"),
    ],
)
def test_what_is_not_supported_is_refused(call: Call) -> None:
    p = problem()
    with pytest.raises(ValueError, match=r"expected|no bias|leave|set no"):
        call(p["hidden"], p["weight"], p["targets"])
