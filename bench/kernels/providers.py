"""The providers of the policy loss: ours, what plain trainers write, the peers, and the limit.

A provider takes a LossProblem and returns a LossAnswer: forward and backward. All compute the same loss and
gradients (CISPO, bound 4, per token), so that their errors can be compared; `note` says what that took. A
peer that is not installed raises ImportError when it runs, and its line of the table says so.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from bench.kernels.problem import MAX_RATIO, LossAnswer, LossProblem
from bench.measure import DEVICE

LIMIT = "3 bare GEMMs"
ROW_KERNELS = ("two-pass", "single-pass", "fused-epilogue")
OBJECTIVE = kernels.CISPO(MAX_RATIO)


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation, a line of the table."""

    name: str
    run: Callable[[LossProblem], LossAnswer]
    note: str = ""


def backward(loss: Tensor, logprobs: Tensor | None, entropy: Tensor | None, p: LossProblem) -> LossAnswer:
    """The gradients of `loss` in hidden, and in weight unless it is frozen."""
    gradients = torch.autograd.grad(loss, [x for x in (p.hidden, p.weight) if x.requires_grad])
    logprobs, entropy = (x.detach() if x is not None else None for x in (logprobs, entropy))
    return LossAnswer(loss.detach(), logprobs, entropy, *gradients)


def cispo(logp: Tensor, p: LossProblem) -> Tensor:
    """The loss a trainer writes when it has per-token log-probs."""
    ratio = (logp.detach().float() - p.logprobs_gen).exp().clamp(max=MAX_RATIO)
    return -(p.token_weights * ratio * p.advantages * logp).sum()


def policy_loss(
    p: LossProblem, backend: str | None, *, objective: Any = OBJECTIVE, **mode: Any
) -> kernels.PolicyLossOutput:
    """`kernels.policy_loss` of the problem; `mode` holds its mode keywords."""
    return kernels.policy_loss(
        p.hidden, p.weight, p.targets, logprobs_gen=p.logprobs_gen, advantages=p.advantages,
        token_weights=p.token_weights, objective=objective, backend=backend, **mode,
    )  # fmt: skip


def ours(p: LossProblem, backend: str | None, **mode: Any) -> LossAnswer:
    """Our loss with its gradients."""
    out = policy_loss(p, backend, **mode)
    return backward(out.loss, out.logprobs, out.entropy, p)


def ours_per_token(p: LossProblem, backend: str) -> LossAnswer:
    """`kernels.linear_logprob`, and the loss in plain torch on top (8NHV)."""
    out = kernels.linear_logprob(p.hidden, p.weight, p.targets, backend=backend, chunk_rows=p.chunk_rows)
    return backward(cispo(out.logprobs, p), out.logprobs, out.entropy, p)


def naive(p: LossProblem, dtype: torch.dtype) -> LossAnswer:
    """Whole logits in `dtype`, log_softmax, gather, autograd."""
    logits = F.linear(p.hidden.to(dtype), p.weight.to(dtype))
    logp = torch.log_softmax(logits, dim=-1).gather(1, p.targets[:, None])[:, 0]
    return backward(cispo(logp, p), logp, None, p)


def torch_linear_cross_entropy(p: LossProblem) -> LossAnswer:
    """CISPO on the library's cross entropy, which is −log π per token; its gradient is weighted outside."""
    op, options = F.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions
    chunked = options(batch_chunk_size=p.chunk_rows, chunking_method=None)
    logp = -op(p.hidden, p.weight, p.targets, reduction="none", options=chunked)
    return backward(cispo(logp, p), logp, None, p)


def liger(p: LossProblem) -> LossAnswer:
    """Sequences of one token, since its advantages cannot differ within a sequence."""
    peer = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    n = len(p.targets)
    loss_of = peer.LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type="cispo", epsilon_high=MAX_RATIO, compiled=False, use_ref_model=False,
        chunk_size=p.chunk_rows,
    )  # fmt: skip
    loss, _ = loss_of(
        p.hidden[:, None], p.weight, p.targets[:, None], torch.ones_like(p.targets[:, None]),
        p.advantages * p.token_weights * n, old_per_token_logps=p.logprobs_gen[:, None],
    )  # fmt: skip
    return backward(loss, None, None, p)


def liger_per_token(p: LossProblem) -> LossAnswer:
    """CISPO on Liger's op for losses of one's own; its CuTe kernels need a Hopper GPU."""
    peer = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    op = peer.LigerFusedLinearScaledCrossEntropyFunction.apply
    nll, entropy = op(p.hidden, p.weight, p.targets, 1.0, -100, 1, True)
    return backward(cispo(-nll, p), -nll, entropy, p)


def cut_cross_entropy(p: LossProblem, **options: Any) -> LossAnswer:
    """CISPO on the library's cross entropy, which is −log π per token; its gradient is weighted outside."""
    peer = importlib.import_module("cut_cross_entropy")
    impl = "cce" if p.hidden.is_cuda else "torch_compile"
    logp = -peer.linear_cross_entropy(p.hidden, p.weight, p.targets, reduction="none", impl=impl, **options)
    return backward(cispo(logp, p), logp, None, p)


def quack(p: LossProblem) -> LossAnswer:
    """Σ −log π, since its fused loss has no weight per token: no results that could be compared."""
    peer = importlib.import_module("quack.linear_cross_entropy")
    loss = peer.chunked_linear_cross_entropy(
        p.hidden, p.weight, p.targets, chunk_size=p.chunk_rows, reduction="sum"
    )
    torch.autograd.grad(loss, (p.hidden, p.weight))
    return LossAnswer()


def trl(p: LossProblem) -> LossAnswer:
    """TRL computes tiles of 4096 tokens by a slice of the vocabulary, here of the same size as a chunk."""
    peer = importlib.import_module("trl.kernels.chunked_logprob")
    n, _, v = p.shape
    columns = min(v, max(1, p.chunk_rows * v // min(n, peer.TOKEN_CHUNK_SIZE)))
    logp, entropy, *_ = peer.ChunkedLogProbFunction.apply(
        p.hidden, p.weight, None, p.targets, 1.0, columns, None, 1.0, ("entropy",)
    )
    return backward(cispo(logp, p), logp, entropy, p)


class Gemms:
    """The limit: X Wᵀ, dZ W and dZᵀ X alone, on buffers made at the first call; `logits` times the first.

    Whole, or `rows` at a time as the chunked losses do it. With bf16 operands on CUDA the logits are FP32, as
    an FP32 head needs them, and so is a dW that is summed over chunks.
    """

    def __init__(self, rows: int | None = None, logits: int = 1) -> None:
        self.rows, self.logits = rows, logits
        self.buffers: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def __call__(self, p: LossProblem) -> LossAnswer:
        if not self.buffers:  # the logits, their gradient (random: zeros run faster), dX and dW
            (n, h, v), x = p.shape, p.hidden
            chunk, new = min(n, self.rows or n), partial(torch.empty, device=x.device)
            wide = torch.float32 if x.is_cuda and x.dtype == torch.bfloat16 else x.dtype
            dz = new(chunk, v, dtype=x.dtype).normal_(0, 1e-3)
            dw = new(v, h, dtype=wide if chunk < n else x.dtype)
            self.buffers = new(chunk, v, dtype=wide), dz, torch.empty_like(x), dw
        z, dz, dx, dw = self.buffers
        w = p.weight.detach()
        for rows in (slice(i, i + len(z)) for i in range(0, len(p.hidden), len(z))):
            x = p.hidden.detach()[rows]
            c = len(x)
            for _ in range(self.logits):
                wide_mm(x, w.t(), z[:c])
            torch.mm(dz[:c], w, out=dx[rows])
            wide_mm(dz[:c].t(), x, dw, add=rows.start > 0)
        return LossAnswer()


def wide_mm(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out (+)= a b, in `out`'s type straight from the accumulator; a CPU computes in that type."""
    if not a.is_cuda:
        a, b = a.to(out.dtype), b.to(out.dtype)
    options: dict[str, Any] = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)


def our_backends() -> list[str]:
    """The backends of ours for this machine's device; one that does not work here is a line that says why."""
    return ["triton", "torch"] if DEVICE == "cuda" else ["cpu", "torch"]


def all_providers(p: LossProblem) -> list[Provider]:
    """Every provider for this problem, the limit first."""
    rows = p.chunk_rows
    size = None if DEVICE == "cuda" else rows  # by free memory, as a user calls it: the bars are of that
    modes: dict[str, dict[str, Any]] = {backend: {"backend": backend} for backend in our_backends()}
    if "triton" in modes:
        modes |= {f"triton, {name}": {"backend": "triton", "row_kernel": name} for name in ROW_KERNELS}
    per_token = "per token, CISPO outside"
    return [
        Provider(LIMIT, Gemms(), "the limit: whole, no loss"),
        Provider(f"{LIMIT}, chunked", Gemms(rows), f"the limit: {rows} rows at a time"),
        Provider("4 bare GEMMs", Gemms(logits=2), "the limit of gradients per token: logits twice"),
        *(Provider(f"ours ({name})", partial(ours, chunk_rows=size, **mode)) for name, mode in modes.items()),
        *(
            Provider(f"ours per token ({name})", partial(ours_per_token, backend=name), per_token)
            for name in our_backends()
        ),
        *peers(),
    ]


def peers() -> list[Provider]:
    """The libraries' losses, and those that one writes without a library."""
    plain = "per token, log_softmax + gather, no entropy"
    unfiltered = partial(cut_cross_entropy, filter_eps=None)
    exact_cce = [Provider("Cut-Cross-Entropy, unfiltered", unfiltered, "per token, no entropy")]
    return [
        Provider("naive FP32", partial(naive, dtype=torch.float32), plain),
        Provider("naive bf16", partial(naive, dtype=torch.bfloat16), plain),
        Provider("torch linear_cross_entropy", torch_linear_cross_entropy, "per token, no entropy"),
        Provider("Liger CISPO", liger, "one-token sequences; no log-probs out"),
        Provider("Liger scaled cross entropy", liger_per_token, "per token, CISPO outside"),
        Provider("Cut-Cross-Entropy", cut_cross_entropy, "per token, small gradients filtered, no entropy"),
        *(exact_cce if DEVICE == "cuda" else []),
        Provider("QuACK linear cross entropy", quack, "unweighted Σ −log π: time and memory alone"),
        Provider("TRL chunked log-prob", trl, "per token, CISPO outside"),
    ]
