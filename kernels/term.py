"""The term of an objective, the two kinds of objectives, and the KL penalty.

Notation: π = π_train, μ = π_gen (the generator), ρ = π/μ per token, Â the advantage, sg stops the gradient.
Terms are minimised. The op sums weight · term and multiplies the derivative by the gradient of log π.
Importing this module, or those of the objectives, does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "unbiased"]


@dataclass(frozen=True, slots=True)
class Term:
    """The loss term of each token (to be minimised), its derivative in log π, and the ratio ρ."""

    loss: Tensor  # (N,)
    dloss_dlogp: Tensor  # (N,)
    ratio: Tensor  # (N,) ρ = π_train / π_gen
    truncated: Tensor  # (N,) bool: the bound was active


class Objective(Protocol):
    """A token-level objective, without weights and sums, which the op applies.

    Any function with this signature is an objective. It must be row-local: the term of token t may depend on
    the inputs of token t only, since the op calls it chunk by chunk.
    """

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        """The term of each token; all arguments are (N,) FP32 (or FP64) without gradient."""
        ...


@runtime_checkable
class SequenceObjective(Protocol):
    """An objective over sequences, or all tokens of a call. The op scores all tokens first, then trains."""

    def over_sequences(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Term:
        """Like `Objective`, but called once with all tokens; sequences (N,) are the ids of their sequences.

        The derivative of Σ_t weights_t · loss_t in log π_t is weights_t · dloss_dlogp_t. Tokens of weight 0
        may be among them and must not matter.
        """
        ...


def ratio_of(logp: Tensor, logprobs_gen: Tensor) -> Tensor:
    """ρ, at most e⁸⁰. Generators report −9999 for an impossible token: infinity · 0 would be NaN."""
    return (logp - logprobs_gen).clamp(max=80.0).exp()


def check_fields(item: object, holds: Callable[[], bool], expected: str, *names: str) -> None:
    """ValueError unless the settings with these names hold; text, which cannot be compared, does not."""
    with suppress(TypeError):
        if holds():
            return
    values = ", ".join(f"{name} is {getattr(item, name)!r}" for name in names)
    raise ValueError(f"{type(item).__name__}: {values}; expected {expected}")


@dataclass(frozen=True, slots=True)
class KL:
    """A penalty β · k(π ‖ π_ref) per token, by one of Schulman's estimators (joschu.net/blog/kl-approx.html).

        k1 = log π/π_ref      k2 = ½ (log π/π_ref)²      k3 = π_ref/π − 1 − log π_ref/π
        unbiased = ρ k3       (DeepSeek-V3.2, arXiv 2512.02556)

    Its gradient is the estimator's derivative in log π, as in other trainers: for k1 that is not a gradient
    of the KL, for k2 it is the KL's gradient if the tokens are sampled from π, and for k3 it is GRPO's. For
    `unbiased` it is ρ k3 + ρ (1 − π_ref/π) = ρ log π/π_ref, the KL's gradient for tokens sampled from μ.

    With a teacher as π_ref, `NoReward()` and β = 1, the last is on-policy distillation.
    """

    coefficient: float
    estimator: Estimator = "k3"

    def __post_init__(self) -> None:
        known = get_args(Estimator)
        check_fields(self, lambda: self.estimator in known, f"one of {', '.join(known)}", "estimator")
        check_fields(self, lambda: math.isfinite(self.coefficient), "a number", "coefficient")

    def __call__(self, logp: Tensor, logp_ref: Tensor, logprobs_gen: Tensor) -> tuple[Tensor, Tensor]:
        """(k, dk/d log π), each (N,), without the coefficient."""
        log_ratio = logp - logp_ref
        match self.estimator:
            case "k1":
                return log_ratio, log_ratio.new_ones(log_ratio.shape)
            case "k2":
                return log_ratio**2 / 2, log_ratio
        k3 = (-log_ratio).expm1() + log_ratio
        if self.estimator == "k3":
            return k3, -(-log_ratio).expm1()
        ratio = ratio_of(logp, logprobs_gen)
        return ratio * k3, ratio * log_ratio
