"""The LM head on a backend: its prepared weight, its logits in chunks, their statistics and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from .backends import Backend, capturing, choose, notice
from .chunk_size import CUDA_CHUNK_ROWS, cuda_chunk_rows
from .rows import Gradient, merge_over
from .settings import Settings

CHUNK_BYTES = 128 << 20  # one chunk of logits on the CPU: larger than any cache, small beside any memory
LARGEST_FP16 = 2.0**15  # of a scaled gradient: half of FP16's range, 2^29 times its smallest normal number
WHOLE_D_WEIGHT = 1 << 24  # elements from which cuBLAS has enough tiles not to split a sum into bf16 parts


def rows_on_cuda(hidden: Tensor, weight: Tensor, settings: Settings) -> int:
    """Rows of a chunk by the GPU memory that is free (`cuda_chunk_rows`).

    CUDA_CHUNK_ROWS where the logits' gradients are split into parts, which need as much memory again,
    where the ranks of a `group` must have chunks alike, and while a graph is captured.
    """
    fixed = settings.exact or hidden.dtype != weight.dtype or settings.group is not None
    if fixed or not hidden.is_cuda or len(hidden) <= CUDA_CHUNK_ROWS or capturing(hidden):
        return CUDA_CHUNK_ROWS
    unused = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    free = torch.cuda.mem_get_info(hidden.device)[0] + unused
    logit = 2 if settings.row_kernel == "fused-epilogue" else 4  # bytes: bf16 gradients alone, or FP32
    return cuda_chunk_rows(free, len(weight), weight.shape[1], logit)


@dataclass(frozen=True, slots=True)
class LMHead:
    """The LM head's weight, prepared for a backend, and the settings under which it is applied."""

    weight: Tensor  # in the form that the backend's `prepare` returned
    shape: torch.Size  # (V, H)
    backend: Backend
    name: str
    dtype: torch.dtype  # in which logits are accumulated
    settings: Settings
    first: int | Tensor  # token id of the weight's first row
    chunk: int  # rows whose logits are in memory at a time

    @staticmethod
    def prepare(
        hidden: Tensor, weight: Tensor, dtype: torch.dtype, settings: Settings, first: int | Tensor
    ) -> LMHead:
        """Choose a backend for these tensors and prepare the weight for it."""
        name, backend = choose(hidden, weight, settings.backend)
        if hidden.is_cuda and hidden.dtype == torch.float32:
            notice(
                "kernels: hidden is FP32 on CUDA, so products are IEEE FP32, some 15 times as slow as bf16's "
                "with FP32 sums: call the op under torch.autocast('cuda', torch.bfloat16), or give bf16"
            )
        if settings.row_kernel == "auto":
            bf16 = hidden.dtype == weight.dtype == torch.bfloat16
            single = name == "triton" and bf16 and not settings.needs_two_passes
            settings = replace(settings, row_kernel="single-pass" if single else "two-pass")
        if settings.row_kernel != "two-pass" and name != "triton":
            raise ValueError(
                f"row_kernel {settings.row_kernel!r} needs the backend 'triton'; the backend here is {name!r}"
            )
        if settings.row_kernel != "two-pass" and hidden.dtype == torch.float16:
            raise ValueError(
                f"row_kernel {settings.row_kernel!r} rounds to bf16, and FP16 hidden states are finer; "
                "use 'two-pass'"
            )
        prepared = backend.prepare(hidden, weight, dtype, settings.weight_parts)
        rows = settings.chunk_rows
        if rows is None and name == "triton":
            rows = rows_on_cuda(hidden, weight, settings)
        rows = rows or max(1, CHUNK_BYTES // (len(weight) * dtype.itemsize))
        return LMHead(prepared, weight.shape, backend, name, dtype, settings, first, rows)

    def chunk_rows(self, n: int) -> int:
        """The number of rows of n whose logits are in memory at a time."""
        return max(1, min(n, self.chunk))

    def logits_buffer(self, hidden: Tensor, rows: int) -> Tensor:
        """(rows, V); on a GPU rows start at multiples of 64 bytes, for wide loads whatever V is."""
        v = len(self.weight)
        width = -(-v // 16) * 16 if self.name == "triton" else v
        return hidden.new_empty(rows, width, dtype=self.dtype)[:, :v]

    def d_weight_dtype(self, hidden: Tensor) -> torch.dtype:
        """dtype of the sums for dW; bf16 where one GEMM makes it whole: that sums in FP32 and rounds once."""
        n, bf16 = len(hidden), self.weight.dtype == hidden.dtype == torch.bfloat16
        whole = self.chunk_rows(n) >= n and self.shape.numel() >= WHOLE_D_WEIGHT and not self.settings.exact
        direct = self.name == "triton" and bf16 and self.weight.shape == self.shape and whole
        return torch.bfloat16 if direct else self.dtype

    def logits(self, h: Tensor, out: Tensor) -> None:
        """out (C, V) = h Wᵀ, rounded to `logits_dtype` if that is a 16-bit type."""
        self.backend.logits(h, self.weight, out)
        if self.settings.logits_dtype != torch.float32:
            out.copy_(out.to(self.settings.logits_dtype))

    def chunked_logits(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some rows and their logits (C, V), in one buffer, until all rows have come."""
        size = self.chunk_rows(len(hidden))
        buffer = self.logits_buffer(hidden, size)
        for rows in chunks(len(hidden), size):
            z = buffer[: rows.stop - rows.start]
            self.logits(hidden[rows], z)
            yield rows, z

    def statistics(self, hidden: Tensor, targets: Tensor, inverse_temperature: Tensor) -> Tensor:
        """(4, N) statistics of all rows over the whole vocabulary (2NHV FLOP)."""
        columns, cap = targets - self.first, self.settings.cap
        name = "fused_score" if self.settings.row_kernel == "fused-epilogue" else "score"
        fused = getattr(self.backend, name, None) if self.settings.logits_dtype == torch.float32 else None
        if fused is not None:
            stats = fused(hidden, self.weight, columns, inverse_temperature, cap)
        else:
            stats = hidden.new_empty(4, len(hidden), dtype=self.dtype)
            for rows, z in self.chunked_logits(hidden):
                stats[:, rows] = self.backend.row_stats(z, columns[rows], inverse_temperature[rows], cap)
        return stats if self.settings.group is None else merge_over(self.settings.group, stats)

    def empty_gradients(
        self, hidden: Tensor, needs_hidden: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Tensors for `add_gradients`; None for a gradient that is not needed."""
        d_hidden = hidden.new_empty(hidden.shape, dtype=gradient_dtype(hidden)) if needs_hidden else None
        if not needs_weight:
            return d_hidden, None
        new = hidden.new_empty if len(hidden) else hidden.new_zeros  # the first chunk writes, others add
        return d_hidden, new(self.shape, dtype=self.d_weight_dtype(hidden))

    def add_gradients(
        self, z: Tensor, h: Tensor, targets: Tensor, inverse_temperature: Tensor, g: Gradient, rows: slice,
        d_hidden: Tensor | None, d_weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Add these rows' part to the gradients. Their logits z (C, V) are overwritten.

        A gradient in FP16 is divided by a unit in which the largest is near the end of FP16's range. What
        underflows then is below 2^-40 of that.
        """
        settings, backend = self.settings, self.backend
        exact = settings.exact or torch.float32 in (h.dtype, self.weight.dtype)
        unit = None
        if h.dtype == torch.float16 and self.name == "triton":
            unit = g.bound() / LARGEST_FP16
            g = g.over(unit)
        dtype = self.dtype if exact else h.dtype
        dz = backend.row_grads(z, targets - self.first, inverse_temperature, settings.cap, g, dtype)
        if d_hidden is not None:
            dx = h.new_empty(h.shape, dtype=self.dtype)
            backend.d_hidden(dz, self.weight, dx)
            if unit is not None:
                dx.mul_(unit)
            if settings.group is not None:  # each rank has summed over its shard of the vocabulary
                dist.all_reduce(dx, dist.ReduceOp.SUM, settings.group)
            d_hidden[rows] = dx
        if d_weight is not None:
            if unit is not None and rows.start:
                d_weight.div_(unit)
            backend.add_d_weight(dz, h, d_weight, first=not rows.start)
            if unit is not None:
                d_weight.mul_(unit)


def chunks(n: int, most: int) -> list[slice]:
    """0..n in as few slices of at most `most` as possible, of about equal length."""
    count = -(-n // most)
    ends = [n * i // max(1, count) for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def gradient_dtype(x: Tensor) -> torch.dtype:
    """The type in which x's gradient is kept for the backward.

    FP32 for FP16: the gradient may only be representable in FP16 once the caller's loss scale is applied.
    """
    return torch.float32 if x.dtype == torch.float16 else x.dtype
