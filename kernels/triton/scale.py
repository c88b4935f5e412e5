"""d · scale in place, by a factor on the device. Where it is 1 nothing is read; the host does not wait."""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from .config import launch
from .elementwise import load_fp32, store_rounded

BLOCK = 2048
PROGRAMS = 2048
"""Of them each loops over blocks: programs that return at once cost time, too."""


def scale_(d: Tensor, scale: Tensor) -> Tensor:
    """d (contiguous) times scale (), a product in FP32 that is rounded once."""
    grid = (min(PROGRAMS, triton.cdiv(d.numel(), BLOCK)),)
    launch(_scale, grid, d, scale, d.numel(), BLOCK=BLOCK, num_warps=8)
    return d


@triton.jit
def _scale(d, scale, size, BLOCK: tl.constexpr):
    factor = tl.load(scale).to(tl.float32)
    if factor != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            offsets = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)  # size has the 64 bits that it needs
            inside = offsets < size
            store_rounded(d + offsets, load_fp32(d + offsets, inside) * factor, inside)
