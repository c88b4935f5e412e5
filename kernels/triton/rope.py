"""RMSNorm and RoPE of each head of q or of k. A row is one head of one token, halves a and b.

    â, b̂ = (a, b) rstd w, or (a, b) without a norm      out = (â cos − b̂ sin, b̂ cos + â sin)
    dâ, db̂ = (da cos + db sin, db cos − da sin), and from there as in `kernels.triton.rms_norm`

A tile is ROWS rows. Program p of the backward takes tiles p, p + programs, … and sums its part of the
weight's gradient in registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import launch
from .elementwise import load_fp32, store_rounded
from .rms_norm import persistent


class NormRoPE(torch.autograd.Function):
    """x (..., heads, D) normed by weight (D,), unless that is None, and rotated, in `dtype`.

    cos and sin are (P, D/2), position_ids (...); a position outside the tables gives NaN. The backward keeps
    x as it came, or nothing of it without a norm.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
        eps: float, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        if position_ids is not None:
            position_ids = position_ids.reshape(-1).contiguous()
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        saved = () if weight is None else (x, weight.contiguous())
        ctx.save_for_backward(cos, sin, position_ids, *saved)
        ctx.eps, ctx.dtype = eps, x.dtype
        x = _heads(x)
        tensors = x, saved[1] if saved else cos, cos, sin, cos if position_ids is None else position_ids, out
        sizes = *x.shape[:2], *x.stride()[:2], len(cos), cos.stride(0)
        constants = _constants(x, position_ids, bool(saved))
        launch(_rope, (_tiles(x, constants),), *tensors, *sizes, eps, **constants)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, position_ids, *saved = ctx.saved_tensors
        dx = torch.empty(d_out.shape, dtype=ctx.dtype, device=d_out.device)
        d_out = _heads(d_out)
        x, weight = (_heads(saved[0]), saved[1]) if saved else (d_out, cos)
        constants = _constants(x, position_ids, bool(saved))
        programs = persistent(_tiles(x, constants), constants["num_warps"], x.device)
        partial = torch.empty(programs, x.shape[2], dtype=torch.float32, device=x.device)
        positions = cos if position_ids is None else position_ids
        tensors = x, weight, cos, sin, positions, d_out, dx, partial
        sizes = *x.shape[:2], *x.stride()[:2], *d_out.stride()[:2], len(cos), cos.stride(0)
        launch(_rope_grads, (programs,), *tensors, *sizes, ctx.eps, **constants)
        return dx, partial.sum(0).to(weight.dtype) if saved else None, *(None,) * 5


def _heads(x: Tensor) -> Tensor:
    """(tokens, heads, D), a head's elements one after another; copied only where that needs it."""
    heads = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _tiles(x: Tensor, constants: dict[str, int]) -> int:
    return triton.cdiv(len(x) * x.shape[1], constants["ROWS"])


def _constants(x: Tensor, position_ids: Tensor | None, normed: bool) -> dict[str, int]:
    """Compile-time arguments. A tile has 2,048 elements: 16 a thread, 8 of wide heads, whose code spills."""
    half = max(8, triton.next_power_of_2(x.shape[2] // 2))
    shape = {"D": x.shape[2], "HALF": half, "ROWS": 1024 // half, "num_warps": 4 if half < 128 else 8}
    return shape | {"NORM": normed, "BY_POSITION": position_ids is not None}


@triton.jit
def _load_halves(pointers, inside, D: tl.constexpr):
    """FP32 each: some columns of the first half, where `pointers` lie, and the same of the second."""
    return load_fp32(pointers, inside), load_fp32(pointers + D // 2, inside)


@triton.jit
def _store_halves(out, row, column, inside, a, b, D: tl.constexpr):
    pointers = out + (row.to(tl.int64) * D)[:, None] + column
    store_rounded(pointers, a, inside)
    store_rounded(pointers + D // 2, b, inside)


@triton.jit
def _offsets(token, head, token_stride, head_stride):
    """(ROWS, 1): where the rows begin."""
    return (token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride)[:, None]


@triton.jit
def _angles(
    cos, sin, position_ids, token, tokens, column, inside, table_rows, table_stride, BY_POSITION: tl.constexpr
):
    """(ROWS, HALF) FP32 each: the cosines and sines of some rows; NaN outside the tables."""
    position = tl.minimum(token, tokens - 1).to(tl.int64)
    if BY_POSITION:
        position = tl.load(position_ids + position).to(tl.int64)
    known = ((position >= 0) & (position < table_rows))[:, None]
    offsets = (position * table_stride)[:, None] + column
    c, s = load_fp32(cos + offsets, inside & known), load_fp32(sin + offsets, inside & known)
    return tl.where(known, c, float("nan")), tl.where(known, s, float("nan"))


@triton.jit(do_not_specialize=["tokens"])
def _rope(
    x, weight, cos, sin, position_ids, out, tokens, heads, token_stride, head_stride, table_rows,
    table_stride, eps, NORM: tl.constexpr, BY_POSITION: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)[None, :]
    token = row // heads
    inside = (token < tokens)[:, None] & (column < D // 2)
    a, b = _load_halves(x + _offsets(token, row % heads, token_stride, head_stride) + column, inside, D)
    if NORM:
        w_a, w_b = _load_halves(weight + column, column < D // 2, D)
        rstd = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a *= rstd * w_a
        b *= rstd * w_b
    c, s = _angles(
        cos, sin, position_ids, token, tokens, column, inside, table_rows, table_stride, BY_POSITION
    )
    _store_halves(out, row, column, inside, a * c - b * s, b * c + a * s, D)


@triton.jit(do_not_specialize=["tokens"])
def _rope_grads(
    x, weight, cos, sin, position_ids, d_out, dx, partial, tokens, heads, token_stride, head_stride,
    d_token_stride, d_head_stride, table_rows, table_stride, eps, NORM: tl.constexpr,
    BY_POSITION: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx of this program's tiles; partial (programs, D) gets their part of the weight's gradient."""
    column = tl.arange(0, HALF)[None, :]
    dw_a = tl.zeros((ROWS, HALF), tl.float32)
    dw_b = tl.zeros((ROWS, HALF), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens * heads, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = row // heads, row % heads
        inside = (token < tokens)[:, None] & (column < D // 2)
        da, db = _load_halves(
            d_out + _offsets(token, head, d_token_stride, d_head_stride) + column, inside, D
        )
        c, s = _angles(
            cos, sin, position_ids, token, tokens, column, inside, table_rows, table_stride, BY_POSITION
        )
        ga = da * c + db * s
        gb = db * c - da * s
        if NORM:
            a, b = _load_halves(x + _offsets(token, head, token_stride, head_stride) + column, inside, D)
            w_a, w_b = _load_halves(weight + column, column < D // 2, D)
            rstd = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
            a *= rstd
            b *= rstd
            dw_a += ga * a
            dw_b += gb * b
            ga *= w_a
            gb *= w_b
            mean = (tl.sum(ga * a + gb * b, 1) / D)[:, None]
            ga = rstd * (ga - a * mean)
            gb = rstd * (gb - b * mean)
        _store_halves(dx, row, column, inside, ga, gb, D)
    if NORM:
        pointers = partial + tl.program_id(0) * D + tl.arange(0, HALF)
        tl.store(pointers, tl.sum(dw_a, 0), mask=tl.arange(0, HALF) < D // 2)
        tl.store(pointers + D // 2, tl.sum(dw_b, 0), mask=tl.arange(0, HALF) < D // 2)
