"""The row work on one chunk of logits: log-prob, entropy, and the logits' gradient in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # of one chunk of logits: well past any cache, well below any memory
CACHED_BYTES = 6 << 20  # of the rows worked on at a time: they stay in the cache between the passes over them


@dataclass(frozen=True, slots=True)
class Rows:
    """Softmax statistics of C rows; `exp` holds e^{z − max} and is the caller's to overwrite."""

    exp: Tensor  # (C, V)
    total: Tensor  # (C,) Σ_j e^{z_j − max}
    others: Tensor  # (C,) the same without the target
    logp: Tensor  # (C,)
    entropy: Tensor  # (C,)


@dataclass(frozen=True, slots=True)
class Head:
    """The LM head as the GEMMs take it, and the only buffers of width V: a chunk, and rows of it."""

    weight: Tensor  # (V, H) in the logits' type; bf16 with bf16 hidden on CUDA, where mm(out_dtype=) exists
    chunk: Tensor  # (≤ N, V)
    scratch: Tensor  # (rows worked on at a time, V)
    logits_dtype: torch.dtype

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, dtype: torch.dtype, logits_dtype: torch.dtype) -> Head:
        """The head for N rows of hidden, logits accumulated in `dtype`, then rounded to `logits_dtype`."""
        native = hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16
        row = len(weight) * dtype.itemsize
        chunk, scratch = (
            torch.empty(min(len(hidden), max(1, size // row)), len(weight), dtype=dtype, device=hidden.device)
            for size in (CHUNK_BYTES, min(CHUNK_BYTES, CACHED_BYTES))
        )
        return Head(weight if native else weight.to(dtype), chunk, scratch, logits_dtype)

    def chunks(self, hidden: Tensor, inverse_temperature: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Chunk by chunk its rows and their logits, which the caller may overwrite."""
        for start in range(0, len(hidden), max(1, len(self.chunk))):
            rows = slice(start, start + len(self.chunk))
            h = hidden[rows]
            logits = self.chunk[: len(h)]
            if self.weight.dtype == logits.dtype:
                torch.mm(h.to(logits.dtype), self.weight.t(), out=logits)
            else:
                torch.mm(h, self.weight.t(), out_dtype=torch.float32, out=logits)
            if self.logits_dtype != torch.float32:
                logits.copy_(logits.to(self.logits_dtype))
            yield rows, logits.mul_(inverse_temperature[rows, None])

    def cached(self, start: int, logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """A chunk's logits a few rows at a time: (rows, logits, scratch of that shape)."""
        for z in logits.split(max(1, len(self.scratch))):
            yield slice(start, start + len(z)), z, self.scratch[: len(z)]
            start += len(z)


def softmax_rows(logits: Tensor, targets: Tensor, scratch: Tensor) -> Rows:
    """log π(target) and entropy of each row. Consumes `logits`; `scratch`, of their shape, receives `exp`.

    log π = −log1p(Σ_{j≠y} e^{z_j − z_y}) keeps its relative precision as log π → 0; where the target is so
    unlikely that e^{z_y − max} loses digits, log π = z_y − max − log Σ.
    """
    target = targets[:, None]
    z = logits.sub_(logits.amax(1, keepdim=True))  # (C, V), all ≤ 0
    z_y = z.gather(1, target)[:, 0]
    exp = torch.exp(z, out=scratch)
    exp_y = exp.gather(1, target)[:, 0]
    others = exp.scatter_(1, target, 0.0).sum(1)
    exp.scatter_(1, target, exp_y[:, None])
    total = others + exp_y
    log_total = total.log()
    likely = z_y > -20
    logp = torch.where(likely, -torch.log1p(others / exp_y.clamp(min=1e-30)), z_y - log_total)
    mean_z = torch.linalg.vecdot(exp, z) / total
    return Rows(exp, total, others, logp, log_total - mean_z)
