"""Forward and backward of the policy loss, chunk by chunk: logits, statistics, terms, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from .backends import FusedTerms, SinglePass
from .check import check_term
from .head import LMHead, chunks
from .rows import Gradient, Softmax, gradient, merge_over, softmax
from .settings import Settings
from .term import SequenceObjective, Term
from .tokens import Tokens

STATS = (
    "ratio/mean", "ratio/min", "ratio/max", "ratio/truncated", "kl/k1", "kl/k3", "kl/ref", "entropy", "ess",
)  # fmt: skip


@dataclass(slots=True)
class StepOutputs:
    """The results of one call, filled chunk by chunk: values per token, and the gradients needed."""

    logp: Tensor  # (N,)
    entropy: Tensor  # (N,)
    loss: Tensor  # (N,) the term with its penalties, without its weight
    ratio: Tensor  # (N,)
    truncated: Tensor  # (N,) 1 where the bound was active, else 0
    kl_ref: Tensor  # (N,)
    d_hidden: Tensor | None  # (N, H) in `gradient_dtype`
    d_weight: Tensor | None  # (V, H) in `d_weight_dtype`
    sums: list[Tensor] = field(default_factory=list)  # of weight · loss, where a kernel summed `loss`

    @staticmethod
    def empty(hidden: Tensor, head: LMHead, needs_hidden: bool, needs_weight: bool) -> StepOutputs:
        """Tensors for these tokens."""
        new = partial(hidden.new_zeros, dtype=head.dtype)
        n = len(hidden)
        loss, ratio, truncated, kl_ref = new((4, n))  # not the other two: an op's results share no memory
        gradients = head.empty_gradients(hidden, needs_hidden, needs_weight)
        return StepOutputs(new(n), new(n), loss, ratio, truncated, kl_ref, *gradients)

    def loss_sum(self, weights: Tensor) -> Tensor:
        """() Σ weight · loss over all tokens."""
        return torch.cat(self.sums).sum() if self.sums else (self.loss * weights).sum()

    def record(self, rows: slice, probs: Softmax, t: Tokens, settings: Settings, term: Term) -> Tensor:
        """Store the values of some rows, whose inputs are t; return their c = dL/dlog π."""
        loss, derivative = term.loss - settings.entropy_bonus * probs.entropy, term.dloss_dlogp
        if settings.kl is not None and t.logprobs_ref is not None:
            self.kl_ref[rows], slope = settings.kl(probs.logp, t.logprobs_ref, t.logprobs_gen)
            loss = loss + settings.kl.coefficient * self.kl_ref[rows]
            derivative = derivative + settings.kl.coefficient * slope
        self.logp[rows], self.entropy[rows], self.loss[rows] = probs.logp, probs.entropy, loss
        self.ratio[rows], self.truncated[rows] = term.ratio, term.truncated.to(loss.dtype)
        return t.weights * derivative

    def stats(self, logprobs_gen: Tensor, counted: Tensor | None) -> Tensor:
        """(len(STATS),) statistics over the tokens in the loss (None: all); zeros if there are none."""
        if not len(self.logp):
            return self.logp.new_zeros(len(STATS))
        number = len(self.logp) if counted is None else counted.sum().clamp(min=1)

        def mean(x: Tensor) -> Tensor:
            return (x if counted is None else x.where(counted, 0)).sum() / number

        log_ratio, ratio = self.logp - logprobs_gen, self.ratio
        if counted is not None:
            ratio = ratio.where(counted, 0)
        highest = ratio.max()
        lowest = (ratio if counted is None else ratio.where(counted, highest)).min()
        share = ratio / highest.clamp(min=1e-30)  # the square of a large ratio would overflow
        return torch.stack([
            mean(ratio), lowest, highest, mean(self.truncated),
            -mean(log_ratio),  # k1 estimate of KL(π_gen ‖ π_train); the generator sampled the tokens
            mean(torch.expm1(log_ratio) - log_ratio),  # k3 estimate of the same: never negative
            mean(self.kl_ref), mean(self.entropy),
            share.sum() ** 2 / (number * share.square().sum()).clamp(min=1e-30),
        ])  # fmt: skip


Terms = Callable[[slice, Tensor], Term]  # the terms of some rows, given these rows and their log-probs


def make_terms(head: LMHead, hidden: Tensor, tokens: Tokens) -> Terms:
    """The objective as a function of a chunk. One over sequences scores all tokens first (2NHV FLOP more)."""
    objective, t = head.settings.objective, tokens
    if not isinstance(objective, SequenceObjective):
        return lambda rows, logp: check_term(
            objective(logp, t.logprobs_gen[rows], t.advantages[rows]), len(logp)
        )
    if t.sequences is None:
        raise ValueError(f"{objective} needs sequences (N,): the sequence of each token")
    logp = softmax(head.statistics(hidden, t.targets, t.inverse_temperature)).logp
    term = check_term(
        objective.over_sequences(logp, t.logprobs_gen, t.advantages, t.sequences, t.weights), len(logp)
    )
    return lambda rows, _: Term(
        term.loss[rows], term.dloss_dlogp[rows], term.ratio[rows], term.truncated[rows]
    )


def train(head: LMHead, hidden: Tensor, tokens: Tokens, outputs: StepOutputs) -> None:
    """Forward and backward, chunk by chunk: 6NHV FLOP, or 2NHV less for each gradient not needed."""
    terms, n = make_terms(head, hidden, tokens), len(hidden)
    if outputs.d_hidden is None and outputs.d_weight is None:
        probs = softmax(head.statistics(hidden, tokens.targets, tokens.inverse_temperature))
        outputs.record(slice(0, n), probs, tokens, head.settings, terms(slice(0, n), probs.logp))
        return
    step = _two_pass if head.settings.row_kernel == "two-pass" else _single_pass
    size = head.chunk_rows(n)
    buffered = 0 if head.settings.row_kernel == "fused-epilogue" else size  # that one has no FP32 logits
    buffer = head.logits_buffer(hidden, buffered)
    for rows in chunks(n, size):
        step(head, hidden[rows], tokens[rows], outputs, terms, rows, buffer[: rows.stop - rows.start])


def _terms_and_gradient(
    head: LMHead, stats: Tensor, t: Tokens, outputs: StepOutputs, terms: Terms, rows: slice
) -> Gradient:
    """Store the values of some rows, whose inputs are t; return their logits' gradient."""
    settings, o = head.settings, outputs
    stats = stats if settings.group is None else merge_over(settings.group, stats)
    if hasattr(head.backend, "terms") and cast(FusedTerms, head.backend).has_terms(settings):
        values = [x[rows] for x in (o.logp, o.entropy, o.ratio, o.truncated, o.kl_ref)]
        g, sums = cast(FusedTerms, head.backend).terms(stats, t, settings, values)
        outputs.sums.append(sums)
        return g
    probs = softmax(stats)
    c = outputs.record(rows, probs, t, settings, terms(rows, probs.logp))
    e = -settings.entropy_bonus * t.weights if settings.entropy_bonus else None
    return gradient(probs, c, e, t.inverse_temperature)


def _two_pass(
    head: LMHead, h: Tensor, t: Tokens, outputs: StepOutputs, terms: Terms, rows: slice, z: Tensor
) -> None:
    head.logits(h, z)
    scale = t.inverse_temperature
    stats = head.backend.row_stats(z, t.targets - head.first, scale, head.settings.cap)
    g = _terms_and_gradient(head, stats, t, outputs, terms, rows)
    head.add_gradients(z, h, t.targets, scale, g, rows, outputs.d_hidden, outputs.d_weight)


def _single_pass(
    head: LMHead, h: Tensor, t: Tokens, outputs: StepOutputs, terms: Terms, rows: slice, z: Tensor
) -> None:
    """Without a second pass: bf16 E = e^{u − anchor} replaces the logits, with Ê_y = −others at the target.

    The gradients follow from it with one scale per row, s = −c / total: dX = s (Ê W), dW = Êᵀ (s h).
    """
    backend = cast(SinglePass, head.backend)
    if head.settings.row_kernel == "fused-epilogue":
        exp, stats = backend.fused_epilogue(h, head.weight, t.targets, t.inverse_temperature, t.logprobs_gen)
    else:
        head.logits(h, z)
        exp, stats = backend.single_pass(z, t.targets, t.inverse_temperature, t.logprobs_gen)
    scale = _terms_and_gradient(head, stats, t, outputs, terms, rows).a[:, None]
    if outputs.d_hidden is not None:
        dx = h.new_empty(h.shape, dtype=head.dtype)
        backend.d_hidden(exp, head.weight, dx)
        outputs.d_hidden[rows] = dx.mul_(scale)
    if outputs.d_weight is not None:
        backend.add_d_weight(exp, (h * scale).to(h.dtype), outputs.d_weight, first=not rows.start)
