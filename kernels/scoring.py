"""Log-probs and entropies of given tokens, differentiable per token, without holding the logits.

The forward keeps four numbers a row (`kernels.rows`). From the upstream gradients c = dL/dlog π and
e = dL/dentropy, the backward forms the logits' gradient of one chunk of rows at a time, whose logits it
computes again. Both are custom ops, so torch.compile sees no graph break.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .backends import capturing, launching
from .check import check_log_probs, check_shapes, check_values, inverse, refuse_text
from .head import LMHead
from .op import weighted_rows
from .operands import Reduce, operands, shard_offset
from .rows import gradient, softmax
from .settings import NAMESPACE, Settings, lookup, register, traced


class LogProbs(NamedTuple):
    """Log-probs of tokens and what comes with them: (N,) each, FP32, or FP64 if hidden is."""

    logprobs: Tensor  # nats, differentiable in hidden and weight
    entropy: Tensor  # nats, differentiable in hidden and weight
    logsumexp: Tensor  # of the logits, capped and divided by the temperature; no gradient
    is_argmax: Tensor  # bool: no token has a larger logit than the target


@traced
def linear_logprob(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,) token ids
    *,
    temperature: float | Tensor = 1.0,  # a number, or (N,)
    softcap: float | None = None,
    logits_dtype: torch.dtype = torch.float32,
    exact: bool = False,
    weight_parts: int = 3,
    chunk_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    reduce: Reduce | None = None,
    backend: str | None = None,
) -> LogProbs:
    """Log-probs and entropies of the targets under the logits hidden · weightᵀ, for any loss of one's own.

    2NHV FLOP; in the backward 2NHV more for the logits and for each gradient that is needed, of the tokens
    alone whose upstream gradient is not 0. In memory are the logits of one chunk of rows in the backward, and
    in the forward with backend "torch" or a 16-bit `logits_dtype`; otherwise none. It can be differentiated
    once. With a `group`, every rank must compute the same loss. `policy_loss` needs 6NHV for its losses, and
    documents the arguments and errors.
    """
    refuse_text(softcap=softcap, temperature=temperature, chunk_rows=chunk_rows)
    check_shapes(hidden, weight, logits_dtype, targets=targets)
    hidden, weight = operands(hidden, weight, group, reduce)
    settings = _settings(softcap, logits_dtype, exact, weight_parts, chunk_rows, group, backend)
    logp, entropy, stats = score(hidden, weight, targets, inverse(temperature, hidden), settings)
    anchor, others, target, _ = stats.detach()
    logsumexp = anchor + (others + (target - anchor).exp()).log()
    return LogProbs(logp, entropy, logsumexp, target >= anchor)


def _settings(
    softcap: float | None, logits_dtype: torch.dtype, exact: bool, parts: int, rows: int | None,
    group: dist.ProcessGroup | None, backend: str | None,
) -> int:  # fmt: skip
    """The number of these settings, checked; torch.compile calls it once for each set of arguments."""
    return register(Settings(
        softcap=softcap, logits_dtype=logits_dtype, exact=exact, weight_parts=parts, chunk_rows=rows,
        group=group, backend=backend, row_kernel="two-pass",
    ))  # fmt: skip


_settings._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `settings`


def compute(
    hidden: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: Tensor, settings: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, (4, N) statistics of the rows over the whole vocabulary)."""
    options: Settings = lookup(settings)
    first, vocabulary = shard_offset(weight, options.group)
    check_values(hidden, vocabulary, targets, inverse_temperature)
    with launching(hidden):
        head = LMHead.prepare(hidden, weight, inverse_temperature.dtype, options, first)
        stats = head.statistics(hidden, targets.long(), inverse_temperature)
    probs = softmax(stats)
    check_log_probs(probs.logp, probs.entropy)
    return probs.logp, probs.entropy, stats


def compute_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: Tensor, stats: Tensor,
    c: Tensor, e: Tensor | None, needs_hidden: bool, needs_weight: bool, settings: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(d_hidden, d_weight) from c = dL/dlog π and e = dL/dentropy; one that is not needed is empty."""
    options: Settings = lookup(settings)
    upstream = c if e is None else c.abs() + e.abs()
    weighted = None if capturing(hidden) else weighted_rows(upstream)
    if weighted is not None:
        targets, inverse_temperature, c = targets[weighted], inverse_temperature[weighted], c[weighted]
        stats, e = stats[:, weighted], None if e is None else e[weighted]
    h, targets = hidden if weighted is None else hidden.index_select(0, weighted), targets.long()
    first, _ = shard_offset(weight, options.group)
    with launching(hidden):
        head = LMHead.prepare(hidden, weight, inverse_temperature.dtype, options, first)
        d_h, d_weight = head.empty_gradients(h, needs_hidden, needs_weight)
        g = gradient(softmax(stats), c, e, inverse_temperature)
        for rows, z in head.chunked_logits(h):
            head.add_gradients(
                z, h[rows], targets[rows], inverse_temperature[rows], g[rows], rows, d_h, d_weight
            )
    if d_h is not None and weighted is not None:
        d_h = d_h.new_zeros(hidden.shape).index_copy_(0, weighted, d_h)
    empty = stats.new_empty(0)
    d_hidden = empty if d_h is None else d_h.to(hidden.dtype)
    return d_hidden, empty if d_weight is None else d_weight.to(weight.dtype)


score = torch.library.custom_op(f"{NAMESPACE}::linear_logprob", compute, mutates_args=())
differentiate = torch.library.custom_op(
    f"{NAMESPACE}::linear_logprob_backward", compute_gradients, mutates_args=()
)


@score.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, settings: int) -> tuple[Tensor, ...]:
    n = hidden.shape[0]  # len() would compile anew for each number of tokens
    return scale.new_empty(n), scale.new_empty(n), scale.new_empty(4, n)


@differentiate.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, needs_hidden, needs_weight, _settings = rest
    empty = scale.new_empty(0)
    return hidden.new_empty(hidden.shape) if needs_hidden else empty, (
        weight.new_empty(weight.shape) if needs_weight else empty
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[-1])


def _backward(ctx: Any, c: Tensor | None, e: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:2]
    upstream = e if c is None else c
    if upstream is None:
        return (None,) * 5
    c = torch.zeros_like(upstream) if c is None else c
    gradients = differentiate(*ctx.saved_tensors, c, e, *needs, ctx.settings)
    d_hidden, d_weight = (d if needed else None for needed, d in zip(needs, gradients, strict=True))
    return d_hidden, d_weight, None, None, None


def _refuse(*_: Any) -> None:
    raise RuntimeError("linear_logprob can be differentiated once; its gradient has no derivative")


score.register_autograd(_backward, setup_context=_save)
differentiate.register_autograd(_refuse)
