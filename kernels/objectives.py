"""The objectives, which turn log-probabilities into loss terms, and the table of their names.

Notation: π = π_train, μ = π_gen (the generator), ρ = π/μ per token, Â the advantage, sg stops the gradient.
Terms are minimised. The op sums weight · term and multiplies the derivative by the gradient of log π.
Importing this module does not import torch: the trainer's configuration reads the table where torch is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Term:
    """Per token: the loss term (to be minimised), its derivative in log π, and the ratio ρ."""

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
    """An objective over whole sequences. The op scores all tokens first, then trains."""

    def over_sequences(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Term:
        """As `Objective`, but called once with all tokens; sequences (N,) are the ids of their sequences.

        The derivative of Σ_t weights_t · loss_t in log π_t is weights_t · dloss_dlogp_t.
        """
        ...


def _ratio(logp: Tensor, logprobs_gen: Tensor) -> Tensor:
    """ρ, at most e⁸⁰. Generators report −9999 for an impossible token: infinity · 0 would be NaN."""
    return (logp - logprobs_gen).clamp(max=80.0).exp()


def _check(name: str, holds: bool, expected: str, **settings: float | None) -> None:
    if not holds:
        values = ", ".join(f"{key} is {value}" for key, value in settings.items())
        raise ValueError(f"{name}: {values}; expected {expected}")


@dataclass(frozen=True, slots=True)
class CISPO:
    """Truncated importance sampling on the generator's log-probs (arXiv 2506.13585; 2510.13786).

        J = Σ sg(min(ρ, ρ_max)) · Â · log π

    `max_ratio` is ρ_max, an absolute upper bound; `math.inf` gives plain importance sampling. REINFORCE with
    TIS is the same formula.
    """

    max_ratio: float = 4.0

    def __post_init__(self) -> None:
        _check("CISPO", self.max_ratio > 0, "a number above 0, or math.inf", max_ratio=self.max_ratio)

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = _ratio(logp, logprobs_gen)
        coefficient = -ratio.clamp(max=self.max_ratio) * advantages
        return Term(coefficient * logp, coefficient, ratio, ratio > self.max_ratio)


@dataclass(frozen=True, slots=True)
class REINFORCE:
    """J = Σ Â · log π, without a ratio (Williams 1992); unbiased only where π = μ.

    With truncated importance sampling (TIS: Ionides 2008; fengyao.notion.site/off-policy-rl), that is
    J = Σ sg(min(ρ, C)) · Â · log π, use `TIS(C)`.
    """

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = _ratio(logp, logprobs_gen)
        return Term(-advantages * logp, -advantages, ratio, ratio < 0)  # no bound


def TIS(max_ratio: float = 2.0) -> CISPO:
    """REINFORCE with truncated importance sampling; with one step per batch the same formula as CISPO."""
    return CISPO(max_ratio)


@dataclass(frozen=True, slots=True)
class Clip:
    """PPO's clipped surrogate with the ratio to the generator (arXiv 1707.06347, eq. 7).

        J = Σ min(ρ Â, clip(ρ, 1 − low, 1 + high) Â)

    and with `dual` = c > 1, where Â < 0, max(that, c Â) (arXiv 1912.09729, eq. 5). `GRPO`, `DAPO` and
    `DualClip` name the settings of their papers.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = math.inf

    def __post_init__(self) -> None:
        valid = 0 <= self.low <= 1 and self.high >= 0 and self.dual > 1
        _check("Clip", valid, "0 ≤ low ≤ 1, high ≥ 0, dual > 1", low=self.low, high=self.high, dual=self.dual)

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = _ratio(logp, logprobs_gen)
        free = ratio * advantages  # its derivative in log π is itself; that of a bound is 0
        surrogate = free.minimum(ratio.clamp(1 - self.low, 1 + self.high) * advantages)
        if math.isfinite(self.dual):
            surrogate = surrogate.maximum(self.dual * advantages).where(advantages < 0, surrogate)
        bounded = surrogate != free
        return Term(-surrogate, -free.masked_fill(bounded, 0.0), ratio, bounded)


def GRPO() -> Clip:
    """PPO's clip at ±.2 (arXiv 2402.03300, eq. 3); its mean is `token_weights(..., "sample")`."""
    return Clip(0.2, 0.2)


def DAPO() -> Clip:
    """Clip-higher, 1 − .2 to 1 + .28 (arXiv 2503.14476, eq. 8 and 10).

    The paper's formula averages over the tokens of each prompt's group, `token_weights(..., "prompt")`; its
    code averages over the tokens of the whole batch, `token_weights(..., "token")`.
    """
    return Clip(0.2, 0.28)


def DualClip() -> Clip:
    """PPO's clip at ±.2, bounded below by 3 Â where Â < 0 (arXiv 1912.09729)."""
    return Clip(0.2, 0.2, 3.0)


@dataclass(frozen=True, slots=True)
class IcePop:
    """Masks tokens whose ratio is outside [low, high] (arXiv 2510.18855, eq. 3 with one step per batch).

    J = Σ sg(ρ · 1[low ≤ ρ ≤ high]) · Â · log π
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check("IcePop", 0 <= self.low < self.high, "0 ≤ low < high", low=self.low, high=self.high)

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = _ratio(logp, logprobs_gen)
        outside = (ratio < self.low) | (ratio > self.high)
        coefficient = -(ratio * advantages).masked_fill(outside, 0.0)
        return Term(coefficient * logp, coefficient, ratio, outside)


@dataclass(frozen=True, slots=True)
class GSPO:
    """PPO's clip with one ratio per sequence (arXiv 2507.18071, eq. 5 to 7).

        J = Σ min(s Â, clip(s, 1 − low, 1 + high) Â),    s = exp(mean over the sequence of log π/μ)

    The mean is weighted by the token weights: it is the paper's if the tokens of a sequence have equal
    weights. With `token_weights(..., "sample")` the sum is the paper's mean over sequences. All tokens of a
    sequence must have the same Â.
    """

    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        valid = 0 <= self.low <= 1 and self.high >= 0
        _check("GSPO", valid, "0 ≤ low ≤ 1, high ≥ 0", low=self.low, high=self.high)

    def over_sequences(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Term:
        mean = _weighted_mean(logp - logprobs_gen, sequences, weights)
        return Clip(self.low, self.high)(mean, mean.new_zeros(mean.shape), advantages)


@dataclass(frozen=True, slots=True)
class SAPO:
    """A smooth gate in place of the clip (arXiv 2511.20347).

        J = Σ 4/τ · σ(τ (ρ − 1)) · Â,    τ = `positive` where Â > 0, else `negative`

    At ρ = 1 its gradient is that of ρ Â; far from 1 it fades, sooner with a larger τ.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        valid = self.positive > 0 and self.negative > 0
        _check("SAPO", valid, "numbers above 0", positive=self.positive, negative=self.negative)

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = _ratio(logp, logprobs_gen)
        tau = advantages.new_full(advantages.shape, self.negative).masked_fill_(advantages > 0, self.positive)
        gate, rest = (tau * (ratio - 1)).sigmoid(), (tau * (1 - ratio)).sigmoid()
        slope = -4 * gate * rest * ratio * advantages
        return Term(-4 / tau * gate * advantages, slope, ratio, ratio < 0)  # no bound


def _weighted_mean(x: Tensor, sequences: Tensor, weights: Tensor) -> Tensor:
    """(N,) the mean of x over each token's sequence. Sums in a fixed order on every device (no atomics)."""
    import torch

    if not len(x):  # as on a rank without tokens
        return x
    order = sequences.argsort(stable=True)
    _, position, lengths = sequences[order].unique_consecutive(return_inverse=True, return_counts=True)
    summands = torch.stack([x * weights, weights], 1)[order].double()
    total, weight = torch.segment_reduce(summands, "sum", lengths=lengths).unbind(1)
    mean = (total / weight.where(weight != 0, 1)).to(x.dtype)
    return torch.empty_like(x).index_copy_(0, order, mean[position])


@dataclass(frozen=True, slots=True)
class KL:
    """A penalty β · k(π ‖ π_ref) per token, by one of Schulman's estimators (joschu.net/blog/kl-approx.html).

        k1 = log π/π_ref      k2 = ½ (log π/π_ref)²      k3 = π_ref/π − 1 − log π_ref/π

    Its gradient is the estimator's derivative in log π, as in other trainers: for k1 that is not a gradient
    of the KL, for k2 it is the KL's gradient if the tokens are sampled from π, and for k3 it is GRPO's.
    """

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"

    def __post_init__(self) -> None:
        known = ("k1", "k2", "k3")
        if self.estimator not in known:
            raise ValueError(f"KL: estimator is {self.estimator!r}; expected one of {', '.join(known)}")
        _check("KL", math.isfinite(self.coefficient), "a number", coefficient=self.coefficient)

    def __call__(self, logp: Tensor, logp_ref: Tensor) -> tuple[Tensor, Tensor]:
        """(k, dk/d log π), each (N,), without the coefficient."""
        log_ratio = logp - logp_ref
        match self.estimator:
            case "k1":
                return log_ratio, log_ratio.new_ones(log_ratio.shape)
            case "k2":
                return log_ratio**2 / 2, log_ratio
            case _:
                return (-log_ratio).expm1() + log_ratio, -(-log_ratio).expm1()


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """An objective that a configuration can name."""

    default: Callable[[], Any]  # makes it with its own settings
    settings: Mapping[str, str] = field(default_factory=dict)  # keys of a configuration, and its fields
    triton: str | None = None  # its branch in `triton/terms.py`; without one, torch computes its terms

    @property
    def over_sequences(self) -> bool:
        """True if it is an objective over whole sequences."""
        return isinstance(self.default(), SequenceObjective)

    def make(self, **fields: float) -> Objective | SequenceObjective:
        """The objective with these fields in place of its own."""
        objective: Objective | SequenceObjective = replace(self.default(), **fields)
        return objective


_BOUND = {"max_ratio": "max_ratio"}
_CLIP = {"clip_low": "low", "clip_high": "high"}
_MASK = {"mask_low": "low", "mask_high": "high"}
OBJECTIVES = {
    "cispo": BuiltIn(CISPO, _BOUND, "truncated"),
    "tis": BuiltIn(TIS, _BOUND, "truncated"),
    "reinforce": BuiltIn(REINFORCE, triton="plain"),
    "grpo": BuiltIn(GRPO, _CLIP, "clip"),
    "ppo": BuiltIn(GRPO, _CLIP, "clip"),
    "dapo": BuiltIn(DAPO, _CLIP, "clip"),
    "dual_clip": BuiltIn(DualClip, _CLIP, "clip"),
    "gspo": BuiltIn(GSPO, _CLIP),
    "icepop": BuiltIn(IcePop, _MASK, "mask"),
    "sapo": BuiltIn(SAPO, triton="gate"),
}
"""The table that configuration, learner, Triton backend and tests read."""
