"""What turns a log-probability into a loss term: each objective reads like its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Term:
    """Per token: the loss term (to be minimised), its derivative in log π, and the ratio ρ."""

    loss: Tensor  # (N,)
    dloss_dlogp: Tensor  # (N,)
    ratio: Tensor  # (N,) ρ = π_train / π_gen
    truncated: Tensor  # (N,) bool: the bound was active


class Objective(Protocol):
    """A token-level objective. Weights and sums are the op's business."""

    def __call__(self, logp: Tensor, logp_gen: Tensor, advantages: Tensor) -> Term:
        """The term of each token; all arguments are (N,) FP32 (or FP64) without gradient."""
        ...


@dataclass(frozen=True, slots=True)
class CISPO:
    """Truncated importance sampling on the generator's log-probs (arXiv 2506.13585; 2510.13786).

        J = Σ sg(min(ρ, ρ_max)) · Â · log π,    ρ = π_train / π_gen per token

    `max_ratio` is ρ_max, one absolute upper bound. With `math.inf` this is plain importance-weighted
    REINFORCE (TIS without a bound).
    """

    max_ratio: float = 4.0

    def __post_init__(self) -> None:
        if not self.max_ratio > 0:
            raise ValueError(f"CISPO: max_ratio is {self.max_ratio}; expected a number above 0, or math.inf")

    def __call__(self, logp: Tensor, logp_gen: Tensor, advantages: Tensor) -> Term:
        """loss = −min(ρ, ρ_max) · Â · log π, with the ratio held constant."""
        ratio = torch.exp(logp - logp_gen)
        bounded = ratio.clamp(max=self.max_ratio) if math.isfinite(self.max_ratio) else ratio
        coefficient = -bounded * advantages
        return Term(coefficient * logp, coefficient, ratio, ratio > self.max_ratio)
