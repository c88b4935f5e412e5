"""The row kernels, one program per row of FP32 logits: statistics, the gradient, and both in one pass.

In place. 16-bit results take the row's own bytes: column j of a row is written to bytes [2j, 2j + 2) of it
and read from [4j, 4j + 4). Tile t therefore writes bytes [2tB, 2(t+1)B), which belong to tiles t/2 .. t of
the logits: never to a later one. So a program may write tile t once its threads have read tiles 0 .. t. They
walk the tiles in order, but warps drift apart; a barrier between each tile's load and its store keeps
them in step. Rows do not share bytes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import Gradient
from .config import RowConfig, launch, row_config
from .elementwise import LN_2, LOG2_E, LOWEST, RAISE, capped, from_bf16, rounded, times_cap_slope, to_bf16


def row_stats(
    z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float, config: RowConfig | None = None
) -> Tensor:
    """(4, C) FP32 statistics of the rows of z (C, V) FP32 (see `kernels.rows`); one read of z.

    The anchor is the row's maximum. targets (C,) int64; one outside [0, V) belongs to another shard: logit 0.
    """
    rows, vocabulary = z.shape
    config = config or row_config(vocabulary)
    stats = z.new_empty(4, rows)
    inputs = z, *dense(targets, inverse_temperature), stats, vocabulary, z.stride(0)
    lanes = min(32 * config.warps, config.block // 4)
    launch(_row_stats, (rows,), *inputs, CAP=cap, LANES=lanes, **config.constants)
    return stats


def row_grads(
    z: Tensor,  # (C, V) FP32
    targets: Tensor,  # (C,) int64
    inverse_temperature: Tensor,  # (C,)
    cap: float,
    g: Gradient,
    dtype: torch.dtype,
    config: RowConfig | None = None,
) -> Tensor:
    """The logits' gradient in place of z (C, V): e^v (a + b (v + k)), v = u − anchor, and dz_y at the target.

    FP32; or bf16 or FP16, a view of z whose rows start where z's do, 2V or more elements apart.
    """
    rows, vocabulary = z.shape
    config = config or row_config(vocabulary)
    dz = z if dtype == torch.float32 else in_place(z, dtype)
    b, k = g.a if g.b is None else g.b, g.a if g.k is None else g.k  # any pointers, if there is no entropy
    vectors = dense(targets, inverse_temperature, g.anchor, g.a, b, k, g.dz_y)
    inputs = z, dz, *vectors, vocabulary, z.stride(0), dz.stride(0)
    launch(_row_grads, (rows,), *inputs, CAP=cap, BONUS=g.b is not None, **config.constants)
    return dz


def single_pass(
    z: Tensor,  # (C, V) FP32
    targets: Tensor,  # (C,) int64
    inverse_temperature: Tensor,  # (C,)
    logprobs_gen: Tensor,  # (C,)
    config: RowConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Ê, which is e^{u − m} in bf16 in place of z (C, V) and −others at the target, and (4, C) statistics.

    One read, one write. The anchor m is the generator's estimate of the row's log-sum-exp, u_y − log π_gen,
    raised where a logit exceeds it by more than RAISE; without a target in [0, V) it starts at the first
    tile's maximum. log π_gen counts as −60 at least (generators report −9999 for impossible tokens), so that
    e^{u − m} is a normal number for logits down to 27 below the target's.

    Then dX = s (Ê W), dW = Êᵀ (s h), s = −c / total.
    """
    rows, vocabulary = z.shape
    config = config or row_config(vocabulary)
    exp, stats = in_place(z, torch.bfloat16), z.new_empty(4, rows)
    inputs = z, exp, *dense(targets, inverse_temperature, logprobs_gen), stats, vocabulary
    launch(_single_pass, (rows,), *inputs, z.stride(0), exp.stride(0), **config.constants)
    return exp, stats


def dense(*vectors: Tensor) -> list[Tensor]:
    """Each (C,) with its elements one after another, as the kernels read them."""
    return [x.contiguous() for x in vectors]


def in_place(z: Tensor, dtype: torch.dtype) -> Tensor:
    """(C, V) of a 16-bit type in the memory of z (C, V) FP32: each row starts where z's does."""
    return z.view(dtype)[:, : z.shape[1]]


@triton.jit
def load_tile(pointers, inside, WHOLE: tl.constexpr):
    """A row's tile. A mask that ends at an odd column would split wide loads, so whole tiles have none."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_tile(pointers, tile, inside, WHOLE: tl.constexpr):
    """Store a row's tile, as `load_tile` loads it."""
    if WHOLE:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=inside)


@triton.jit
def _row_stats(
    z, targets, inverse_temperature, stats, vocabulary, stride,
    CAP: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Each of the LANES holds the maximum and the sums of its own columns; they are joined once a row.

    A lane is a thread where a tile's columns are seen as (loads, LANES, columns of a load).
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    scale = tl.load(inverse_temperature + row)
    target = tl.load(targets + row)
    z += row * stride
    local = (target >= 0) & (target < vocabulary)
    y = tl.where(local, target, -1).to(tl.int32)
    z_y = capped(tl.load(z + tl.maximum(y, 0)), CAP)
    scale_2 = scale * LOG2_E
    m = z_y + tl.zeros((LANES,), tl.float32)  # a logit of this row, so that no lane's maximum is LOWEST
    others, dot = m * 0.0, m * 0.0
    whole = vocabulary // BLOCK * BLOCK
    for TAIL in tl.static_range(2):
        for start in range(whole if TAIL else 0, vocabulary if TAIL else whole, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            x = capped(load_tile(z + columns, inside, not TAIL), CAP)
            if TAIL:
                x = tl.where(inside, x, LOWEST)
            if (y >= start) & (y < start + BLOCK):
                x = tl.where(columns == y, LOWEST, x)
            x = x.reshape(BLOCK // LANES // 4, LANES, 4)
            highest = tl.maximum(m, tl.max(tl.max(x, 2), 0))
            shift = (m - highest) * scale_2
            shrink = tl.exp2(shift)
            v = (x - highest[None, :, None]) * scale_2  # in base 2
            exp = tl.exp2(v)
            dot = shrink * (dot + shift * others) + tl.sum(tl.sum(exp * v, 2), 0)
            others = shrink * others + tl.sum(tl.sum(exp, 2), 0)
            m = highest
    highest = tl.max(m, 0)
    shift = (m - highest) * scale_2
    shrink = tl.exp2(shift)
    # By FMA: compilers fuse plain products with the first step of a sum, differently in each of two lanes.
    zero = tl.zeros((LANES,), tl.float32)
    others, dot = tl.fma(shrink, others, zero), tl.fma(shrink, dot + shift * others, zero)
    tl.store(stats + row, highest * scale)
    tl.store(stats + rows + row, tl.sum(others, 0))
    tl.store(stats + 2 * rows + row, tl.where(local, z_y * scale, 0.0))
    tl.store(stats + 3 * rows + row, tl.sum(dot, 0) * LN_2)


@triton.jit
def _row_grads(
    z, dz, targets, inverse_temperature, anchor, a, b, k, dz_y, vocabulary, stride, dz_stride,
    CAP: tl.constexpr, BONUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse_temperature + row)
    target = tl.load(targets + row)
    m = tl.load(anchor + row)
    factor = tl.load(a + row)
    at_target = tl.load(dz_y + row)
    z += row * stride
    dz += row * dz_stride
    whole = vocabulary // BLOCK * BLOCK
    for TAIL in tl.static_range(2):
        for start in range(whole if TAIL else 0, vocabulary if TAIL else whole, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            x = capped(load_tile(z + columns, inside, not TAIL), CAP)
            v = x * scale - m
            coefficient = factor
            if BONUS:
                coefficient += tl.load(b + row) * (v + tl.load(k + row))
            g = tl.where(columns == target, at_target, tl.exp(v) * coefficient)
            g = times_cap_slope(g, x, CAP)
            if dz.dtype.element_ty != tl.float32:
                tl.debug_barrier()  # all threads have read this tile: see the top of the file
            store_tile(dz + columns, rounded(g, dz.dtype.element_ty), inside, not TAIL)


@triton.jit
def _single_pass(
    z, exp_out, targets, inverse_temperature, logprobs_gen, stats, vocabulary, stride, exp_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    scale = tl.load(inverse_temperature + row)
    target = tl.load(targets + row)
    z += row * stride
    exp_out += row * exp_stride
    local = (target >= 0) & (target < vocabulary)
    u_y = tl.load(z + target, mask=local, other=0.0) * scale
    estimate = u_y - tl.minimum(tl.maximum(tl.load(logprobs_gen + row), -60.0), 0.0)
    m = tl.where(local, estimate, LOWEST)
    others, dot = 0.0, 0.0
    whole = vocabulary // BLOCK * BLOCK
    for TAIL in tl.static_range(2):
        for start in range(whole if TAIL else 0, vocabulary if TAIL else whole, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            u = load_tile(z + columns, inside, not TAIL) * scale
            u = tl.where(inside, u, LOWEST)
            highest = tl.max(u, 0)
            # The same barrier as in _row_grads, and it orders the first tile's store after the load of z_y.
            tl.debug_barrier()
            if highest - m > RAISE:  # rare: the policy differs from the generator's by e^40
                shift = m - highest
                shrink = tl.exp(shift)
                dot = shrink * (dot + shift * others)
                others = shrink * others
                m = highest
                for earlier in range(0, start, BLOCK):
                    pointers = exp_out + earlier + tl.arange(0, BLOCK)  # whole tiles: no mask
                    tl.store(pointers, to_bf16(from_bf16(tl.load(pointers)) * shrink))
            v = u - m
            exp = tl.where(columns == target, 0.0, tl.exp(v))
            dot += tl.sum(exp * v, 0)
            others += tl.sum(exp, 0)
            store_tile(exp_out + columns, to_bf16(exp), inside, not TAIL)
    tl.debug_barrier()  # another thread has written the target's column
    tl.store(exp_out + target, to_bf16(0.0 - others), mask=local)
    tl.store(stats + row, m)
    tl.store(stats + rows + row, others)
    tl.store(stats + 2 * rows + row, u_y)
    tl.store(stats + 3 * rows + row, dot)
