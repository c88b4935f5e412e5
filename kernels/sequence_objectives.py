"""Objectives of which a token's term depends on its whole sequence, or on all tokens of the call.

Where the learner computes a batch in micro-batches, a call's tokens are those of one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .term import Objective, SequenceObjective, Term, check_fields
from .token_objectives import CISPO, DPPO, DRPO, Clip, Gamma, IcePop

if TYPE_CHECKING:
    from torch import Tensor


def log_ratio_of_sequence(log_ratio: Tensor, sequences: Tensor, weights: Tensor, mean: bool) -> Tensor:
    """(N,) the sum of log ρ over each token's sequence, or its mean weighted by the token weights.

    Tokens of weight 0 are left out. Sums in a fixed order on every device (no atomics).
    """
    import torch

    if not len(log_ratio):  # as on a rank without tokens
        return log_ratio
    order = sequences.argsort(stable=True)
    _, position, lengths = sequences[order].unique_consecutive(return_inverse=True, return_counts=True)
    weights = weights if mean else (weights != 0).to(weights.dtype)
    summands = torch.stack([log_ratio * weights, weights], 1)[order].double()
    total, weight = torch.segment_reduce(summands, "sum", lengths=lengths).unbind(1)
    result = (total / weight.where(weight != 0, 1) if mean else total).to(log_ratio.dtype)
    return torch.empty_like(log_ratio).index_copy_(0, order, result[position])


@dataclass(frozen=True, slots=True)
class OverSequences:
    """A token objective with the ratio of the whole sequence, s, in the place of ρ.

        s = Π ρ over the sequence, or with `mean` its geometric mean, exp(mean log ρ)

    The mean is weighted by the token weights: it is the papers' if the tokens of a sequence have equal
    weights. All tokens of a sequence must have the same Â. The product goes with an objective that holds its
    ratio constant (sg); ValueError for others, whose derivative would have to grow with the length.
    """

    objective: Objective
    mean: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.objective, DPPO | DRPO):
            raise ValueError(f"{self.objective} compares probabilities of a token; a sequence has none")
        if not self.mean and not isinstance(self.objective, CISPO | IcePop | Gamma):
            raise ValueError(
                f"{self.objective} differentiates its ratio; expected mean=True, or CISPO or IcePop"
            )

    def over_sequences(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Term:
        log_s = log_ratio_of_sequence(logp - logprobs_gen, sequences, weights, self.mean)
        return self.objective(logp, logp - log_s, advantages)


def GSPO(low: float = 3e-4, high: float = 4e-4) -> OverSequences:
    """PPO's clip with one ratio per sequence (arXiv 2507.18071, eq. 5 to 7).

        J = Σ min(s Â, clip(s, 1 − low, 1 + high) Â),    s = exp(mean over the sequence of log π/μ)

    With `token_weights(..., "sample")` the sum is the paper's mean over sequences. With `"token"` or `"sum"`,
    where a sequence counts by its length, it is LUSPO (arXiv 2602.05261).
    """
    return OverSequences(Clip(low, high), mean=True)


def SequenceTIS(max_ratio: float = 2.0) -> OverSequences:
    """REINFORCE with one truncated weight per sequence (verl's Seq-TIS, TRL's `sequence_truncate`).

    J = Σ sg(min(s, max_ratio)) · Â · log π,    s = Π ρ over the sequence
    """
    return OverSequences(CISPO(max_ratio))


def SequenceMIS(low: float = 0.5, high: float = 2.0) -> OverSequences:
    """The same, where sequences with s outside [low, high] leave (verl's Seq-MIS, TRL's `sequence_mask`).

    J = Σ sg(s · 1[low ≤ s ≤ high]) · Â · log π
    """
    return OverSequences(IcePop(low, high))


def VESPO() -> OverSequences:
    """REINFORCE with a soft weight per sequence (arXiv 2602.10693; the settings are its code's and TRL's).

    J = Σ sg(φ(s)) · Â · log π,    φ(s) = s^k e^{λ (1 − s)},    s = Π ρ over the sequence
    """
    return OverSequences(Gamma())


@dataclass(frozen=True, slots=True)
class GMPO:
    """The geometric mean of clipped token ratios (arXiv 2507.20673).

        J = Σ exp(mean over the sequence of c(log ρ)) · Â,    c = min(·, high) if Â > 0, else max(·, −low)

    The mean is weighted by the token weights, as in `OverSequences`; the bounds are those of log ρ.
    """

    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        check_fields(self, lambda: self.low >= 0 <= self.high, "low, high ≥ 0", "low", "high")

    def over_sequences(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Term:
        free = logp - logprobs_gen
        clipped = free.clamp(max=self.high).where(advantages > 0, free.clamp(min=-self.low))
        s = log_ratio_of_sequence(clipped, sequences, weights, mean=True).clamp(max=80.0).exp()
        loss, bounded = -s * advantages, clipped != free
        return Term(loss, loss.masked_fill(bounded, 0.0), s, bounded)


# (N,) bool, from the arguments of `over_sequences`
Rule = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class Masked:
    """An objective without the tokens that a rule selects. They stay in every denominator.

    J = Σ (1 − sg(rule)) · j,    j the objective's summand
    """

    objective: Objective | SequenceObjective
    rule: Rule

    def over_sequences(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Term:
        inputs = logp, logprobs_gen, advantages, sequences, weights
        if isinstance(self.objective, SequenceObjective):
            term = self.objective.over_sequences(*inputs)
        else:
            term = self.objective(*inputs[:3])
        out = self.rule(*inputs)
        loss, slope = term.loss.masked_fill(out, 0.0), term.dloss_dlogp.masked_fill(out, 0.0)
        return Term(loss, slope, term.ratio, term.truncated | out)


@dataclass(frozen=True, slots=True)
class OutsideBand:
    """Selects sequences whose ratio s is outside [low, high], `negative` only those with Â < 0.

    `mean`: s is the geometric mean of ρ (verl's Geo-RS), else the product. DeepSeek-V3.2's mask of off-policy
    sequences (arXiv 2512.02556), Â < 0 and mean log μ/π > δ, is `OutsideBand(exp(−δ), negative=True)`.
    """

    low: float
    high: float = float("inf")
    mean: bool = True
    negative: bool = False

    def __post_init__(self) -> None:
        check_fields(self, lambda: 0 <= self.low < self.high, "0 ≤ low < high", "low", "high")

    def __call__(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Tensor:
        s = log_ratio_of_sequence(logp - logprobs_gen, sequences, weights, self.mean).clamp(max=80.0).exp()
        outside = (s < self.low) | (s > self.high)
        return outside & (advantages < 0) if self.negative else outside


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """Selects the fewest tokens without which the mean of (log ρ)² is at most `threshold`.

    Of the tokens that PPO could clip: Â > 0 and ρ > 1, or Â < 0 and ρ < 1.
    """

    threshold: float = 0.04

    def __post_init__(self) -> None:
        check_fields(self, lambda: self.threshold >= 0, "a number, 0 or more", "threshold")

    def __call__(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Tensor:
        log_ratio = logp - logprobs_gen
        outward = (log_ratio * advantages > 0) & (weights != 0)
        squares, order = log_ratio.square().masked_fill(~outward, float("inf")).sort(stable=True)
        means = squares.double().cumsum(0) / squares.new_ones(len(squares)).cumsum(0)
        return outward.index_put((order,), means > self.threshold) & outward


def M2PO(threshold: float = 0.04) -> Masked:
    """The second moment of log ρ bounded by a mask (arXiv 2510.01161).

    J = Σ M · ρ Â,    M = 0 for the tokens of the largest (log ρ)², until their mean is at most `threshold`
    """
    return Masked(Clip(1.0, float("inf")), SecondMoment(threshold))


def _covariance(logp: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """(N,) each token's summand of the covariance of log π and Â, over the tokens in the loss; others −∞."""
    counted = weights != 0
    centred = [x - x.where(counted, 0).sum() / counted.sum().clamp(min=1) for x in (logp, advantages)]
    return (centred[0] * centred[1]).masked_fill(~counted, float("-inf"))


def _largest(x: Tensor, share: float, weights: Tensor) -> Tensor:
    """(N,) True for the largest x: this share of the tokens in the loss, and at least one."""
    number = ((weights != 0).sum() * share).floor().clamp(min=1)
    order = x.argsort(descending=True, stable=True)
    ranks = order.new_empty(len(x)).index_copy_(0, order, order.new_ones(len(x)).cumsum(0))
    return (ranks <= number) & (x > float("-inf"))


@dataclass(frozen=True, slots=True)
class HighCovariance:
    """Selects a random `share` of the tokens, among those with (log π − mean) (Â − mean) in (low, high).

    A hash of log μ stands for random numbers, so that a replay selects the same.
    """

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def __call__(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Tensor:
        covariance = _covariance(logp, advantages, weights)
        eligible = (covariance > self.low) & (covariance < self.high)
        random = ((logprobs_gen.double() * 1e3).sin() * 1e4).frac()
        return _largest(random.masked_fill(~eligible, float("-inf")), self.share, weights)


def ClipCov(low: float = 1.0, high: float = 1.0) -> Masked:
    """No gradient for a few tokens of high covariance (arXiv 2505.22617).

    J = Σ 0 for those that `HighCovariance` selects, PPO's clip for others; the authors' is as wide as 1

    The authors never select a token that the clip stops anyway; here one may be.
    """
    return Masked(Clip(low, high), HighCovariance())


@dataclass(frozen=True, slots=True)
class KLCov:
    """A penalty on the `share` of tokens of the highest covariance (arXiv 2505.22617).

    J = Σ ρ Â − β |log ρ| for those with the largest (log π − mean) (Â − mean), ρ Â for others
    """

    share: float = 2e-4
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, lambda: 0 < self.share <= 1, "0 < share ≤ 1", "share")

    def over_sequences(
        self, logp: Tensor, logprobs_gen: Tensor, advantages: Tensor, sequences: Tensor, weights: Tensor
    ) -> Term:
        term, log_ratio = Clip(1.0, float("inf"))(logp, logprobs_gen, advantages), logp - logprobs_gen
        chosen = _largest(_covariance(logp, advantages, weights), self.share, weights)
        beta = self.coefficient * chosen
        loss, slope = term.loss + beta * log_ratio.abs(), term.dloss_dlogp + beta * log_ratio.sign()
        return Term(loss, slope, term.ratio, chosen)
