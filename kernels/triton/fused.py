"""Launches of the GEMM kernel: logits, statistics without logits, and the single pass without FP32 logits."""
# mypy: disable-error-code="import-untyped,import-not-found"

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import gemm, quack
from .config import GemmConfig, capability, gemm_config, launch, multiprocessors
from .quack import QuackConfig, quack_config
from .rows import dense

SCORED_ROWS = 16384
"""Rows scored at a time. The tiles' statistics take 12 · rows · V / 256 bytes: 117 MB at V = 152k."""


def logits(h: Tensor, weight: Tensor, out: Tensor, config: GemmConfig | None = None) -> None:
    """out (C, V) FP32 = h Wᵀ, with weight from `prepare`; a row's bits do not depend on the other rows."""
    config = config or _config(gemm.LOGITS, h, weight, out, 0.0)
    _launch(gemm.LOGITS, h, weight, out, [out.new_empty(0)] * 5, 0.0, config)


def score(
    h: Tensor,  # (N, H)
    weight: Tensor,  # from `prepare`
    targets: Tensor,  # (N,) int64
    inverse_temperature: Tensor,  # (N,)
    cap: float,
    config: GemmConfig | QuackConfig | None = None,
) -> Tensor:
    """(4, N) FP32 statistics of the logits h Wᵀ (see `kernels.rows`), which are never in memory (2NHV FLOP).

    Targets outside [0, V) belong to another shard. A row's bits do not depend on the other rows.
    """
    stats = torch.empty(4, len(h), dtype=torch.float32, device=h.device)
    for start in range(0, len(h), SCORED_ROWS):
        rows = slice(start, start + SCORED_ROWS)
        y, scale = dense(targets[rows], inverse_temperature[rows])
        stats[:, rows] = _statistics(gemm.SCORE, h[rows], weight, scale, [y, scale, scale], cap, config)[0]
    return stats


def fused_score(
    h: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float
) -> Tensor:
    """The same by QuACK's GEMM where `kernels.triton.quack` has a configuration."""
    config = None if cap else _quack_config(h, weight)
    return score(h, weight, targets, inverse_temperature, cap, config)


def fused_epilogue(
    h: Tensor,  # (C, H)
    weight: Tensor,  # from `prepare`
    targets: Tensor,  # (C,) int64
    inverse_temperature: Tensor,  # (C,)
    logprobs_gen: Tensor,  # (C,)
    config: GemmConfig | QuackConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`kernels.triton.rows.single_pass` in the GEMM's epilogue: no FP32 logits reach memory.

    Returns Ê (C, V) in bf16 and the (4, C) statistics. A tile with a logit far above the row's anchor uses
    its own anchor; `settle` rescales such rows to a common one at the end.
    """
    rows, vocabulary = len(h), len(weight)
    exp = torch.empty(rows, -(-vocabulary // 8) * 8, dtype=torch.bfloat16, device=h.device)[:, :vocabulary]
    anchors = torch.empty(rows, dtype=torch.float32, device=h.device)
    h, parts = _row_major(h), weight.shape[1] // h.shape[1]
    targets, scale, logprobs_gen = dense(targets, inverse_temperature, logprobs_gen)
    sizes = vocabulary, h.shape[1], h.stride(0), weight.stride(0)
    tensors = h, weight, targets, scale, logprobs_gen, anchors
    launch(gemm.estimate_anchors, (rows,), *tensors, *sizes, PARTS=parts, BLOCK=512, num_warps=4)
    vectors, config = [targets, scale, anchors], config or _quack_config(h, weight)
    stats, partial, columns = _statistics(gemm.SINGLE_PASS, h, weight, exp, vectors, 0.0, config)
    tensors = exp, partial, anchors, scale, stats, targets
    tile = {"COLUMNS": columns, "BLOCK": triton.next_power_of_2(columns)}
    launch(gemm.settle, (rows,), *tensors, vocabulary, exp.stride(0), **tile, num_warps=1)
    return exp, stats


def _statistics(
    epilogue: Any,
    h: Tensor,
    weight: Tensor,
    out: Tensor,
    vectors: list[Tensor],  # targets, inverse temperature, anchors: (rows,) each
    cap: float,
    config: GemmConfig | QuackConfig | None,
) -> tuple[Tensor, Tensor, int]:
    """(4, rows) statistics, those of each column tile, and the number of columns of a tile."""
    config = config or _config(epilogue, h, weight, out, cap)
    rows, tiles = len(h), triton.cdiv(len(weight), config.columns)
    partial = torch.empty(3, tiles, rows, dtype=torch.float32, device=h.device)
    target_logits, stats = partial.new_zeros(rows), partial.new_empty(4, rows)
    vectors = [*vectors, partial, target_logits]
    if isinstance(config, QuackConfig):
        quack.launch(config, _row_major(h), weight, vectors, out if epilogue == gemm.SINGLE_PASS else None)
    else:
        _launch(epilogue, h, weight, out, vectors, cap, config)
    tensors, grid = (partial, target_logits, stats), (triton.cdiv(rows, 32),)
    launch(gemm.merge, grid, *tensors, rows, tiles, TILES=32, ROWS=32, num_warps=4)
    return stats, partial, config.columns


def _launch(
    epilogue: Any,
    h: Tensor,
    weight: Tensor,
    out: Tensor,
    vectors: list[Tensor],
    cap: float,
    config: GemmConfig,
) -> None:
    h, rows, vocabulary, width = _row_major(h).to(weight.dtype), len(h), len(weight), h.shape[1]
    tiles = triton.cdiv(rows, config.rows) * triton.cdiv(vocabulary, config.columns)
    programs = min(tiles, config.programs_per_sm * multiprocessors(h.device))
    left, right, result = h, weight, out
    if config.tma:
        left = TensorDescriptor.from_tensor(h, [config.rows, config.depth])
        right = TensorDescriptor.from_tensor(weight, [config.columns, config.depth])
        if epilogue != gemm.SCORE:
            result = TensorDescriptor.from_tensor(out, [config.rows, config.columns // config.subtiles])
    sizes = rows, vocabulary, width, h.stride(0), weight.stride(0), out.stride(0)
    even, parts = width % config.depth == 0, weight.shape[1] // width
    constants = {"CAP": cap, "EPILOGUE": epilogue, "EVEN": even, "PARTS": parts} | config.constants
    launch(gemm.gemm, (programs,), left, right, result, *vectors, *sizes, **constants)


def _config(epilogue: Any, h: Tensor, weight: Tensor, out: Tensor, cap: float) -> GemmConfig:
    operands = (h, weight) if epilogue == gemm.SCORE else (h, weight, out)
    aligned = all(_aligned(x) for x in operands)
    return gemm_config(capability(h.device), weight.dtype, aligned, cap != 0.0)


def _quack_config(h: Tensor, weight: Tensor) -> QuackConfig | None:
    aligned = h.shape[1] == weight.shape[1] and _aligned(_row_major(h)) and _aligned(weight)
    return quack_config(capability(h.device), {h.dtype, weight.dtype}, aligned)


def _aligned(x: Tensor) -> bool:
    """True if TMA can copy it: contiguous rows that start at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _row_major(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
