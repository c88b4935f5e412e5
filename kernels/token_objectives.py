"""The token-level objectives, each as in its paper. `kernels.term` has the notation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .term import Term, check_fields, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CISPO:
    """Truncated importance sampling on the generator's log-probs (arXiv 2506.13585; 2510.13786).

        J = Σ sg(min(ρ, ρ_max)) · Â · log π

    `max_ratio` is ρ_max, an absolute upper bound; `math.inf` gives plain importance sampling. REINFORCE with
    TIS is the same formula.
    """

    max_ratio: float = 4.0

    def __post_init__(self) -> None:
        check_fields(self, lambda: self.max_ratio > 0, "a number above 0, or math.inf", "max_ratio")

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = ratio_of(logp, logprobs_gen)
        coefficient = -ratio.clamp(max=self.max_ratio) * advantages
        return Term(coefficient * logp, coefficient, ratio, ratio > self.max_ratio)


def TIS(max_ratio: float = 2.0) -> CISPO:
    """REINFORCE with truncated importance sampling; with one step per batch the same formula as CISPO."""
    return CISPO(max_ratio)


@dataclass(frozen=True, slots=True)
class REINFORCE:
    """J = Σ Â · log π, without a ratio (Williams 1992); unbiased only where π = μ.

    With truncated importance sampling (TIS: Ionides 2008; fengyao.notion.site/off-policy-rl), that is
    J = Σ sg(min(ρ, C)) · Â · log π, use `TIS(C)`.
    """

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = ratio_of(logp, logprobs_gen)
        return Term(-advantages * logp, -advantages, ratio, ratio < 0)  # no bound


@dataclass(frozen=True, slots=True)
class SFT:
    """J = Σ log π, supervised fine-tuning (maximum likelihood): μ and Â have no effect, the ratio is 1."""

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ones = logp.new_ones(logp.shape)
        return Term(-logp, -ones, ones, ones < 0)


@dataclass(frozen=True, slots=True)
class NoReward:
    """J = 0: the penalties alone, as in on-policy distillation; see `KL`."""

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        zeros = logp.new_zeros(logp.shape)
        return Term(zeros, zeros, ratio_of(logp, logprobs_gen), zeros > 0)


@dataclass(frozen=True, slots=True)
class Clip:
    """PPO's clipped surrogate with the ratio to the generator (arXiv 1707.06347, eq. 7).

        J = Σ min(ρ Â, clip(ρ, 1 − low, 1 + high) Â)

    and with `dual` = c > 1, where Â < 0, max(that, c Â) (arXiv 1912.09729, eq. 5). `GRPO`, `DAPO` and
    `DualClip` name the settings of their papers; `Clip(1, math.inf)` is ρ Â without a bound.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = math.inf

    def __post_init__(self) -> None:
        expected, names = "0 ≤ low ≤ 1, high ≥ 0, dual > 1", ("low", "high", "dual")
        check_fields(self, lambda: 0 <= self.low <= 1 and self.high >= 0 and self.dual > 1, expected, *names)

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = ratio_of(logp, logprobs_gen)
        free = ratio * advantages  # its derivative in log π is itself; that of a bound is 0
        surrogate = free.minimum(ratio.clamp(1 - self.low, 1 + self.high) * advantages)
        if math.isfinite(self.dual):
            surrogate = surrogate.maximum(self.dual * advantages).where(advantages < 0, surrogate)
        bounded = surrogate != free
        return Term(-surrogate, -free.masked_fill(bounded, 0.0), ratio, bounded)


def GRPO(low: float = 0.2, high: float = 0.2) -> Clip:
    """PPO's clip at ±.2 (arXiv 2402.03300, eq. 3); its mean is `token_weights(..., "sample")`."""
    return Clip(low, high)


def DAPO(low: float = 0.2, high: float = 0.28) -> Clip:
    """Clip-higher, 1 − .2 to 1 + .28 (arXiv 2503.14476, eq. 8 and 10).

    The paper's formula averages over the tokens of each prompt's group, `token_weights(..., "prompt")`; its
    code averages over the tokens of the whole batch, `token_weights(..., "token")`.
    """
    return Clip(low, high)


def DualClip(low: float = 0.2, high: float = 0.2) -> Clip:
    """PPO's clip at ±.2, bounded below by 3 Â where Â < 0 (arXiv 1912.09729)."""
    return Clip(low, high, 3.0)


@dataclass(frozen=True, slots=True)
class IcePop:
    """Masks tokens whose ratio is outside [low, high] (arXiv 2510.18855, eq. 3 with one step per batch).

    J = Σ sg(ρ · 1[low ≤ ρ ≤ high]) · Â · log π
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_fields(self, lambda: 0 <= self.low < self.high, "0 ≤ low < high", "low", "high")

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = ratio_of(logp, logprobs_gen)
        outside = (ratio < self.low) | (ratio > self.high)
        coefficient = -(ratio * advantages).masked_fill(outside, 0.0)
        return Term(coefficient * logp, coefficient, ratio, outside)


@dataclass(frozen=True, slots=True)
class DPPO:
    """Masks tokens whose *probability* moved too far where Â pushes it (arXiv 2602.04879).

        J = Σ sg(M · min(ρ, max_ratio)) · Â · log π
        M = 0 where Â > 0, π > μ, D > high, and where Â < 0, π < μ, D > low; else 1

    D is the divergence of the token's Bernoulli distributions: `tv`, |π − μ|, or `kl`, that is
    μ log μ/π + (1 − μ) log (1 − μ)/(1 − π). The bounds .2 are prime-rl's; verl has .15 for `tv`, .05 for
    `kl`, and max_ratio 20.
    """

    low: float = 0.2
    high: float = 0.2
    divergence: Literal["tv", "kl"] = "tv"
    max_ratio: float = math.inf

    def __post_init__(self) -> None:
        check_fields(self, lambda: self.low >= 0 <= self.high, "low, high ≥ 0", "low", "high")
        check_fields(self, lambda: self.max_ratio > 0, "a number above 0, or math.inf", "max_ratio")
        check_fields(self, lambda: self.divergence in ("tv", "kl"), "divergence tv or kl", "divergence")

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        term = CISPO(self.max_ratio)(logp, logprobs_gen, advantages)
        old, moved = logprobs_gen.exp(), logp.exp() - logprobs_gen.exp()
        divergence = moved.abs()
        if self.divergence == "kl":
            rest_old, rest = -logprobs_gen.expm1(), -logp.expm1()
            divergence = old * (logprobs_gen - logp) + rest_old.xlogy(rest_old / rest)
        bound = moved.new_full(moved.shape, self.low).masked_fill_(advantages > 0, self.high)
        masked = (moved * advantages > 0) & (divergence > bound)
        loss, slope = term.loss.masked_fill(masked, 0.0), term.dloss_dlogp.masked_fill(masked, 0.0)
        return Term(loss, slope, term.ratio, term.truncated | masked)


def DPPOKL(low: float = 0.05, high: float = 0.05) -> DPPO:
    """DPPO with the binary KL, and verl's bound."""
    return DPPO(low, high, "kl")


@dataclass(frozen=True, slots=True)
class DRPO:
    """DPPO's trust region as a smooth penalty (arXiv 2606.09821, eq. 8).

        J = Σ ρ Â − |Â| / (2 δ) · μ (ρ − 1)²

    Its derivative is ρ Â (1 − sign(Â) (π − μ) / δ): updates that lead away from μ fade, and turn where
    |π − μ| > δ, which the paper's own δ, 12.5, never reaches.
    """

    delta: float = 12.5

    def __post_init__(self) -> None:
        check_fields(self, lambda: self.delta > 0, "a number above 0", "delta")

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = ratio_of(logp, logprobs_gen)
        free, moved = ratio * advantages, logp.exp() - logprobs_gen.exp()
        penalty = advantages.abs() * moved * (ratio - 1) / (2 * self.delta)
        slope = -free * (1 - advantages.sign() * moved / self.delta)
        return Term(penalty - free, slope, ratio, ratio < 0)  # no bound


@dataclass(frozen=True, slots=True)
class SAPO:
    """A smooth gate in place of the clip (arXiv 2511.20347).

        J = Σ 4/τ · σ(τ (ρ − 1)) · Â,    τ = `positive` where Â > 0, else `negative`

    At ρ = 1 its gradient is that of ρ Â; far from 1 it fades, sooner with a larger τ.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        check_fields(self, lambda: self.positive > 0 < self.negative, "both above 0", "positive", "negative")

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio = ratio_of(logp, logprobs_gen)
        tau = advantages.new_full(advantages.shape, self.negative).masked_fill_(advantages > 0, self.positive)
        gate, rest = (tau * (ratio - 1)).sigmoid(), (tau * (1 - ratio)).sigmoid()
        slope = -4 * gate * rest * ratio * advantages
        return Term(-4 / tau * gate * advantages, slope, ratio, ratio < 0)  # no bound


@dataclass(frozen=True, slots=True)
class Gamma:
    """REINFORCE weighted by the shape of a Gamma density, 1 at ρ = 1; `VESPO` applies it to whole sequences.

    J = Σ sg(φ(ρ)) · Â · log π,    φ(ρ) = ρ^k e^{λ (1 − ρ)},    k and λ by the sign of Â (0 is positive)
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __call__(self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
        ratio, positive = ratio_of(logp, logprobs_gen), advantages >= 0
        k = ratio.new_full(ratio.shape, self.k_negative).masked_fill_(positive, self.k_positive)
        rate = ratio.new_full(ratio.shape, self.lambda_negative).masked_fill_(positive, self.lambda_positive)
        coefficient = -(k * (logp - logprobs_gen).clamp(max=80.0) + rate * (1 - ratio)).exp() * advantages
        return Term(coefficient * logp, coefficient, ratio, ratio < 0)  # no bound
