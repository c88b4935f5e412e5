"""Problems for the fused loss, and how far tensors lie apart."""

from __future__ import annotations

import torch
from torch import Tensor


def problem(n: int, h: int, v: int, std: float = 1.0, seed: int = 0, noise: float = 0.5) -> dict[str, Tensor]:
    """Arguments of `policy_loss`: numbers of bf16 in FP32, ratios on both sides of 1."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    hidden, weight = rand(n, h).bfloat16().float(), (rand(v, h) * std / h**0.5).bfloat16().float()
    targets = torch.randint(v, (n,), generator=g)
    logp = torch.log_softmax((hidden @ weight.T).double(), 1)[torch.arange(n), targets].float()
    return {
        "hidden": hidden, "weight": weight, "targets": targets, "logprobs_gen": logp + noise * rand(n),
        "advantages": rand(n), "token_weights": torch.rand(n, generator=g) / max(n, 1),
    }  # fmt: skip


def error(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over that of b."""
    return float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
