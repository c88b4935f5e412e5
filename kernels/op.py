"""The policy loss as one custom op: the loop over chunks of tokens, and the op's derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.backends import Backend, FusedTerms, SinglePass, choose, launching
from kernels.check import check_log_probs, check_term, check_values
from kernels.objectives import SequenceObjective, Term
from kernels.rows import Gradient, Softmax, gradient, merge_over, softmax
from kernels.settings import RowKernel, Settings, lookup
from kernels.shard import shard_offset
from kernels.tokens import Tokens

STATS = (
    "ratio/mean", "ratio/min", "ratio/max", "ratio/truncated", "kl/k1", "kl/k3", "kl/ref", "entropy", "ess",
)  # fmt: skip
CHUNK_BYTES = 128 << 20  # one chunk of logits on the CPU: larger than any cache, small beside any memory
CUDA_CHUNK_ROWS = 8192  # each chunk reads and writes dW's FP32 sum, 8VH bytes: few, large chunks
WHOLE_D_WEIGHT = 1 << 24  # elements from which cuBLAS has enough tiles not to split a sum into bf16 parts


@dataclass(frozen=True, slots=True)
class LMHead:
    """The LM head's weight, prepared for a backend, and the settings under which it is applied."""

    weight: Tensor  # in the form that the backend's `prepare` returned
    shape: torch.Size  # (V, H)
    backend: Backend
    name: str
    dtype: torch.dtype  # in which logits are accumulated
    settings: Settings
    first: int | Tensor  # token id of the weight's first row

    @staticmethod
    def prepare(
        hidden: Tensor, weight: Tensor, dtype: torch.dtype, settings: Settings, first: int | Tensor
    ) -> LMHead:
        """Choose a backend for these tensors and prepare the weight for it."""
        name, backend = choose(hidden, weight, settings.backend)
        if settings.row_kernel == "auto":
            bf16 = hidden.dtype == weight.dtype == torch.bfloat16
            single = name == "triton" and bf16 and not settings.needs_two_passes
            settings = replace(settings, row_kernel="single-pass" if single else "two-pass")
        if settings.row_kernel != "two-pass" and name != "triton":
            raise ValueError(
                f"row_kernel {settings.row_kernel!r} needs the backend 'triton'; the backend here is {name!r}"
            )
        prepared = backend.prepare(hidden, weight, dtype, settings.weight_parts)
        return LMHead(prepared, weight.shape, backend, name, dtype, settings, first)

    def chunk_rows(self, n: int) -> int:
        """The number of rows whose logits are in memory at a time."""
        size = self.settings.chunk_rows
        if size is None and self.name == "triton":
            size = CUDA_CHUNK_ROWS
        return max(1, min(n, size or CHUNK_BYTES // (len(self.weight) * self.dtype.itemsize)))

    def logits_buffer(self, hidden: Tensor, rows: int) -> Tensor:
        """(rows, V); on a GPU rows start at multiples of 64 bytes, for wide loads whatever V is."""
        v = len(self.weight)
        width = -(-v // 16) * 16 if self.name == "triton" else v
        return hidden.new_empty(rows, width, dtype=self.dtype)[:, :v]

    def d_weight_dtype(self, hidden: Tensor) -> torch.dtype:
        """In which dW is summed; bf16 where one GEMM makes it whole: that sums in FP32 and rounds once."""
        n, bf16 = len(hidden), self.weight.dtype == hidden.dtype == torch.bfloat16
        whole = self.chunk_rows(n) >= n and self.shape.numel() >= WHOLE_D_WEIGHT and not self.settings.exact
        direct = self.name == "triton" and bf16 and self.weight.shape == self.shape and whole
        return torch.bfloat16 if direct else self.dtype

    def logits(self, h: Tensor, out: Tensor) -> None:
        """out (C, V) = h Wᵀ, rounded to `logits_dtype` if that is a 16-bit type."""
        self.backend.logits(h, self.weight, out)
        if self.settings.logits_dtype != torch.float32:
            out.copy_(out.to(self.settings.logits_dtype))

    def score(self, hidden: Tensor, tokens: Tokens) -> Softmax:
        """Log-probs and entropies of all rows (2NHV FLOP)."""
        columns, n = tokens.targets - self.first, len(hidden)
        fused = getattr(self.backend, "score", None) if self.settings.logits_dtype == torch.float32 else None
        if fused is not None:
            inverse_temperature = tokens.inverse_temperature
            stats = fused(hidden, self.weight, columns, inverse_temperature, self.settings.cap)
        else:
            stats = hidden.new_empty(4, n, dtype=self.dtype)
            buffer = self.logits_buffer(hidden, self.chunk_rows(n))
            for rows in chunks(n, len(buffer)):
                z = buffer[: rows.stop - rows.start]
                self.logits(hidden[rows], z)
                stats[:, rows] = self.row_stats(z, columns[rows], tokens.inverse_temperature[rows])
        return softmax(stats if self.settings.group is None else merge_over(self.settings.group, stats))

    def row_stats(self, z: Tensor, columns: Tensor, inverse_temperature: Tensor) -> Tensor:
        """The backend's (4, C) statistics of z (C, V), over this rank's shard of the vocabulary."""
        return self.backend.row_stats(z, columns, inverse_temperature, self.settings.cap)


def chunks(n: int, most: int) -> list[slice]:
    """0..n in as few slices of at most `most` as possible, of about equal length."""
    count = -(-n // most)
    ends = [n * i // max(1, count) for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


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
        """Tensors for these tokens; the first chunk writes dW, so that it need not be zero."""
        new = partial(hidden.new_zeros, dtype=head.dtype)
        n = len(hidden)
        loss, ratio, truncated, kl_ref = new((4, n))  # not the other two: an op's results share no memory
        new_weight = hidden.new_empty if len(hidden) else hidden.new_zeros
        return StepOutputs(
            new(n), new(n), loss, ratio, truncated, kl_ref,
            hidden.new_empty(hidden.shape, dtype=gradient_dtype(hidden)) if needs_hidden else None,
            new_weight(head.shape, dtype=head.d_weight_dtype(hidden)) if needs_weight else None,
        )  # fmt: skip

    def loss_sum(self, weights: Tensor) -> Tensor:
        """() Σ weight · loss over all tokens."""
        return torch.cat(self.sums).sum() if self.sums else (self.loss * weights).sum()

    def record(self, rows: slice, probs: Softmax, t: Tokens, settings: Settings, term: Term) -> Tensor:
        """Store the values of some rows, whose inputs are t; return their c = dL/dlog π."""
        loss, derivative = term.loss - settings.entropy_bonus * probs.entropy, term.dloss_dlogp
        if settings.kl is not None and t.logprobs_ref is not None:
            self.kl_ref[rows], slope = settings.kl(probs.logp, t.logprobs_ref)
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
        raise ValueError(f"{type(objective).__name__} needs sequences (N,): the sequence of each token")
    logp = head.score(hidden, t).logp
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
        probs = head.score(hidden, tokens)
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
        g, sums = cast(FusedTerms, head.backend).terms(
            stats, t.logprobs_gen, t.advantages, t.weights, t.inverse_temperature, t.logprobs_ref, settings,
            [x[rows] for x in (o.logp, o.entropy, o.ratio, o.truncated, o.kl_ref)],
        )  # fmt: skip
        outputs.sums.append(sums)
        return g
    probs = softmax(stats)
    c = outputs.record(rows, probs, t, settings, terms(rows, probs.logp))
    e = -settings.entropy_bonus * t.weights if settings.entropy_bonus else None
    return gradient(probs, c, e, t.inverse_temperature)


def _two_pass(
    head: LMHead, h: Tensor, t: Tokens, outputs: StepOutputs, terms: Terms, rows: slice, z: Tensor
) -> None:
    settings, backend = head.settings, head.backend
    columns = t.targets - head.first
    head.logits(h, z)
    stats = head.row_stats(z, columns, t.inverse_temperature)
    g = _terms_and_gradient(head, stats, t, outputs, terms, rows)
    exact = settings.exact or torch.float32 in (h.dtype, head.weight.dtype)
    dz = backend.row_grads(
        z, columns, t.inverse_temperature, settings.cap, g.anchor, g.a, g.b, g.k, g.dz_y, exact
    )
    if outputs.d_hidden is not None:
        dx = h.new_empty(h.shape, dtype=head.dtype)
        backend.d_hidden(dz, head.weight, dx)
        if settings.group is not None:  # each rank has summed over its shard of the vocabulary
            dist.all_reduce(dx, dist.ReduceOp.SUM, settings.group)
        outputs.d_hidden[rows] = dx
    if outputs.d_weight is not None:
        backend.add_d_weight(dz, h, outputs.d_weight, first=not rows.start)


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


def gradient_dtype(x: Tensor) -> torch.dtype:
    """The type in which x's gradient is kept for the backward.

    FP32 for FP16: the gradient may only be representable in FP16 once the caller's loss scale is applied.
    """
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which forbids waiting for values of x."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def weighted_rows(token_weights: Tensor) -> Tensor | None:
    """The rows with weight ≠ 0; None for all. On CUDA the host waits for their number."""
    kept = token_weights.nonzero()[:, 0]
    return None if len(kept) == len(token_weights) else kept


def compute(
    hidden: Tensor, weight: Tensor, targets: Tensor, logprobs_gen: Tensor, advantages: Tensor,
    token_weights: Tensor, inverse_temperature: Tensor, logprobs_ref: Tensor | None,
    sequences: Tensor | None, needs_hidden: bool, needs_weight: bool, objective: int, kl: int,
    entropy_bonus: float, softcap: float | None, logits_dtype: torch.dtype, exact: bool, weight_parts: int,
    row_kernel: str, chunk_rows: int | None, drop_masked: bool, group: int, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, log-probs, entropies, STATS, d_hidden, d_weight); a gradient that is not needed is empty.

    objective, kl and group are numbers from `kernels.settings.register`; `policy_loss` documents the rest.
    """
    settings = Settings(
        lookup(objective), lookup(kl), entropy_bonus, softcap, logits_dtype, exact, weight_parts,
        cast(RowKernel, row_kernel), chunk_rows, drop_masked, lookup(group), backend,
    )  # fmt: skip
    dtype, n = inverse_temperature.dtype, len(hidden)
    tokens = Tokens(
        targets.long(), logprobs_gen, advantages, token_weights, inverse_temperature, logprobs_ref, sequences
    )
    kept = counted = None
    if not drop_masked or capturing(hidden):  # compute all rows; 0 · NaN would reach the sums
        counted = token_weights != 0
        hidden, tokens = hidden.where(counted[:, None], 0), tokens.masked(counted)
    elif (kept := weighted_rows(token_weights)) is not None:
        hidden, tokens = hidden.index_select(0, kept), tokens[kept]
    first, vocabulary = shard_offset(weight, settings.group)
    check_values(
        hidden, vocabulary, tokens.targets, tokens.inverse_temperature, advantages=tokens.advantages,
        logprobs_gen=tokens.logprobs_gen, token_weights=tokens.weights, logprobs_ref=tokens.logprobs_ref,
    )  # fmt: skip
    tokens = tokens.to(dtype)
    with torch.no_grad(), launching(hidden):
        head = LMHead.prepare(hidden, weight, dtype, settings, first)
        outputs = StepOutputs.empty(hidden, head, needs_hidden, needs_weight)
        train(head, hidden, tokens, outputs)
        check_log_probs(outputs.logp, outputs.entropy)
        loss, stats = outputs.loss_sum(tokens.weights), outputs.stats(tokens.logprobs_gen, counted)
    logp, entropy, d_hidden = outputs.logp, outputs.entropy, outputs.d_hidden
    if counted is not None:
        logp, entropy = logp.where(counted, 0), entropy.where(counted, 0)
    if kept is not None:
        logp, entropy = (x.new_zeros(n).index_copy_(0, kept, x) for x in (logp, entropy))
        if d_hidden is not None:
            d_hidden = d_hidden.new_zeros(n, d_hidden.shape[1]).index_copy_(0, kept, d_hidden)
    d_hidden = loss.new_empty(0) if d_hidden is None else d_hidden
    d_weight = loss.new_empty(0) if outputs.d_weight is None else outputs.d_weight.to(gradient_dtype(weight))
    return loss, logp, entropy, stats, d_hidden, d_weight


policy_loss = torch.library.custom_op("sigmoid_rl::policy_loss", compute, mutates_args=())


@policy_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, logprobs_gen: Tensor, advantages: Tensor,
    token_weights: Tensor, inverse_temperature: Tensor, logprobs_ref: Tensor | None,
    sequences: Tensor | None, needs_hidden: bool, needs_weight: bool, *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def new(*shape: int) -> Tensor:
        return hidden.new_empty(shape, dtype=inverse_temperature.dtype)

    n = hidden.shape[0]
    return (
        new(), new(n), new(n), new(len(STATS)),
        hidden.new_empty(hidden.shape, dtype=gradient_dtype(hidden)) if needs_hidden else new(0),
        weight.new_empty(weight.shape, dtype=gradient_dtype(weight)) if needs_weight else new(0),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.needs, ctx.inputs, ctx.types = inputs[9:11], len(inputs), [x.dtype for x in inputs[:2]]
    ctx.save_for_backward(*output[-2:])


def _scaled(d: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """d · scale, multiplied in FP32 and rounded once, without an FP32 tensor in between."""
    # On a GPU a 0-d factor would be rounded to d's type first; on a CPU it is not, and takes a faster path.
    factor = scale if d.device.type == "cpu" else scale[None]
    if torch.is_grad_enabled():  # create_graph: the result depends on scale, which `out` does not record
        return (d * factor).to(dtype)
    return torch.mul(d, factor, out=torch.empty_like(d, dtype=dtype))


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(x is not None for x in upstream[1:]):
        raise RuntimeError("policy_loss can be differentiated once; its gradient has no derivative")
    scale, saved = upstream[0], ctx.saved_tensors
    grads = [
        _scaled(d, scale, dtype) if needed and scale is not None else None
        for needed, d, dtype in zip(ctx.needs, saved, ctx.types, strict=True)
    ]
    return *grads, *(None,) * (ctx.inputs - len(grads))


policy_loss.register_autograd(_backward, setup_context=_save)
