"""Calls of the GEMM kernels, as on a Hopper GPU of one multiprocessor, with their results' errors."""

from functools import partial
from typing import Any

import torch
from ptx_cases import BF16, FP16, FP32, Case, error, logits, randn, scaled, stats_error
from torch import Tensor


def merge(rows: int, tiles: int) -> float:
    """Statistics of column tiles, put together."""
    from kernels.triton import config, gemm

    partial, target = randn(3, tiles, rows), randn(rows, seed=1)
    partial[0] *= 9
    partial[1].abs_()
    stats = torch.zeros(4, rows)
    tensors = partial, target, stats
    config.launch(gemm.merge, (-(-rows // 32),), *tensors, rows, tiles, TILES=32, ROWS=32, num_warps=4)
    m, others, dot = partial.double()
    highest = m.max(0).values
    shrink = (m - highest).exp()
    exact = [
        highest,
        (shrink * others).sum(0),
        target.double(),
        (shrink * (dot + (m - highest) * others)).sum(0),
    ]
    return max(error(x, y) for x, y in zip(stats, exact, strict=True))


def anchors(parts: int, width: int) -> float:
    """The generator's estimates of three rows, the last without a target."""
    from kernels.triton import config, gemm

    h, weight = randn(3, width, dtype=BF16), randn(7, parts * width, dtype=BF16, seed=1)
    y, gen, out = torch.tensor([3, 6, 9]), torch.tensor([-1.5, -99.0, -1.0]), torch.zeros(3)
    tensors = h, weight, y, torch.tensor([0.5, 1.0, 1.0]), gen, out
    config.launch(
        gemm.estimate_anchors,
        (3,),
        *tensors,
        7,
        width,
        width,
        parts * width,
        PARTS=parts,
        BLOCK=512,
        num_warps=4,
    )
    products = (h[:2].double().repeat(1, parts) * weight[y[:2]].double()).sum(1)
    return max(error(out[:2], products - torch.tensor([-3.0, -60.0])), float(out[2] != -1e30) * 9)


def settle(vocabulary: int, columns: int) -> float:
    """Rows whose tiles have anchors of their own, and one whose tiles have the estimate."""
    from kernels.triton import config, gemm

    pitch, tiles = -(-vocabulary // 8) * 8, -(-vocabulary // columns)
    exp = randn(2, pitch).abs().to(BF16)[:, :vocabulary]
    partial, y = torch.zeros(3, tiles, 2), torch.tensor([100, 4])
    partial[0, :, 0] = torch.arange(tiles) * 2.0 + 1
    stats = torch.stack([partial[0].amax(0), torch.tensor([3.0, 5.0]), torch.zeros(2), torch.zeros(2)])
    shift = (partial[0] - stats[0]).T.double().repeat_interleave(columns, 1)[:, :vocabulary]
    exact = exp.double() * shift.exp()
    exact[[0, 1], y] = -stats[1].double()
    tensors = exp, partial, torch.zeros(2), torch.ones(2), stats, y
    constants = {"COLUMNS": columns, "BLOCK": 256, "num_warps": 1}
    config.launch(gemm.settle, (2,), *tensors, vocabulary, pitch, **constants)
    return error(exp, exact)


def products(rows: int, width: int, vocabulary: int, dtype: torch.dtype, parts: int = 1) -> Any:
    """(hidden states, weight in parts, targets, inverse temperatures, exact logits)."""
    h, weight = randn(rows, width, dtype=dtype), randn(vocabulary, parts * width, dtype=dtype, seed=1)
    weight /= 8
    _, y, scale = logits(rows, vocabulary)
    return h, weight, y, scale, h.double().repeat(1, parts) @ weight.double().T


def head(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> float:
    """Logits by the GEMM."""
    from kernels.triton import fused

    h, weight, *_, exact = products(rows, width, vocabulary, dtype)
    out = torch.zeros(rows, -(-vocabulary // 4) * 4)[:, :vocabulary]
    fused.logits(h, weight, out)
    return error(out, exact)


def score(rows: int, width: int, vocabulary: int, dtype: torch.dtype, cap: float, parts: int = 1) -> float:
    """Statistics in the GEMM's epilogue."""
    from kernels.triton import fused

    h, weight, y, scale, exact = products(rows, width, vocabulary, dtype, parts)
    u = scaled(exact, scale, cap)
    stats = fused.score(h, weight, y, scale, cap)
    return max(stats_error(stats, u, y, u.max(1).values.float()), log_prob_error(stats, u, y))


def fused_epilogue(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> float:
    """The single pass in the GEMM's epilogue: one logit of the second row raises its tile's anchor, and the
    third row is one of weight 0, whose inputs are zeros."""
    from kernels.triton import fused

    h, weight, y, scale, exact = products(rows, width, vocabulary, dtype)
    h[1:3], weight[-2] = 0, 0
    h[1:2, :4], weight[-2, :4] = 6, 6
    exact = h.double() @ weight.double().T
    u = scaled(exact, scale, 0.0)
    gen = (u[torch.arange(rows), y.clamp(max=vocabulary - 1)] - u.logsumexp(1)).float()
    gen[1:3] = torch.tensor([-1.0, 0.0])[: rows - 1]
    exp, stats = fused.fused_epilogue(h, weight, y, scale, gen)
    exact = (u - stats[0].double()[:, None]).exp()
    at_target = torch.arange(vocabulary) == y[:, None]
    exact = torch.where(at_target, exact - exact.sum(1, keepdim=True), exact)
    return max(error(exp, exact) / 2, stats_error(stats, u, y, stats[0]), log_prob_error(stats, u, y))


def log_prob_error(stats: Tensor, u: Tensor, y: Tensor) -> float:
    """The largest error of a target's log-prob, in 1e-5 nats; the last row has no target."""
    from kernels.rows import softmax

    exact = u[:-1].gather(1, y[:-1, None])[:, 0] - u[:-1].logsumexp(1)
    return float((softmax(stats[:, :-1]).logp - exact).abs().nan_to_num(torch.inf).max() / 1e-5)


# Operands by TMA, with ragged tiles of rows and columns; not aligned; FP32 by cp.async.
SHAPES = [(70, 192, 520, BF16), (70, 200, 300, FP16), (70, 33, 150, BF16), (40, 100, 132, FP32)]


def cases() -> dict[str, Case]:
    """All cases by name."""
    found: dict[str, Case] = {"merge": partial(merge, 40, 37)}
    for columns in (256, 192):
        found[f"settle {columns}"] = partial(settle, 1001, columns)
    for parts, width in ((1, 1030), (3, 64)):
        found[f"anchors {parts}"] = partial(anchors, parts, width)
    for shape in SHAPES:
        found[f"gemm logits {shape}"] = partial(head, *shape)
        found[f"gemm score {shape}"] = partial(score, *shape, 0.0)
        if shape[-1] != FP16:
            found[f"gemm cap {shape}"] = partial(score, *shape, 30.0)
        if shape[-1] == BF16:
            found[f"gemm fused {shape}"] = partial(fused_epilogue, *shape)
    found["gemm score in parts"] = partial(score, 70, 64, 300, BF16, 0.0, 3)
    return found
