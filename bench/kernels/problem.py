"""A policy-loss problem, its float64 solution, and the errors of an answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

MAX_RATIO = 4.0  # CISPO's bound, the same for every provider
_BLOCK_BYTES = 256 << 20  # of one float64 block of logits


@dataclass(frozen=True, slots=True)
class LossProblem:
    """One call of the loss: Σ_t weight · −min(ρ, 4) · Â · log π, tokens drawn from the policy itself."""

    hidden: Tensor  # (N, H) leaf
    weight: Tensor  # (V, H) leaf
    targets: Tensor  # (N,)
    logprobs_gen: Tensor  # (N,) FP32 nats
    advantages: Tensor  # (N,) FP32
    token_weights: Tensor  # (N,) FP32, 1/N
    chunk_rows: int  # rows of logits that a chunked provider holds at a time

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, H, V)."""
        return len(self.hidden), self.hidden.shape[1], len(self.weight)


@dataclass(frozen=True, slots=True)
class LossAnswer:
    """A provider's result; None for what it does not compute."""

    loss: Tensor | None = None
    logprobs: Tensor | None = None  # (N,)
    entropy: Tensor | None = None  # (N,)
    d_hidden: Tensor | None = None  # (N, H)
    d_weight: Tensor | None = None  # (V, H)


def make_problem(
    n: int, h: int, v: int, dtype: torch.dtype, device: str = "cpu",
    logit_std: float = 3.0, chunk_rows: int = 0, seed: int = 0,
) -> LossProblem:  # fmt: skip
    """Random normal operands with logits of standard deviation `logit_std`.

    Tokens are drawn from the policy (Gumbel-max); the generator's log-probs differ by N(0, 0.1) nats;
    advantages are N(0, 1). chunk_rows: 0 means N.
    """
    g = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=g, device=device, dtype=dtype)
    hidden, weight = normal(n, h), normal(v, h).mul_(logit_std / h**0.5)
    targets = torch.empty(n, dtype=torch.int64, device=device)
    logp = torch.empty(n, device=device)
    for rows in blocks(n, 4 * v):
        z = (hidden[rows] @ weight.t()).float()  # rounded where dtype is bf16: good enough to draw from
        uniform = torch.rand(z.shape, generator=g, device=device).clamp_(1e-20, 1 - 1e-7)
        y = (z - (-uniform.log()).log()).argmax(1)
        targets[rows] = y
        logp[rows] = torch.log_softmax(z, 1).gather(1, y[:, None])[:, 0]
    noise, advantages = (torch.randn(n, generator=g, device=device) for _ in range(2))
    return LossProblem(
        hidden.requires_grad_(), weight.requires_grad_(), targets, (logp + 0.1 * noise).clamp_(max=-1e-6),
        advantages, torch.full((n,), 1 / max(1, n), device=device), chunk_rows or max(1, n),
    )  # fmt: skip


def blocks(n: int, row_bytes: int, limit: int = _BLOCK_BYTES) -> Iterator[slice]:
    """Slices of [0, n) of at most `limit` bytes each."""
    step = max(1, limit // row_bytes)
    return (slice(start, min(n, start + step)) for start in range(0, n, step))


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """(R,) log π(target) of float64 logits (R, V): −log1p(Σ_{j≠y} e^{z_j − z_y}) keeps its digits near 0."""
    y = targets[:, None]
    below = logits - logits.gather(1, y)  # z_j − z_y
    top = below.amax(1)
    likely = -torch.log1p(below.clamp(max=700).exp().scatter(1, y, 0.0).sum(1))
    return torch.where(top < 20, likely, -torch.logsumexp(below, 1))


@torch.no_grad()
def solve(problem: LossProblem) -> LossAnswer:
    """The answer in float64, as textbooks have it, a block of rows at a time."""
    p = problem
    w = p.weight.double()
    n, h, v = p.shape
    logp, entropy, loss = (torch.empty(n, dtype=torch.float64, device=w.device) for _ in range(3))
    d_hidden = torch.empty(n, h, dtype=torch.float64, device=w.device)
    d_weight = torch.zeros(v, h, dtype=torch.float64, device=w.device)
    for rows in blocks(n, 8 * v):
        x, y = p.hidden[rows].double(), p.targets[rows, None]
        z = x @ w.t()
        top = z.amax(1, keepdim=True)
        e = (z - top).exp_()
        others = e.scatter(1, y, 0.0).sum(1, keepdim=True)
        total = others + e.gather(1, y)
        logp[rows] = log_probs(z, p.targets[rows])
        entropy[rows] = top[:, 0] + total.log()[:, 0] - (e * z).sum(1) / total[:, 0]
        ratio = (logp[rows] - p.logprobs_gen[rows].double()).exp().clamp(max=MAX_RATIO)
        c = -p.token_weights[rows].double() * ratio * p.advantages[rows].double()
        loss[rows] = c * logp[rows]
        dz = e.mul_(-c[:, None] / total).scatter_(1, y, c[:, None] * (others / total))
        d_hidden[rows] = dz @ w
        d_weight.addmm_(dz.t(), x)
    return LossAnswer(loss.sum(), logp, entropy, d_hidden, d_weight)


def errors_of(answer: LossAnswer, truth: LossAnswer) -> dict[str, float]:
    """Distance from float64: in nats for log-probs and entropy, relative for loss and gradients."""
    errors: dict[str, float] = {}
    for name, key in (("logprobs", "logp"), ("entropy", "entropy")):
        if (value := getattr(answer, name)) is not None:
            errors[f"{key}_max_abs"] = float((value.double() - getattr(truth, name)).abs().max())
    if answer.loss is not None and truth.loss is not None:
        scale = max(float(truth.loss.abs()), 1e-30)
        errors["loss_rel"] = float((answer.loss.double() - truth.loss).abs()) / scale
    for name in ("d_hidden", "d_weight"):
        if (value := getattr(answer, name)) is not None:
            errors[f"{name}_rel"] = relative(value, getattr(truth, name))
    return errors


@torch.no_grad()
def relative(value: Tensor, true: Tensor) -> float:
    """‖value − true‖ / ‖true‖ in float64, a block of rows at a time."""
    if value.shape != true.shape:
        raise ValueError(f"expected a gradient of shape {tuple(true.shape)}, given {tuple(value.shape)}")
    distance = norm = 0.0
    for rows in blocks(len(true), 8 * max(1, true.shape[1])):
        t = true[rows].double()
        distance += float((value[rows].double() - t).square().sum())
        norm += float(t.square().sum())
    return (distance / max(norm, 1e-300)) ** 0.5
