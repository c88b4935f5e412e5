"""RMSNorm, with or without adding to the residual first: a row is read once and held in registers.

    rstd = 1 / √(mean(h²) + eps)      ĥ = h rstd      y = ĥ w
    dh = rstd (w dy − ĥ mean(ĥ w dy)) [+ the new residual's gradient]      dw = Σ_rows ĥ dy

The backward recomputes rstd from x, or from the new residual as it was rounded: nothing else is kept. Program
p of it takes rows p, p + programs, … and sums its part of dw in registers; the parts are added up in a fixed
order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import launch, multiprocessors
from .elementwise import load_fp32, store_rounded


class RMSNorm(torch.autograd.Function):
    """x (..., H) normed, times weight (H,), in `dtype`.

    With a residual (..., H), that of residual + x, and the new residual residual + x in the residual's type,
    which is `h` in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows = as_rows(x)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        added, total = rows, x
        if residual is not None:
            added = as_rows(residual)
            total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
        tensors = rows, added, weight.contiguous(), out, total
        sizes = rows.shape[1], rows.stride(0), added.stride(0)
        launch(_rms_norm, (len(rows),), *tensors, *sizes, eps, ADD=residual is not None, **_constants(rows))
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.types = eps, (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        return out if residual is None else (out, total)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, d_total: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        h, weight = ctx.saved_tensors
        rows, types = as_rows(h), ctx.types
        grad = as_rows(torch.zeros_like(h) if dy is None else dy)
        above = grad if d_total is None else as_rows(d_total)
        dx = torch.empty(h.shape, dtype=types[0], device=h.device)
        two = types[1] not in (None, types[0])
        d_residual = torch.empty(h.shape, dtype=types[1], device=h.device) if two else dx
        constants = _constants(rows) | {"ADD": d_total is not None, "TWO": two}
        programs = persistent(len(rows), constants["num_warps"], h.device)
        partial = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=h.device)
        tensors = rows, weight.contiguous(), grad, above, dx, d_residual, partial
        strides = rows.stride(0), grad.stride(0), above.stride(0)
        launch(_rms_norm_grads, (programs,), *tensors, *rows.shape, *strides, ctx.eps, **constants)
        dw = partial.sum(0).to(weight.dtype)
        return dx, None if types[1] is None else d_residual, dw, None, None


def as_rows(x: Tensor) -> Tensor:
    """(rows, last dimension), the elements of a row one after another; copied only where that needs it."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def persistent(tasks: int, warps: int, device: torch.device) -> int:
    """Number of programs for these tasks: 16 warps a multiprocessor, whose loads hide memory's latency."""
    return min(tasks, multiprocessors(device) * max(1, 16 // warps))


def _constants(rows: Tensor) -> dict[str, int]:
    """One tile holds a row, 16 elements a thread."""
    block = max(128, triton.next_power_of_2(rows.shape[1]))
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, width, stride, residual_stride, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    h = load_fp32(x + row * stride + columns, inside)
    if ADD:
        h += load_fp32(residual + row * residual_stride + columns, inside)
        store_rounded(total + row * width + columns, h, inside)
    w = load_fp32(weight + columns, inside)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / width + eps)
    store_rounded(out + row * width + columns, h * rstd * w, inside)


@triton.jit(do_not_specialize=["rows"])  # one row would be a kernel of its own
def _rms_norm_grads(
    h, weight, dy, d_total, dx, d_residual, partial, rows, width, stride, dy_stride, d_total_stride, eps,
    ADD: tl.constexpr, TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        x = load_fp32(h + row * stride + columns, inside)
        g = load_fp32(dy + row * dy_stride + columns, inside)
        rstd = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        normed = x * rstd
        dw += g * normed
        # The weight is loaded late, since few registers are left.
        g *= load_fp32(weight + columns, inside)
        d = rstd * (g - normed * (tl.sum(g * normed, 0) / width))
        if ADD:
            d += load_fp32(d_total + row * d_total_stride + columns, inside)
        store_rounded(dx + row * width + columns, d, inside)
        if TWO:
            store_rounded(d_residual + row * width + columns, d, inside)
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + columns, dw, mask=inside)
