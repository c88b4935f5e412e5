"""The backend that runs on any device: torch's GEMMs, and a softmax over a few rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .precision import ieee_fp32
from .rows import Gradient

CACHED_BYTES = 6 << 20  # rows processed together on a CPU: they stay in the cache between the passes
score = None  # there is no fused scoring: the op computes chunks of logits


def why_not() -> str:
    """Empty: torch is always there."""
    return ""


def info() -> dict[str, str]:
    """torch's version."""
    return {"torch": torch.__version__}


def prepare(hidden: Tensor, weight: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
    """The weight for the GEMMs below: bf16 if both are bf16 on CUDA, otherwise converted to `dtype`."""
    if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
        return weight
    return weight.to(dtype)


def logits(h: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (C, V) = h Wᵀ, accumulated in the type of `out`."""
    d_hidden(h, weight.t(), out)


def row_stats(z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float) -> Tensor:
    """(4, C) statistics of each row (see `kernels.rows`); z is not changed."""
    stats = z.new_empty(4, len(z))
    for rows, scratch in _row_blocks(z):
        y, local = _column(targets[rows], z)
        u = _tempered(z[rows], inverse_temperature[rows], cap, scratch[0])
        anchor = u.amax(1)
        target = u.gather(1, y).where(local, 0.0)[:, 0]
        v = u.sub_(anchor[:, None])
        exp = torch.exp(v, out=scratch[1])
        exp.scatter_(1, y, exp.gather(1, y).masked_fill(local, 0.0))
        others, dot = exp.sum(1), torch.linalg.vecdot(exp, v)
        stats[:, rows] = torch.stack([anchor, others, target, dot])
    return stats


def row_grads(
    z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float, g: Gradient, dtype: torch.dtype
) -> Tensor:
    """The logits' gradient in place of z: e^v (a + b (v + k)), v = u − anchor, and dz_y at the target."""
    for rows, scratch in _row_blocks(z):
        y, local = _column(targets[rows], z)
        v = _tempered(z[rows], inverse_temperature[rows], cap, scratch[0]).sub_(g.anchor[rows, None])
        dz = torch.exp(v, out=scratch[1])
        if g.b is None or g.k is None:
            dz.mul_(g.a[rows, None])
        else:
            dz.mul_(v.add_(g.k[rows, None]).mul_(g.b[rows, None]).add_(g.a[rows, None]))
        dz.scatter_(1, y, g.dz_y[rows, None].where(local, dz.gather(1, y)))
        if cap:  # d(cap · tanh(z / cap)) = 1 − tanh²
            slope = torch.tanh(torch.mul(z[rows], 1 / cap, out=scratch[0]), out=scratch[0]).square_()
            dz.mul_(slope.neg_().add_(1.0))
        z[rows] = dz
    return z.to(dtype) if z.is_cuda else z


def d_hidden(dz: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (C, H) = dz W."""
    if dz.dtype == weight.dtype != out.dtype:
        torch.mm(dz, weight, out_dtype=out.dtype, out=out)
    else:
        with ieee_fp32():
            torch.mm(dz.to(out.dtype), weight.to(out.dtype), out=out)


def add_d_weight(dz: Tensor, h: Tensor, out: Tensor, first: bool = False) -> None:
    """out (V, H) += dzᵀ h, or = if first; the running sum is in the type of `out`."""
    if first:
        return d_hidden(dz.t(), h, out)
    if dz.dtype == h.dtype != out.dtype:
        torch.addmm(out, dz.t(), h, out_dtype=out.dtype, out=out)
    else:
        with ieee_fp32():
            out.addmm_(dz.t().to(out.dtype), h.to(out.dtype))


def _row_blocks(z: Tensor) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """A few rows at a time, with two scratch tensors of their shape."""
    size = CACHED_BYTES if z.device.type == "cpu" else 16 * CACHED_BYTES
    rows = min(len(z), max(1, size // (z.shape[1] * z.itemsize)))
    first, second = (z.new_empty(rows, z.shape[1]) for _ in range(2))
    for start in range(0, len(z), max(1, rows)):
        part = slice(start, min(start + rows, len(z)))
        length = part.stop - start
        yield part, (first[:length], second[:length])


def _column(targets: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """(C, 1) each: the target's column, clamped to z's, and whether it is one of z's."""
    local = (targets >= 0) & (targets < z.shape[1])
    return targets.clamp(0, z.shape[1] - 1)[:, None], local[:, None]


def _tempered(z: Tensor, inverse_temperature: Tensor, cap: float, out: Tensor) -> Tensor:
    if not cap:
        return torch.mul(z, inverse_temperature[:, None], out=out)
    torch.mul(z, 1 / cap, out=out)
    return torch.tanh(out, out=out).mul_(cap * inverse_temperature[:, None])
