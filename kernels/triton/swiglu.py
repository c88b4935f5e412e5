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

from .config import INTERPRET
from .elementwise import as_fp32
from .rms_norm import as_rows, rounded


class SwiGLU(torch.autograd.Function):
    """y (..., F) in `dtype`, from gate and up (..., F)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
        gate, up = as_rows(gate), as_rows(up)
        if gate.numel():
            with torch.cuda.device_of(gate):
                _swiglu[_grid(gate)](
                    gate, up, out, gate.shape[1], gate.stride(0), up.stride(0), INTERPRET=INTERPRET,
                    **_launch(gate),
                )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in ctx.saved_tensors)
        gate, up, dy = (as_rows(x) for x in (*ctx.saved_tensors, dy))
        if gate.numel():
            with torch.cuda.device_of(gate):
                _swiglu_grads[_grid(gate)](
                    gate, up, dy, d_gate, d_up, gate.shape[1], gate.stride(0), up.stride(0), dy.stride(0),
                    INTERPRET=INTERPRET, **_launch(gate),
                )  # fmt: skip
        return d_gate, d_up, None


def _launch(rows: Tensor) -> dict[str, Any]:
    """8 elements a thread: three tensors of them are in flight."""
    block = max(128, min(1024, triton.next_power_of_2(rows.shape[1])))
    return {"BLOCK": block, "num_warps": max(1, block // 256), "num_stages": 1, "enable_fp_fusion": True}


def _grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], _launch(rows)["BLOCK"])


@triton.jit
def _swiglu(
    gate, up, out, width, gate_stride, up_stride, INTERPRET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = as_fp32(tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0), INTERPRET)
    u = as_fp32(tl.load(up + row * up_stride + columns, mask=inside, other=0.0), INTERPRET)
    tl.store(out + row * width + columns, rounded(g * tl.sigmoid(g) * u, out, INTERPRET), mask=inside)


@triton.jit
def _swiglu_grads(
    gate, up, dy, d_gate, d_up, width, gate_stride, up_stride, dy_stride,
    INTERPRET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = as_fp32(tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0), INTERPRET)
    u = as_fp32(tl.load(up + row * up_stride + columns, mask=inside, other=0.0), INTERPRET)
    d = as_fp32(tl.load(dy + row * dy_stride + columns, mask=inside, other=0.0), INTERPRET)
    s = tl.sigmoid(g)
    at = row * width + columns
    tl.store(d_gate + at, rounded(d * u * s * (1.0 + g * (1.0 - s)), d_gate, INTERPRET), mask=inside)
    tl.store(d_up + at, rounded(d * g * s, d_up, INTERPRET), mask=inside)
