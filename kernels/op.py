"""The policy loss as one custom op: its arguments, its tensors without values, and its derivative."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from .backends import capturing, launching, unavailable
from .check import check_log_probs, check_values
from .chunk_loop import STATS, StepOutputs, train
from .head import LMHead, gradient_dtype
from .operands import shard_offset
from .settings import NAMESPACE, Settings, lookup
from .tokens import Tokens

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Arguments(NamedTuple):
    """The arguments of the op, in order: its schema, its call and its derivative are made from them.

    A custom op takes tensors, numbers and strings. objective, kl and group are numbers from
    `settings.register`; `policy_loss` documents the rest.
    """

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (N,), like all tensors below
    logprobs_gen: Tensor
    advantages: Tensor
    token_weights: Tensor
    inverse_temperature: Tensor
    logprobs_ref: Tensor | None
    sequences: Tensor | None
    needs_hidden: bool
    needs_weight: bool
    objective: int
    kl: int
    entropy_bonus: float
    softcap: float | None
    logits_dtype: torch.dtype
    exact: bool
    weight_parts: int
    row_kernel: str
    chunk_rows: int | None
    drop_masked: bool
    group: int
    backend: str | None

    def settings(self) -> Settings:
        """The arguments that are no tensors, checked."""
        values = {f.name: getattr(self, f.name) for f in fields(Settings)}
        return Settings(**values | {name: lookup(values[name]) for name in ("objective", "kl", "group")})

    def tokens(self) -> Tokens:
        """The arguments of shape (N,)."""
        return Tokens(
            self.targets.long(), self.logprobs_gen, self.advantages, self.token_weights,
            self.inverse_temperature, self.logprobs_ref, self.sequences,
        )  # fmt: skip


def weighted_rows(token_weights: Tensor) -> Tensor | None:
    """The rows with weight ≠ 0; None for all. On CUDA the host waits for their number."""
    weighted = token_weights.nonzero()[:, 0]
    return None if len(weighted) == len(token_weights) else weighted


def compute(*arguments: Any) -> Outputs:
    """(loss, log-probs, entropies, STATS, d_hidden, d_weight); a gradient that is not needed is empty."""
    a = Arguments(*arguments)
    settings, tokens, hidden = a.settings(), a.tokens(), a.hidden
    weighted = counted = None
    if not settings.drop_masked or capturing(hidden):  # compute all rows; 0 · NaN would reach the sums
        counted = tokens.weights != 0
        hidden, tokens = hidden.where(counted[:, None], 0), tokens.masked(counted)
    elif (weighted := weighted_rows(tokens.weights)) is not None:
        hidden, tokens = hidden.index_select(0, weighted), tokens[weighted]
    first, vocabulary = shard_offset(a.weight, settings.group)
    check_values(
        hidden, vocabulary, tokens.targets, tokens.inverse_temperature, advantages=tokens.advantages,
        logprobs_gen=tokens.logprobs_gen, token_weights=tokens.weights, logprobs_ref=tokens.logprobs_ref,
    )  # fmt: skip
    dtype = a.inverse_temperature.dtype
    tokens = tokens.to(dtype)
    with torch.no_grad(), launching(hidden):
        head = LMHead.prepare(hidden, a.weight, dtype, settings, first)
        outputs = StepOutputs.empty(hidden, head, a.needs_hidden, a.needs_weight)
        train(head, hidden, tokens, outputs)
        check_log_probs(outputs.logp, outputs.entropy)
        loss, stats = outputs.loss_sum(tokens.weights), outputs.stats(tokens.logprobs_gen, counted)
    logp, entropy, d_hidden, d_weight = outputs.logp, outputs.entropy, outputs.d_hidden, outputs.d_weight
    if counted is not None:
        logp, entropy = logp.where(counted, 0), entropy.where(counted, 0)
    if weighted is not None:
        logp, entropy = (x.new_zeros(len(a.hidden)).index_copy_(0, weighted, x) for x in (logp, entropy))
        if d_hidden is not None:
            d_hidden = d_hidden.new_zeros(a.hidden.shape).index_copy_(0, weighted, d_hidden)
    d_hidden = loss.new_empty(0) if d_hidden is None else d_hidden
    d_weight = loss.new_empty(0) if d_weight is None else d_weight.to(gradient_dtype(a.weight))
    return loss, logp, entropy, stats, d_hidden, d_weight


compute.__signature__ = Signature(  # type: ignore[attr-defined]  # from it torch makes the op's schema
    [
        Parameter(x, Parameter.POSITIONAL_OR_KEYWORD, annotation=t)
        for x, t in get_type_hints(Arguments).items()
    ],
    return_annotation=Outputs,
)
policy_loss = torch.library.custom_op(f"{NAMESPACE}::policy_loss", compute, mutates_args=())


@policy_loss.register_fake
def _(*arguments: Any) -> Outputs:
    a = Arguments(*arguments)

    def new(*shape: int) -> Tensor:
        return a.hidden.new_empty(shape, dtype=a.inverse_temperature.dtype)

    def gradient(x: Tensor, needed: bool) -> Tensor:
        return x.new_empty(x.shape, dtype=gradient_dtype(x)) if needed else new(0)

    n = a.hidden.shape[0]
    gradients = gradient(a.hidden, a.needs_hidden), gradient(a.weight, a.needs_weight)
    return new(), new(n), new(n), new(len(STATS)), *gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    ctx.set_materialize_grads(False)
    ctx.needs, ctx.types = (a.needs_hidden, a.needs_weight), (a.hidden.dtype, a.weight.dtype)
    ctx.save_for_backward(*output[-2:])


def _scaled(d: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """d · scale, multiplied in FP32 and rounded once. d itself is taken where nobody needs it afterwards:
    with the upstream gradient 1, as of `loss.backward()`, it is neither read nor copied."""
    if torch.is_grad_enabled():  # create_graph: the result depends on scale, which `out` does not record
        return (d * (scale if d.device.type == "cpu" else scale[None])).to(dtype)
    traced = torch.compiler.is_compiling() or type(d) is not Tensor
    if d.dtype == dtype and not traced and not torch._C._autograd._get_current_graph_task_keep_graph():
        d = d.detach()  # a gradient has no history
        if d.device.type == "cpu":
            return d if scale == 1 else d.mul_(scale)
        if d.is_cuda and dtype in (torch.bfloat16, torch.float32) and not unavailable("triton"):
            from .triton.scale import scale_

            return scale_(d, scale)
    # On a GPU a 0-d factor would be rounded to d's type first; on a CPU it is not, and takes a faster path.
    factor = scale if d.device.type == "cpu" else scale[None]
    return torch.mul(d, factor, out=torch.empty_like(d, dtype=dtype))


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(x is not None for x in upstream[1:]):
        raise RuntimeError("policy_loss can be differentiated once; its gradient has no derivative")
    scale = upstream[0]
    gradients = [
        _scaled(d, scale, dtype) if needed and scale is not None else None
        for needed, d, dtype in zip(ctx.needs, ctx.saved_tensors, ctx.types, strict=True)
    ]
    return *gradients, *(None,) * (len(Arguments._fields) - len(gradients))


policy_loss.register_autograd(_backward, setup_context=_save)
