"""The row work on one chunk of logits: log-prob, entropy, and the logits' gradient in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # of one chunk of logits: well past any cache, well below any memory
CACHED_ROWS = 32  # rows worked on at a time: their logits stay in the cache between the passes over them


@dataclass(frozen=True, slots=True)
class Rows:
    """Softmax statistics of a chunk of C rows; `exp` holds e^{z − max} and is the caller's to overwrite."""

    exp: Tensor  # (C, V)
    total: Tensor  # (C,) Σ_j e^{z_j − max}
    others: Tensor  # (C,) the same without the target
    logp: Tensor  # (C,)
    entropy: Tensor  # (C,)


def chunk_rows(vocabulary: int, itemsize: int) -> int:
    """Rows whose logits fill CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (vocabulary * itemsize))


def logits_of(hidden: Tensor, weight: Tensor, inverse_temperature: Tensor, logits_dtype: torch.dtype) -> Tensor:
    """(C, V) logits in FP32 (FP64 for FP64 inputs), accumulated there, then rounded to `logits_dtype`."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden.to(weight.dtype), weight.t())
    if logits_dtype != torch.float32:
        logits = logits.to(logits_dtype).to(logits.dtype)
    return logits.mul_(inverse_temperature[:, None])


def softmax_rows(logits: Tensor, targets: Tensor, scratch: Tensor | None = None) -> Rows:
    """log π(target) and entropy of each row. Consumes `logits`; `scratch` (≥ C, V) receives `exp`.

    log π = −log1p(Σ_{j≠y} e^{z_j − z_y}) keeps its relative precision as log π → 0; where the target is so
    unlikely that e^{z_y − max} loses digits, log π = z_y − max − log Σ.
    """
    target = targets[:, None]
    z = logits.sub_(logits.amax(1, keepdim=True))  # (C, V), all ≤ 0
    z_y = z.gather(1, target)[:, 0]
    exp = torch.exp(z, out=None if scratch is None else scratch[: len(z)])
    exp_y = exp.gather(1, target)[:, 0]
    others = exp.scatter_(1, target, 0.0).sum(1)
    exp.scatter_(1, target, exp_y[:, None])
    total = others + exp_y
    log_total = total.log()
    likely = z_y > -20
    logp = torch.where(likely, -torch.log1p(others / exp_y.clamp(min=1e-30)), z_y - log_total)
    mean_z = torch.linalg.vecdot(exp, z) / total
    return Rows(exp, total, others, logp, log_total - mean_z)
