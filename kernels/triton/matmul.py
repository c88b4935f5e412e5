"""The three GEMMs of a chunk, by cuBLAS with FP32 results, from FP32 operands or from 16-bit parts.

bf16 × bf16 and FP16 × FP16 products are exact in FP32, so these operands lose nothing.
`torch.mm(out_dtype=)` and `torch.addmm(out_dtype=)` on an FP32 self need torch ≥ 2.10
(pytorch/pytorch#167931). Both accept any row stride, so the in-place 16-bit gradient, whose rows are 2V
apart, is not copied.
"""

import torch
from torch import Tensor

from ..precision import ieee_fp32
from .split import split_16

EXACT_DEPTH = 4096
"""Products that one GEMM sums where gradients are exact. Tensor cores cut a running sum towards zero, an
error that grows with the number of summands; between GEMMs, sums are added with FP32's own rounding."""


def d_hidden(dz: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (C, H) FP32 = dz W: dz (C, V) 16-bit or FP32, weight from `kernels.triton.backend.prepare`.

    Products of parts below 2^-16 of the sum are left out. With a bf16 dz the last two parts of a split
    weight suffice: their error is far below the rounding of dz.
    """
    width = out.shape[1]
    *_, weight_high = weights = weight.split(width, 1)
    if weight.dtype == torch.float32:
        _mm(dz.float(), weight, out)
    elif dz.dtype == weight.dtype:
        _sum_of_products([(dz, w) for w in weights[-2:]], out)
    else:
        low, high = split_16(dz, 2, weight.dtype).split(dz.shape[1], 1)
        _sum_of_products([(low, weight_high), *((high, w) for w in weights[-2:])], out, depth=EXACT_DEPTH)


def add_d_weight(dz: Tensor, h: Tensor, out: Tensor, first: bool = False) -> None:
    """out (V, H) FP32 += dzᵀ h, for dz (C, V) 16-bit or FP32 and h (C, H); the running sum is FP32.

    If first, out = dzᵀ h; that may also be bf16 for bf16 dz and h.
    """
    if dz.dtype == torch.float32 != h.dtype:
        pairs = [(part.t(), h) for part in split_16(dz, 2, h.dtype).split(dz.shape[1], 1)]
        _sum_of_products(pairs, out, first, EXACT_DEPTH)
    else:
        _sum_of_products([(dz.to(h.dtype).t(), h)], out, first)


def cublas_logits(h: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (C, V) FP32 = h Wᵀ, weight from `prepare`."""
    parts = weight.shape[1] // h.shape[1]
    _mm(h.to(weight.dtype).repeat(1, parts) if parts > 1 else h.to(weight.dtype), weight.t(), out)


def _sum_of_products(
    pairs: list[tuple[Tensor, Tensor]], out: Tensor, first: bool = True, depth: int | None = None
) -> None:
    """out = Σ left right, or += unless first; a GEMM sums at most `depth` products of a pair."""
    for left, right in pairs:
        step = depth or max(1, len(right))
        for start in range(0, max(1, len(right)), step):
            summed = slice(start, start + step)
            (_mm if first else _add_mm)(left[:, summed], right[summed], out)
            first = False


def _mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left right: FP32, or bf16 from bf16."""
    with ieee_fp32():
        if out.dtype == torch.bfloat16:
            torch.mm(left, right, out=out)
        elif left.is_cuda and left.dtype != torch.float32:
            torch.mm(left, right, out_dtype=torch.float32, out=out)
        else:
            torch.mm(left.float(), right.float(), out=out)


def _add_mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out FP32 += left right."""
    with ieee_fp32():
        if left.is_cuda and left.dtype != torch.float32:
            torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
        else:
            out.addmm_(left.float(), right.float())
