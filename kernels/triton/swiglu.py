"""SwiGLU: silu(gate) · up. The backward recomputes the sigmoid, so only gate and up are kept.

s = σ(gate)      y = gate s up      dgate = dy up s (1 + gate (1 − s))      dup = dy gate s
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
from .rms_norm import as_rows


class SwiGLU(torch.autograd.Function):
    """y (..., F) in `dtype`, from gate and up (..., F)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
        _launch(_swiglu, [as_rows(gate), as_rows(up)], [out])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in ctx.saved_tensors)
        _launch(_swiglu_grads, [as_rows(x) for x in (*ctx.saved_tensors, dy)], [d_gate, d_up])
        return d_gate, d_up, None


def _launch(kernel: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Programs of 8 elements a thread: three tensors of them are in flight."""
    rows, width = inputs[0].shape
    block = max(128, min(1024, triton.next_power_of_2(width)))
    strides = [x.stride(0) for x in inputs]
    grid = rows, triton.cdiv(width, block)
    launch(kernel, grid, *inputs, *outputs, width, *strides, BLOCK=block, num_warps=max(1, block // 256))


@triton.jit
def _swiglu(gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = load_fp32(gate + row * gate_stride + columns, inside)
    u = load_fp32(up + row * up_stride + columns, inside)
    store_rounded(out + row * width + columns, g * tl.sigmoid(g) * u, inside)


@triton.jit
def _swiglu_grads(gate, up, dy, d_gate, d_up, width, gate_stride, up_stride, dy_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = load_fp32(gate + row * gate_stride + columns, inside)
    u = load_fp32(up + row * up_stride + columns, inside)
    d = load_fp32(dy + row * dy_stride + columns, inside)
    s = tl.sigmoid(g)
    offsets = row * width + columns
    store_rounded(d_gate + offsets, d * u * s * (1.0 + g * (1.0 - s)), inside)
    store_rounded(d_up + offsets, d * g * s, inside)
