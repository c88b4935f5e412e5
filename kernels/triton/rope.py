"""Per-head RMSNorm and RoPE of q and k in one launch. A row is one head of one token, halves a and b.

    â, b̂ = (a, b) rstd w, or (a, b) without a norm      out = (â cos − b̂ sin, b̂ cos + â sin)
    dâ, db̂ = (da cos + db sin, db cos − da sin), and from there as in `kernels.triton.rms_norm`

A tile is ROWS rows of q or of k. Program p of the backward takes tiles p, p + programs, … of q and then of k,
and sums its part of the weights' gradients in registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import INTERPRET
from .elementwise import as_fp32
from .rms_norm import persistent, rounded


class QKNormRoPE(torch.autograd.Function):
    """q (..., query heads, D) and k (..., key heads, D) normed by weights (D,) and rotated, in `dtype`.

    cos and sin are (P, D/2), position_ids (...); a position outside the tables gives NaN. The backward keeps
    q and k as they came, or nothing of them without a norm.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
        sin: Tensor, position_ids: Tensor | None, eps: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        normed = q_weight is not None and k_weight is not None
        if position_ids is not None:
            position_ids = position_ids.reshape(-1).contiguous()
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        q_out, k_out = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k))
        ctx.save_for_backward(cos, sin, position_ids, *((q, k, q_weight, k_weight) if normed else ()))
        ctx.eps, ctx.types = eps, (q.dtype, k.dtype)
        q, k = _heads(q), _heads(k)
        weights = [cos if w is None else w.contiguous() for w in (q_weight, k_weight)]
        constants = _constants(q, position_ids, normed)
        tiles = sum(triton.cdiv(len(x) * x.shape[1], constants["ROWS"]) for x in (q, k))
        if tiles:
            with torch.cuda.device_of(q):
                _rope[(tiles,)](
                    q, k, *weights, cos, sin, cos if position_ids is None else position_ids, q_out, k_out,
                    len(q), q.shape[1], k.shape[1], *q.stride()[:2], *k.stride()[:2], len(cos),
                    cos.stride(0), eps, **constants,
                )  # fmt: skip
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, position_ids, *saved = ctx.saved_tensors
        dq, dk = (
            torch.empty(x.shape, dtype=dtype, device=x.device)
            for x, dtype in zip((dq_out, dk_out), ctx.types, strict=True)
        )
        dq_out, dk_out = _heads(dq_out), _heads(dk_out)
        q, k, *weights = (*map(_heads, saved[:2]), *saved[2:]) if saved else (dq_out, dk_out, cos, cos)
        constants = _constants(q, position_ids, bool(saved))
        tiles = triton.cdiv(len(q) * max(q.shape[1], k.shape[1]), constants["ROWS"])
        programs = persistent(tiles, constants["num_warps"], q.device)
        partial = torch.empty(2, programs, q.shape[2], dtype=torch.float32, device=q.device)
        if tiles:
            with torch.cuda.device_of(q):
                _rope_grads[(programs,)](
                    q, k, *(x.contiguous() for x in weights), cos, sin,
                    cos if position_ids is None else position_ids, dq_out, dk_out, dq, dk, partial, len(q),
                    q.shape[1], k.shape[1], *q.stride()[:2], *k.stride()[:2], *dq_out.stride()[:2],
                    *dk_out.stride()[:2], len(cos), cos.stride(0), ctx.eps, **constants,
                )  # fmt: skip
        if not saved:
            return dq, dk, *(None,) * 7
        dw = partial.sum(1)
        return dq, dk, dw[0].to(weights[0].dtype), dw[1].to(weights[1].dtype), *(None,) * 5


def _heads(x: Tensor) -> Tensor:
    """(tokens, heads, D), a head's elements one after another; copied only where that needs it."""
    heads = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _constants(q: Tensor, position_ids: Tensor | None, normed: bool) -> dict[str, Any]:
    """Compile-time arguments. A tile has 2,048 elements: 16 a thread, 8 of wide heads, whose code spills."""
    half = max(8, triton.next_power_of_2(q.shape[2] // 2))
    return {
        "D": q.shape[2], "HALF": half, "ROWS": 1024 // half, "NORM": normed,
        "BY_POSITION": position_ids is not None, "INTERPRET": INTERPRET, "num_warps": 4 if half < 128 else 8,
        "num_stages": 1, "enable_fp_fusion": True,
    }  # fmt: skip


@triton.jit
def _halves(
    x, token, head, token_stride, head_stride, inside,
    INTERPRET: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """(ROWS, HALF) FP32 each: the two halves of some rows of x."""
    row = token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    at = x + row[:, None] + tl.arange(0, HALF)[None, :]
    a = as_fp32(tl.load(at, mask=inside, other=0.0), INTERPRET)
    b = as_fp32(tl.load(at + D // 2, mask=inside, other=0.0), INTERPRET)
    return a, b


@triton.jit
def _store(out, row, inside, a, b, INTERPRET: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    at = out + (row.to(tl.int64) * D)[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(at, rounded(a, out, INTERPRET), mask=inside)
    tl.store(at + D // 2, rounded(b, out, INTERPRET), mask=inside)


@triton.jit
def _angles(
    cos, sin, position_ids, token, tokens, inside, table_rows, table_stride,
    BY_POSITION: tl.constexpr, INTERPRET: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """(ROWS, HALF) FP32 each: the cosines and sines of some rows; NaN outside the tables."""
    position = token.to(tl.int64)
    if BY_POSITION:
        position = tl.load(position_ids + token, mask=token < tokens, other=0).to(tl.int64)
        known = ((position >= 0) & (position < table_rows))[:, None]
        inside = inside & known
    at = (position * table_stride)[:, None] + tl.arange(0, HALF)[None, :]
    c = as_fp32(tl.load(cos + at, mask=inside, other=0.0), INTERPRET)
    s = as_fp32(tl.load(sin + at, mask=inside, other=0.0), INTERPRET)
    if BY_POSITION:
        c = tl.where(known, c, float("nan"))
        s = tl.where(known, s, float("nan"))
    return c, s


@triton.jit
def _weight(weight, INTERPRET: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """(1, HALF) FP32 each: the two halves of the norm's weight."""
    column = tl.arange(0, HALF)[None, :]
    a = as_fp32(tl.load(weight + column, mask=column < D // 2, other=0.0), INTERPRET)
    b = as_fp32(tl.load(weight + D // 2 + column, mask=column < D // 2, other=0.0), INTERPRET)
    return a, b


@triton.jit
def _rotate(
    x, weight, cos, sin, position_ids, out, tile, tokens, heads, token_stride, head_stride, table_rows,
    table_stride, eps, NORM: tl.constexpr, BY_POSITION: tl.constexpr, INTERPRET: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // heads
    inside = (token < tokens)[:, None] & (tl.arange(0, HALF) < D // 2)[None, :]
    a, b = _halves(x, token, row % heads, token_stride, head_stride, inside, INTERPRET, D, HALF)
    if NORM:
        w_a, w_b = _weight(weight, INTERPRET, D, HALF)
        rstd = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a *= rstd * w_a
        b *= rstd * w_b
    c, s = _angles(
        cos, sin, position_ids, token, tokens, inside, table_rows, table_stride, BY_POSITION, INTERPRET, HALF
    )
    _store(out, row, inside, a * c - b * s, b * c + a * s, INTERPRET, D, HALF)


@triton.jit(do_not_specialize=["tokens"])
def _rope(
    q, k, q_weight, k_weight, cos, sin, position_ids, q_out, k_out, tokens, q_heads, k_heads,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, table_rows, table_stride, eps,
    NORM: tl.constexpr, BY_POSITION: tl.constexpr, INTERPRET: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(tokens * q_heads, ROWS)
    if tile < q_tiles:
        _rotate(
            q, q_weight, cos, sin, position_ids, q_out, tile, tokens, q_heads, q_token_stride, q_head_stride,
            table_rows, table_stride, eps, NORM, BY_POSITION, INTERPRET, D, HALF, ROWS,
        )  # fmt: skip
    else:
        _rotate(
            k, k_weight, cos, sin, position_ids, k_out, tile - q_tiles, tokens, k_heads, k_token_stride,
            k_head_stride, table_rows, table_stride, eps, NORM, BY_POSITION, INTERPRET, D, HALF, ROWS,
        )  # fmt: skip


@triton.jit
def _rotate_back(
    x, weight, cos, sin, position_ids, d_out, dx, partial, tokens, heads, token_stride, head_stride,
    d_token_stride, d_head_stride, table_rows, table_stride, eps, NORM: tl.constexpr,
    BY_POSITION: tl.constexpr, INTERPRET: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dx of this program's tiles; partial (D,) gets their part of the weight's gradient."""
    dw_a = tl.zeros((ROWS, HALF), tl.float32)
    dw_b = tl.zeros((ROWS, HALF), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens * heads, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = row // heads, row % heads
        inside = (token < tokens)[:, None] & (tl.arange(0, HALF) < D // 2)[None, :]
        da, db = _halves(d_out, token, head, d_token_stride, d_head_stride, inside, INTERPRET, D, HALF)
        c, s = _angles(
            cos, sin, position_ids, token, tokens, inside, table_rows, table_stride, BY_POSITION, INTERPRET,
            HALF,
        )  # fmt: skip
        ga = da * c + db * s
        gb = db * c - da * s
        if NORM:
            a, b = _halves(x, token, head, token_stride, head_stride, inside, INTERPRET, D, HALF)
            w_a, w_b = _weight(weight, INTERPRET, D, HALF)
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
        _store(dx, row, inside, ga, gb, INTERPRET, D, HALF)
    if NORM:
        column = tl.arange(0, HALF)
        tl.store(partial + column, tl.sum(dw_a, 0), mask=column < D // 2)
        tl.store(partial + D // 2 + column, tl.sum(dw_b, 0), mask=column < D // 2)


@triton.jit(do_not_specialize=["tokens"])
def _rope_grads(
    q, k, q_weight, k_weight, cos, sin, position_ids, dq_out, dk_out, dq, dk, partial, tokens, q_heads,
    k_heads, q_token_stride, q_head_stride, k_token_stride, k_head_stride, dq_token_stride, dq_head_stride,
    dk_token_stride, dk_head_stride, table_rows, table_stride, eps, NORM: tl.constexpr,
    BY_POSITION: tl.constexpr, INTERPRET: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    partial += tl.program_id(0) * D
    _rotate_back(
        q, q_weight, cos, sin, position_ids, dq_out, dq, partial, tokens, q_heads, q_token_stride,
        q_head_stride, dq_token_stride, dq_head_stride, table_rows, table_stride, eps, NORM, BY_POSITION,
        INTERPRET, D, HALF, ROWS,
    )  # fmt: skip
    _rotate_back(
        k, k_weight, cos, sin, position_ids, dk_out, dk, partial + tl.num_programs(0) * D, tokens, k_heads,
        k_token_stride, k_head_stride, dk_token_stride, dk_head_stride, table_rows, table_stride, eps, NORM,
        BY_POSITION, INTERPRET, D, HALF, ROWS,
    )  # fmt: skip
