"""The GEMM h Wᵀ with FP32 accumulation, and its epilogues, which work on a tile while it is in registers.

Persistent: each program takes tiles pid, pid + programs, … of a grouped order, in which programs that run
at the same time share rows of h and of W in the L2 cache. A logit is summed over the hidden size in a fixed
order, whatever rows are beside it: small inputs are masked and never get other block sizes.

The epilogue views a tile's columns as (columns / 8, 8). In wgmma's layout the first of these dimensions is
held in registers only, so columns are compared with constants. With a view as (columns,) the compiler would
keep the index of every column in a register across the loop, and spill.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

import triton
import triton.language as tl

from kernels.triton.elementwise import LOWEST, RAISE, as_fp32, capped, from_bf16, to_bf16

LOGITS: tl.constexpr = tl.constexpr(0)
"""out (rows, vocabulary) FP32: the logits."""
SCORE: tl.constexpr = tl.constexpr(1)
"""partial (3, column tiles, rows) FP32: each tile's maximum, others and dot; target_logits (rows,)."""
SINGLE_PASS: tl.constexpr = tl.constexpr(2)
"""As SCORE, but with the given anchor, or the tile's maximum where that is far higher. In addition
out (rows, vocabulary) bf16: e^{u − anchor of the tile}, 0 at the target."""


@triton.jit(do_not_specialize=["rows"])  # a row's bits must not depend on how many there are
def gemm(
    h, weight, targets, inverse_temperature, anchors, out, partial, target_logits,
    rows, vocabulary, width, h_stride, weight_stride, out_stride, cap,
    PARTS: tl.constexpr, EPILOGUE: tl.constexpr, CAPPED: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr, INTERPRET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, SUBTILES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """h (rows, width), weight (vocabulary, PARTS · width): FP32 or bf16; descriptors if TMA, or pointers."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(vocabulary, COLUMNS)
    part_steps = tl.cdiv(width, DEPTH)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        group = tile // (GROUP * column_tiles)
        position = tile - group * GROUP * column_tiles
        group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
        row_start = (group * GROUP + position % group_rows) * ROWS
        column_tile = position // group_rows
        column_start = column_tile * COLUMNS
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(PARTS * part_steps):
            part = 0 if PARTS == 1 else step // part_steps
            depth = (step - part * part_steps) * DEPTH
            if TMA:
                left = h.load([row_start, depth])
                right = weight.load([column_start, part * width + depth])
            else:
                left = block(h, row_start, rows, depth, width, 0, h_stride, ROWS, DEPTH, EVEN)
                right = block(
                    weight, column_start, vocabulary, depth, width, part * width, weight_stride, COLUMNS,
                    DEPTH, EVEN,
                )  # fmt: skip
            if INTERPRET:  # its dot is wrong for bf16, and NumPy's result depends on a row's position
                product += tl.sum(as_fp32(left, True)[:, None, :] * as_fp32(right, True)[None, :, :], 2)
            else:
                product = tl.dot(left, right.T, product, input_precision="ieee")
        if EPILOGUE == LOGITS:
            for index in tl.static_range(SUBTILES):
                store(
                    out, subtile(product, index, SUBTILES), row_start,
                    column_start + index * (COLUMNS // SUBTILES), rows, vocabulary, out_stride, TMA,
                )  # fmt: skip
        else:
            statistics(
                product, targets, inverse_temperature, anchors, out, partial, target_logits, row_start,
                column_tile, rows, vocabulary, out_stride, cap, EPILOGUE, CAPPED, TMA, INTERPRET, SUBTILES,
            )  # fmt: skip


@triton.jit
def statistics(
    product, targets, inverse_temperature, anchors, out, partial, target_logits, row_start, column_tile,
    rows, vocabulary, out_stride, cap, EPILOGUE: tl.constexpr, CAPPED: tl.constexpr, TMA: tl.constexpr,
    INTERPRET: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """The epilogues SCORE and SINGLE_PASS of a tile, in SUBTILES parts, to save registers."""
    COLUMNS: tl.constexpr = product.shape[1]
    row = row_start + tl.arange(0, product.shape[0])
    inside = row < rows
    column_start = column_tile * COLUMNS
    scale = tl.load(inverse_temperature + row, mask=inside, other=1.0)
    target = tl.load(targets + row, mask=inside, other=-1)
    here = (target >= column_start) & (target < tl.minimum(column_start + COLUMNS, vocabulary))
    offset = tl.where(here, target - column_start, -1).to(tl.int32)
    lane = tl.arange(0, 8)
    eighth = tl.where((offset % 8)[:, None] == lane[None, :], (offset // 8)[:, None], -1)  # of the target
    end = (vocabulary - column_start - lane + 7) // 8
    m = scale * 0.0 + LOWEST
    for index in tl.static_range(SUBTILES):
        u = eighths(product, index, SUBTILES, end, scale, cap, CAPPED)
        m = tl.maximum(m, tl.max(tl.max(u, 1), 1))
    if EPILOGUE == SINGLE_PASS:
        given = tl.load(anchors + row, mask=inside, other=0.0)
        m = tl.where(m - given > RAISE, m, given)
    others, dot, u_y = m * 0.0, m * 0.0, m * 0.0
    for index in tl.static_range(SUBTILES):
        u = eighths(product, index, SUBTILES, end, scale, cap, CAPPED)
        column = index * (COLUMNS // 8 // SUBTILES) + tl.arange(0, COLUMNS // 8 // SUBTILES)
        at_target = column[None, :, None] == eighth[:, None, :]
        u_y += tl.sum(tl.sum(tl.where(at_target, u, 0.0), 1), 1)
        v = u - m[:, None, None]
        exp = tl.where(at_target, 0.0, tl.exp(v))
        others += tl.sum(tl.sum(exp, 1), 1)
        dot += tl.sum(tl.sum(exp * v, 1), 1)
        if EPILOGUE == SINGLE_PASS:
            store(
                out, to_bf16(exp, INTERPRET).reshape(product.shape[0], COLUMNS // SUBTILES), row_start,
                column_start + index * (COLUMNS // SUBTILES), rows, vocabulary, out_stride, TMA,
            )  # fmt: skip
    plane = tl.cdiv(vocabulary, COLUMNS).to(tl.int64) * rows
    partial += column_tile.to(tl.int64) * rows + row
    tl.store(partial, m, mask=inside)
    tl.store(partial + plane, others, mask=inside)
    tl.store(partial + 2 * plane, dot, mask=inside)
    tl.store(target_logits + row, u_y, mask=inside & here)


@triton.jit
def block(
    matrix, row_start, rows, depth, width, first, stride,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(ROWS, DEPTH) of a row-major matrix from column first + depth on; 0 past width, unless EVEN."""
    row = tl.minimum(row_start + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    k = depth + tl.arange(0, DEPTH)
    at = matrix + row[:, None] * stride + (first + k)[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=(k < width)[None, :], other=0.0)


@triton.jit
def store(out, part, row_start, column_start, rows, vocabulary, stride, TMA: tl.constexpr):
    """part into out (rows, vocabulary) at (row_start, column_start), masked to its bounds."""
    if TMA:
        out.store([row_start, column_start], part)
    else:
        row = row_start + tl.arange(0, part.shape[0])
        column = column_start + tl.arange(0, part.shape[1])
        at = out + row.to(tl.int64)[:, None] * stride + column[None, :]
        tl.store(at, part, mask=(row < rows)[:, None] & (column < vocabulary)[None, :])


@triton.jit
def eighths(product, INDEX: tl.constexpr, SUBTILES: tl.constexpr, end, scale, cap, CAPPED: tl.constexpr):
    """A subtile's u as (rows, columns / 8, 8); LOWEST in columns past `end` (8,), the vocabulary's."""
    part = subtile(product, INDEX, SUBTILES)
    u = capped(part.reshape(part.shape[0], part.shape[1] // 8, 8), cap, CAPPED) * scale[:, None, None]
    column = INDEX * u.shape[1] + tl.arange(0, u.shape[1])
    return tl.where(column[None, :, None] < end[None, None, :], u, LOWEST)


@triton.jit
def subtile(x, INDEX: tl.constexpr, SUBTILES: tl.constexpr):
    """One of the 1, 2 or 4 equal parts of the columns of x."""
    if SUBTILES == 1:
        part = x
    elif SUBTILES == 2:
        part = half(x, INDEX)
    else:
        part = half(half(x, INDEX // 2), INDEX % 2)
    return part


@triton.jit
def half(x, SECOND: tl.constexpr):
    """The first or second half of the columns of x."""
    first, second = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
    if SECOND:  # noqa: SIM108  # Triton's compiler takes no such expression here
        part = second
    else:
        part = first
    return part


@triton.jit(do_not_specialize=["rows", "tiles"])  # 1 would be a constant, which lacks `to`
def merge(partial, target_logits, stats, rows, tiles, TILES: tl.constexpr, ROWS: tl.constexpr):
    """(4, rows) statistics from those of the column tiles, in their order, TILES at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    plane = tiles.to(tl.int64) * rows
    m = tl.full((ROWS,), LOWEST, tl.float32)
    others, dot = m * 0.0, m * 0.0
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        at = partial + tile.to(tl.int64)[:, None] * rows + row[None, :]
        tile_m = tl.load(at, mask=mask, other=LOWEST)
        tile_others = tl.load(at + plane, mask=mask, other=0.0)
        tile_dot = tl.load(at + 2 * plane, mask=mask, other=0.0)
        highest = tl.maximum(m, tl.max(tile_m, 0))
        shift, own = tile_m - highest[None, :], m - highest
        shrink, own_shrink = tl.exp(shift), tl.exp(own)
        dot = own_shrink * (dot + own * others) + tl.sum(shrink * (tile_dot + shift * tile_others), 0)
        others = own_shrink * others + tl.sum(shrink * tile_others, 0)
        m = highest
    tl.store(stats + row, m, mask=inside)
    tl.store(stats + rows + row, others, mask=inside)
    tl.store(stats + 2 * rows + row, tl.load(target_logits + row, mask=inside), mask=inside)
    tl.store(stats + 3 * rows + row, dot, mask=inside)


@triton.jit
def estimate_anchors(
    h, weight, targets, inverse_temperature, logprobs_gen, anchors, vocabulary, width, h_stride,
    weight_stride, PARTS: tl.constexpr, INTERPRET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u_y − log π_gen per row, the generator's estimate of the log-sum-exp; LOWEST without a target."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    local = (target >= 0) & (target < vocabulary)
    h += row * h_stride
    weight += tl.where(local, target, 0) * weight_stride
    products = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        for start in range(0, width, BLOCK):
            k = start + tl.arange(0, BLOCK)
            left = tl.load(h + k, mask=k < width, other=0.0)
            right = tl.load(weight + part * width + k, mask=k < width, other=0.0)
            products += as_fp32(left, INTERPRET) * as_fp32(right, INTERPRET)
    u_y = tl.sum(products, 0) * tl.load(inverse_temperature + row)
    anchor = u_y - tl.minimum(tl.maximum(tl.load(logprobs_gen + row), -60.0), 0.0)
    tl.store(anchors + row, tl.where(local, anchor, LOWEST))


@triton.jit(do_not_specialize=["rows"])
def settle(
    exp, partial, anchors, stats, targets, rows, vocabulary, stride,
    INTERPRET: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Turn SINGLE_PASS's exp into Ê in place: −others at the target, one anchor for all tiles of a row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    m = tl.load(stats + row)
    exp += row * stride
    if m > tl.load(anchors + row):  # rare: the policy differs from the generator's by e^40
        anchor = partial + row
        for start in range(0, vocabulary, COLUMNS):
            shift = tl.load(anchor) - m
            anchor += rows
            if shift < 0:
                column = start + tl.arange(0, COLUMNS)
                inside = column < vocabulary
                scaled = from_bf16(tl.load(exp + column, mask=inside), INTERPRET) * tl.exp(shift)
                tl.store(exp + column, to_bf16(scaled, INTERPRET), mask=inside)
    tl.debug_barrier()  # another thread may have rescaled the target's column
    others = tl.load(stats + rows + row)
    tl.store(exp + target, to_bf16(0.0 - others, INTERPRET), mask=(target >= 0) & (target < vocabulary))
