"""FP32 as a sum of bf16 or FP16 parts, so that tensor cores can multiply it with FP32's precision."""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import launch
from .elementwise import as_fp32, rounded


def split_16(x: Tensor, parts: int, dtype: torch.dtype = torch.bfloat16, block: int = 1024) -> Tensor:
    """(R, parts·C) from x (R, C) FP32, the smallest part first: of two, remainders, then all rounded.

    Two bf16 parts carry 16 bits of each number, three all 24 (for magnitudes above 2^-102); two FP16 parts 22
    bits from 2^-3 to 2^16. Products with small parts must be summed before those with large ones: added to a
    full sum, they would lose their digits.
    """
    rows, columns = x.shape
    out = x.new_empty(rows, parts * columns, dtype=dtype)
    grid = rows, triton.cdiv(columns, block)
    launch(_split, grid, x, out, columns, x.stride(0), PARTS=parts, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _split(x, out, columns, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    rest = tl.load(x + row * stride + column, mask=inside, other=0.0)
    out += row * PARTS * columns
    for part in tl.static_range(PARTS):
        nearest = rounded(rest, out.dtype.element_ty)
        tl.store(out + (PARTS - 1 - part) * columns + column, nearest, mask=inside)
        rest = rest - as_fp32(nearest)  # exact
