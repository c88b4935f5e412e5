"""The GEMM h Wᵀ with FP32 accumulation, and its epilogues, which work on a tile while it is in registers.

Persistent: each program takes tiles pid, pid + programs, … of a grouped order, in which programs that run
at the same time share rows of h and of W in the L2 cache. A logit is summed over the hidden size in a fixed
order, whatever rows are beside it: small inputs are masked and never get other block sizes.

The tensor cores are idle during an epilogue, so it does little for each logit: one FMA and one exp2 give e^v,
and three more instructions take it into the maximum and the two sums. The vocabulary's edge and the rows'
targets are taken out of the product first, in branches that most tiles skip. There a tile's columns are seen
as (columns / 8, 8). In wgmma's layout the first of these dimensions is held in registers only, so columns are
compared with constants. With a view as (columns,) the compiler would keep the index of every column in a
register across the loop, and spill.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

import triton
import triton.language as tl

from .elementwise import INTERPRET, LN_2, LOG2_E, LOWEST, RAISE, as_fp32, capped, fma, from_bf16, to_bf16

LOGITS: tl.constexpr = tl.constexpr(0)
"""out (rows, vocabulary) FP32: the logits."""
SCORE: tl.constexpr = tl.constexpr(1)
"""partial (3, column tiles, rows) FP32: each tile's maximum, others and dot; target_logits (rows,)."""
SINGLE_PASS: tl.constexpr = tl.constexpr(2)
"""The same as SCORE, but with the given anchor, or the tile's maximum where that is far higher. In addition
out (rows, vocabulary) bf16: e^{u − anchor of the tile}, 0 at the target."""


@triton.jit(do_not_specialize=["rows"])  # a row's bits must not depend on how many there are
def gemm(
    h, weight, out, targets, inverse_temperature, anchors, partial, target_logits,
    rows, vocabulary, width, h_stride, weight_stride, out_stride,
    CAP: tl.constexpr, PARTS: tl.constexpr, EPILOGUE: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    SUBTILES: tl.constexpr, PIECE: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """h (rows, width), weight (vocabulary, PARTS · width): FP32 or bf16; descriptors if TMA, or pointers."""
    tl.assume(width > 0)  # else the compiler writes the whole loop a second time, for no steps
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
                left = block(h, row_start, rows, h_stride, depth, width, ROWS, DEPTH, EVEN)
                w = weight + part * width
                right = block(w, column_start, vocabulary, weight_stride, depth, width, COLUMNS, DEPTH, EVEN)
            if INTERPRET:  # its dot is wrong for bf16, and NumPy's result depends on a row's position
                product += tl.sum(as_fp32(left)[:, None, :] * as_fp32(right)[None, :, :], 2)
            else:
                product = tl.dot(left, right.T, product, input_precision="ieee")
        if EPILOGUE == LOGITS:
            for index in tl.static_range(SUBTILES):
                part = subtile(product, index, SUBTILES)
                column = column_start + index * (COLUMNS // SUBTILES)
                store(out, part, row_start, column, rows, vocabulary, out_stride, TMA)
        else:
            statistics(
                product, targets, inverse_temperature, anchors, out, partial, target_logits, row_start,
                column_tile, rows, vocabulary, out_stride, CAP, EPILOGUE, TMA, SUBTILES, PIECE,
            )  # fmt: skip


@triton.jit
def statistics(
    product, targets, inverse_temperature, anchors, out, partial, target_logits, row_start, column_tile,
    rows, vocabulary, out_stride, CAP: tl.constexpr, EPILOGUE: tl.constexpr, TMA: tl.constexpr,
    SUBTILES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The epilogues SCORE and SINGLE_PASS of a tile: product (ROWS, COLUMNS) are its logits.

    With s = scale · log2 e, e^{(z − m) scale} is 2^(z s − m s), where `fma` rounds once. m s was rounded
    before, which changes a row's sums by a common factor: `error`, exact by FMA, takes it out again.
    """
    COLUMNS: tl.constexpr = product.shape[1]
    PIECES: tl.constexpr = COLUMNS // SUBTILES // PIECE
    row = row_start + tl.arange(0, product.shape[0])
    inside = row < rows
    column_start = column_tile * COLUMNS
    columns = tl.minimum(vocabulary - column_start, COLUMNS)
    product = capped(product, CAP)
    # Triton waits for the product where it is used first. In a branch that wait would come too late.
    m = row_maximum(product)
    if columns < COLUMNS:
        product = without_edge(product, columns)
        m = row_maximum(product)
    scale = tl.load(inverse_temperature + row, mask=inside, other=1.0)
    target = tl.load(targets + row, mask=inside, other=-1) - column_start
    target = tl.where((target >= 0) & (target < columns), target, -1).to(tl.int32)
    if tl.max(target, 0) >= 0:
        product, z_y = without_targets(product, target)
        tl.store(target_logits + row, z_y * scale, mask=target >= 0)
    if EPILOGUE == SINGLE_PASS:
        anchor = tl.load(anchors + row, mask=inside, other=0.0)
        m = tl.where((m - anchor) * scale > RAISE, m, anchor)
    scale_2 = scale * LOG2_E
    m_2 = m * scale_2
    exp_sums = tl.zeros((product.shape[0], PIECE), tl.float32)
    dot_sums = exp_sums
    for index in tl.static_range(SUBTILES):
        v_2 = fma(subtile(product, index, SUBTILES), scale_2[:, None], 0.0 - m_2[:, None])
        exp = tl.exp2(v_2)
        for piece in tl.static_range(PIECES):
            exp_piece = subtile(exp, piece, PIECES)
            exp_sums += exp_piece
            dot_sums = tl.fma(exp_piece, subtile(v_2, piece, PIECES), dot_sums)
        if EPILOGUE == SINGLE_PASS:
            column = column_start + index * (COLUMNS // SUBTILES)
            store(out, to_bf16(exp), row_start, column, rows, vocabulary, out_stride, TMA)
    others, dot = tl.sum(exp_sums, 1), tl.sum(dot_sums, 1)
    error = fma(m, scale_2, 0.0 - m_2)
    shrink = 1.0 - error * LN_2
    plane = tl.cast(tl.cdiv(vocabulary, COLUMNS), tl.int64) * rows
    partial += column_tile.to(tl.int64) * rows + row
    tl.store(partial, m * scale, mask=inside)
    tl.store(partial + plane, shrink * others, mask=inside)
    tl.store(partial + 2 * plane, shrink * LN_2 * (dot - error * others), mask=inside)


@triton.jit
def row_maximum(x):
    """(R,) from x (R, C)."""
    return tl.max(tl.max(eighths(x), 1), 1)


@triton.jit
def without_edge(x, columns):
    """x (R, C) with LOWEST in place of all but its first columns."""
    end = (columns - tl.arange(0, 8) + 7) // 8
    inside = tl.arange(0, x.shape[1] // 8)[None, :, None] < end[None, None, :]
    return tl.where(inside, eighths(x), LOWEST).reshape(x.shape[0], x.shape[1])


@triton.jit
def without_targets(x, target):
    """x (R, C) with LOWEST at each row's target (R,), and what was there; for target −1 x and 0."""
    lane = tl.where((target % 8)[:, None] == tl.arange(0, 8)[None, :], (target // 8)[:, None], -1)
    at_target = tl.arange(0, x.shape[1] // 8)[None, :, None] == lane[:, None, :]
    x_y = tl.sum(tl.sum(tl.where(at_target, eighths(x), 0.0), 1), 1)
    return tl.where(at_target, LOWEST, eighths(x)).reshape(x.shape[0], x.shape[1]), x_y


@triton.jit
def eighths(x):
    """x (R, C) as (R, C / 8, 8): see the top of the file."""
    return x.reshape(x.shape[0], x.shape[1] // 8, 8)


@triton.jit
def block(
    matrix, row_start, rows, stride, depth, width, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr
):
    """(ROWS, DEPTH) of a row-major matrix from column depth on; 0 past width, unless EVEN."""
    row = tl.minimum(row_start + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    k = depth + tl.arange(0, DEPTH)
    pointers = matrix + row[:, None] * stride + k[None, :]
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=(k < width)[None, :], other=0.0)


@triton.jit
def store(out, part, row_start, column_start, rows, vocabulary, stride, TMA: tl.constexpr):
    """part into out (rows, vocabulary) at (row_start, column_start), masked to its bounds."""
    if TMA:
        out.store([row_start, column_start], part)
    else:
        row = row_start + tl.arange(0, part.shape[0])
        column = column_start + tl.arange(0, part.shape[1])
        pointers = out + row.to(tl.int64)[:, None] * stride + column[None, :]
        tl.store(pointers, part, mask=(row < rows)[:, None] & (column < vocabulary)[None, :])


@triton.jit
def subtile(x, INDEX: tl.constexpr, SUBTILES: tl.constexpr):
    """One of the SUBTILES equal parts of the columns of x; SUBTILES is a power of two."""
    if SUBTILES == 1:  # noqa: SIM108  # Triton's compiler takes no such expression here
        part = x
    else:
        part = half(subtile(x, INDEX // 2, SUBTILES // 2), INDEX % 2)
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
        pointers = partial + tile.to(tl.int64)[:, None] * rows + row[None, :]
        tile_m = tl.load(pointers, mask=mask, other=LOWEST)
        tile_others = tl.load(pointers + plane, mask=mask, other=0.0)
        tile_dot = tl.load(pointers + 2 * plane, mask=mask, other=0.0)
        highest = tl.maximum(m, tl.max(tile_m, 0))
        shift, own_shift = tile_m - highest[None, :], m - highest
        shrink, own_shrink = tl.exp(shift), tl.exp(own_shift)
        dot = own_shrink * (dot + own_shift * others) + tl.sum(shrink * (tile_dot + shift * tile_others), 0)
        others = own_shrink * others + tl.sum(shrink * tile_others, 0)
        m = highest
    tl.store(stats + row, m, mask=inside)
    tl.store(stats + rows + row, others, mask=inside)
    tl.store(stats + 2 * rows + row, tl.load(target_logits + row, mask=inside), mask=inside)
    tl.store(stats + 3 * rows + row, dot, mask=inside)


@triton.jit
def estimate_anchors(
    h, weight, targets, inverse_temperature, logprobs_gen, anchors, vocabulary, width, h_stride,
    weight_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The generator's estimate of the log-sum-exp, u_y − log π_gen, times the temperature, as logits are
    before their scaling; LOWEST without a target.
    """
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
            products += as_fp32(left) * as_fp32(right)
    logprob = tl.minimum(tl.maximum(tl.load(logprobs_gen + row), -60.0), 0.0)
    anchor = tl.sum(products, 0) - logprob / tl.load(inverse_temperature + row)
    tl.store(anchors + row, tl.where(local, anchor, LOWEST))


@triton.jit
def settle(
    exp, partial, anchors, inverse_temperature, stats, targets, vocabulary, stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn SINGLE_PASS's exp into Ê in place: −others at the target, one anchor for all tiles of a row."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    target = tl.load(targets + row)
    m = tl.load(stats + row)
    exp += row * stride
    estimate = tl.load(anchors + row) * tl.load(inverse_temperature + row)
    if m > estimate:  # rare: the policy differs from the generator's by e^40
        anchor = partial + row
        for start in range(0, vocabulary, COLUMNS):
            shift = tl.load(anchor) - m
            anchor += rows
            if shift < 0:
                column = start + tl.arange(0, BLOCK)
                inside = column < tl.minimum(vocabulary, start + COLUMNS)
                scaled = from_bf16(tl.load(exp + column, mask=inside)) * tl.exp(shift)
                tl.store(exp + column, to_bf16(scaled), mask=inside)
    tl.debug_barrier()  # another thread may have rescaled the target's column
    others = tl.load(stats + rows + row)
    tl.store(exp + target, to_bf16(0.0 - others), mask=(target >= 0) & (target < vocabulary))
