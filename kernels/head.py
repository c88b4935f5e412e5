"""The LM head on a backend: its prepared weight, the size of its chunks, and scoring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .backends import Backend, choose
from .rows import Softmax, merge_over, softmax
from .settings import Settings
from .tokens import Tokens

CHUNK_BYTES = 128 << 20  # one chunk of logits on the CPU: larger than any cache, small beside any memory
CUDA_CHUNK_ROWS = 8192  # each chunk reads and writes dW's FP32 sum, 8VH bytes: few, large chunks
WHOLE_D_WEIGHT = 1 << 24  # elements from which cuBLAS has enough tiles not to split a sum into bf16 parts


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

    @staticmethod
    def prepare(
        hidden: Tensor, weight: Tensor, dtype: torch.dtype, settings: Settings, first: int | Tensor
    ) -> LMHead:
        """Choose a backend for these tensors and prepare the weight for it."""
        name, backend = choose(hidden, weight, settings.backend)
        if settings.row_kernel == "auto":
            bf16 = hidden.dtype == weight.dtype == torch.bfloat16
            single = name == "triton" and bf16 and not settings.needs_two_passes
            settings = replace(settings, row_kernel="single-pass" if single else "two-pass")
        if settings.row_kernel != "two-pass" and name != "triton":
            raise ValueError(
                f"row_kernel {settings.row_kernel!r} needs the backend 'triton'; the backend here is {name!r}"
            )
        prepared = backend.prepare(hidden, weight, dtype, settings.weight_parts)
        return LMHead(prepared, weight.shape, backend, name, dtype, settings, first)

    def chunk_rows(self, n: int) -> int:
        """The number of rows whose logits are in memory at a time."""
        size = self.settings.chunk_rows
        if size is None and self.name == "triton":
            size = CUDA_CHUNK_ROWS
        return max(1, min(n, size or CHUNK_BYTES // (len(self.weight) * self.dtype.itemsize)))

    def logits_buffer(self, hidden: Tensor, rows: int) -> Tensor:
        """(rows, V); on a GPU rows start at multiples of 64 bytes, for wide loads whatever V is."""
        v = len(self.weight)
        width = -(-v // 16) * 16 if self.name == "triton" else v
        return hidden.new_empty(rows, width, dtype=self.dtype)[:, :v]

    def d_weight_dtype(self, hidden: Tensor) -> torch.dtype:
        """In which dW is summed; bf16 where one GEMM makes it whole: that sums in FP32 and rounds once."""
        n, bf16 = len(hidden), self.weight.dtype == hidden.dtype == torch.bfloat16
        whole = self.chunk_rows(n) >= n and self.shape.numel() >= WHOLE_D_WEIGHT and not self.settings.exact
        direct = self.name == "triton" and bf16 and self.weight.shape == self.shape and whole
        return torch.bfloat16 if direct else self.dtype

    def logits(self, h: Tensor, out: Tensor) -> None:
        """out (C, V) = h Wᵀ, rounded to `logits_dtype` if that is a 16-bit type."""
        self.backend.logits(h, self.weight, out)
        if self.settings.logits_dtype != torch.float32:
            out.copy_(out.to(self.settings.logits_dtype))

    def score(self, hidden: Tensor, tokens: Tokens) -> Softmax:
        """Log-probs and entropies of all rows (2NHV FLOP)."""
        columns, n = tokens.targets - self.first, len(hidden)
        fused = getattr(self.backend, "score", None) if self.settings.logits_dtype == torch.float32 else None
        if fused is not None:
            stats = fused(hidden, self.weight, columns, tokens.inverse_temperature, self.settings.cap)
        else:
            stats = hidden.new_empty(4, n, dtype=self.dtype)
            buffer = self.logits_buffer(hidden, self.chunk_rows(n))
            for rows in chunks(n, len(buffer)):
                z = buffer[: rows.stop - rows.start]
                self.logits(hidden[rows], z)
                scale = tokens.inverse_temperature[rows]
                stats[:, rows] = self.backend.row_stats(z, columns[rows], scale, self.settings.cap)
        return softmax(stats if self.settings.group is None else merge_over(self.settings.group, stats))


def chunks(n: int, most: int) -> list[slice]:
    """0..n in as few slices of at most `most` as possible, of about equal length."""
    count = -(-n // most)
    ends = [n * i // max(1, count) for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]
