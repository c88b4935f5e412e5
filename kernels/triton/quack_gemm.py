"""QuACK's GEMM h Wᵀ, warp-specialised, with the epilogues SCORE and SINGLE_PASS of `kernels.triton.gemm`.

On Hopper QuACK hands the accumulator to `epi_visit_acc` while it is in registers, before its own epilogue
rounds and stores what is left there. On Blackwell the accumulator is in tensor memory, and `epilogue` here
takes the place of QuACK's.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import math
from cutlass.cutlass_dsl import dsl_user_op
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import EpiOp, Scalar
from quack.gemm_sm90 import GemmSm90
from quack.gemm_sm100 import GemmSm100
from quack.rounding import RoundingMode

from .quack import VECTORS

LOWEST, RAISE = -1.0e30, 40.0  # as in `elementwise`, whose values are Triton's
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
SOURCE = sha256(Path(__file__).read_bytes()).hexdigest()


class InMemory(EpiOp):
    """A tensor that the epilogue itself reads or writes: (rows,), or `partial` (3, column tiles, rows)."""

    def host_arg_key(self, value):
        """A part of the key under which QuACK keeps the compiled kernel in a folder."""
        key = super().host_arg_key(value)
        return key and (*key, SOURCE)

    def host_fake_arg(self, key, fctx):
        """A tensor of the key's type and rank without data."""
        dtype, rank, _ = key
        shape = (fctx.m,) if rank == 1 else (3, cute.sym_int(), fctx.m)
        return make_fake_tensor(dtype, shape)

    def param_fields(self):
        """The kernel's parameter."""
        return [(self.name, object, None)]

    def to_params(self, gemm, args):
        """Its value."""
        return {self.name: getattr(args, self.name)}


@dsl_user_op
def fma(x, y, z, *, loc=None, ip=None):
    """x y + z, rounded once."""
    values = (Float32(a).ir_value(loc=loc, ip=ip) for a in (x, y, z))
    return Float32(math.fma(*values, loc=loc, ip=ip))


class Statistics(ComposableEpiMixin):
    """The statistics of a tile, and e^{u − anchor} in place of its logits."""

    rounding_mode = RoundingMode.RN
    _epi_ops = (*map(InMemory, VECTORS), Scalar("vocabulary", dtype=Int32))
    _extra_param_fields = (("split_k_semaphore", object, None), ("split_k_workspace", object, None))

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        """Without anchors: SCORE."""

        targets: cute.Tensor
        inverse_temperature: cute.Tensor
        partial: cute.Tensor
        target_logits: cute.Tensor
        vocabulary: Int32
        anchors: cute.Tensor | None = None
        split_k_semaphore: cute.Tensor | None = None
        split_k_workspace: cute.Tensor | None = None

    def epi_to_underlying_arguments(self, args, *, loc=None, ip=None):
        """The kernel's parameters."""
        return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

    @cute.jit
    def _row_inputs(self, params, row, first_column):
        """(1/T, target from this column on, anchor) of a row; of one below the last its neutral values."""
        scale, target, anchor = Float32(1.0), Int32(-1), Float32(0.0)
        if row < cute.size(params.targets):
            scale = Float32(params.inverse_temperature[row])
            target = Int32(params.targets[row]) - first_column
            if cutlass.const_expr(params.anchors is not None):
                anchor = Float32(params.anchors[row])
        return scale, target, anchor

    def _anchored(self, params, m, anchor, scale):
        """The number that a row's exps subtract: its anchor, or m, the largest logit, if far above it."""
        if cutlass.const_expr(params.anchors is None):
            return m
        return cutlass.select_((m - anchor) * scale > RAISE, m, anchor)

    def _exps(self, acc, registers, scale_2, m_2, others, dot):
        """Put exps for the logits in these registers; add to their two sums, and to those with the logits."""
        for n, i in enumerate(registers):
            v_2 = fma(acc[i], scale_2, -m_2)
            e = cute.math.exp2(v_2, fastmath=True)
            others[n % 2] = others[n % 2] + e
            dot[n % 2] = fma(e, v_2, dot[n % 2])
            acc[i] = e

    def _write(self, params, row, tile, m, scale, others, dot):
        """Write a row's statistics in this tile of columns."""
        scale_2 = scale * LOG2_E
        error = fma(m, scale_2, -fma(m, scale_2, 0.0))
        shrink = 1.0 - error * LN_2
        params.partial[0, tile, row] = m * scale
        params.partial[1, tile, row] = shrink * others
        params.partial[2, tile, row] = shrink * LN_2 * (dot - error * others)


class HopperStatistics(Statistics, GemmSm90):
    """The kernel for sm_90. A warp has 16 whole rows, each of them in the registers of four lanes."""

    @cute.jit
    def epi_visit_acc(self, params, acc, tiled_mma, tile_coord_mnkl, tidx):
        """Fill `partial` for each row of the tile, and the target's logit if it is here."""
        rows, columns = self.cta_tile_shape_mnk[:2]
        places = tiled_mma.get_slice(tidx).partition_C(cute.make_identity_tensor((rows, columns)))
        # Of each register: row and column from this thread's first ones, known when this is compiled.
        row_of = cute.composition(cute.make_layout((rows, columns), stride=(1, 0)), places.layout)
        column_of = cute.composition(cute.make_layout((rows, columns), stride=(0, 1)), places.layout)
        size = cutlass.const_expr(cute.size(acc))
        row_offsets = [cute.crd2idx(i, row_of) for i in range(size)]
        offsets = [cute.crd2idx(i, column_of) for i in range(size)]
        first_column = tile_coord_mnkl[1] * columns + places[0][1]
        end = params.vocabulary - first_column
        if end < columns:  # in the last tile
            for i in cutlass.range_constexpr(size):
                if offsets[i] >= end:
                    acc[i] = Float32(LOWEST)
        for offset in cutlass.range_constexpr(rows):
            if cutlass.const_expr(offset in row_offsets):
                registers = [i for i in range(size) if row_offsets[i] == offset]
                row = tile_coord_mnkl[0] * rows + places[0][0] + offset
                self._row(
                    params, acc, registers, offsets, row, tile_coord_mnkl[1], first_column, places[0][1]
                )

    @cute.jit
    def _row(self, params, acc, registers, offsets, row, tile, first_column, lane_column):
        """The same for one row, whose logits are in these registers of four lanes."""
        scale, target, anchor = self._row_inputs(params, row, first_column)
        m = acc[registers[0]]
        for i in cutlass.range_constexpr(1, len(registers)):
            m = cute.arch.fmax(m, acc[registers[i]])
        for distance in cutlass.range_constexpr(1, 3):
            m = cute.arch.fmax(m, cute.arch.shuffle_sync_bfly(m, offset=distance))
        z_y = Float32(0.0)
        end = min(params.vocabulary - first_column, self.cta_tile_shape_mnk[1] - lane_column)
        if (target >= 0) & (target < end):
            hit = False
            for i in cutlass.range_constexpr(len(registers)):
                if offsets[registers[i]] == target:
                    z_y = acc[registers[i]]
                    acc[registers[i]] = Float32(LOWEST)
                    hit = True
            if hit:
                params.target_logits[row] = z_y * scale
        m = self._anchored(params, m, anchor, scale)
        scale_2 = scale * LOG2_E
        others, dot = [Float32(0.0)] * 2, [Float32(0.0)] * 2
        self._exps(acc, registers, scale_2, fma(m, scale_2, 0.0), others, dot)
        others, dot = others[0] + others[1], dot[0] + dot[1]
        for distance in cutlass.range_constexpr(1, 3):
            others = others + cute.arch.shuffle_sync_bfly(others, offset=distance)
            dot = dot + cute.arch.shuffle_sync_bfly(dot, offset=distance)
        if (row < cute.size(params.targets)) & (lane_column == 0):
            self._write(params, row, tile, m, scale, others, dot)


class BlackwellStatistics(Statistics, GemmSm100):
    """The kernel for sm_100. A thread has a row in tensor memory, a part of which it reads at a time.

    Both loops over the parts are loops of the machine code: unrolled, as QuACK's, they would spill.
    """

    @cute.jit
    def epilogue(
        self, params, epi_smem_tensors, epi_pipeline, epi_store_pipeline, epi_read_state, epi_producer_state,
        epi_tile, load_acc_subtile, tRS_rD, tRS_rC, tiled_copy_t2r, tiled_copy_r2s, tRS_sD, tiled_copy_s2r,
        tSR_rC, tSR_sC, copy_D, copy_C, tile_coord_mnkl, varlen_manager, epilogue_barrier, tile_scheduler,
        tidx, is_tma_warp,
    ):  # fmt: skip
        """Fill `partial` for this thread's row of the tile, and the target's logit if it is here."""
        rows, columns = self.cta_tile_shape_mnk[:2]
        size = cutlass.const_expr(cute.size(tRS_rD))
        parts = cutlass.const_expr(columns // size)
        row, first_column = tile_coord_mnkl[0] * rows + tidx, tile_coord_mnkl[1] * columns
        end = params.vocabulary - first_column
        scale, target, anchor = self._row_inputs(params, row, first_column)
        if target >= end:  # of another shard
            target = Int32(-1)
        m = Float32(LOWEST)
        for part in cutlass.range(parts, unroll=1):
            load_acc_subtile(tRS_rD, (0, part), no_release=True)
            cute.arch.fence_view_async_tmem_load()
            m = self._largest(tRS_rD, m, end - part * size)
        m = self._anchored(params, m, anchor, scale)
        scale_2 = scale * LOG2_E
        m_2 = fma(m, scale_2, 0.0)
        others_0, others_1, dot_0, dot_1 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
        for part in cutlass.range(parts, unroll=1):
            load_acc_subtile(tRS_rD, (0, part))
            cute.arch.fence_view_async_tmem_load()
            self._take_out(params, tRS_rD, target - part * size, end - part * size, row, scale)
            others, dot = [others_0, others_1], [dot_0, dot_1]
            self._exps(tRS_rD, range(size), scale_2, m_2, others, dot)
            others_0, others_1, dot_0, dot_1 = *others, *dot
            if cutlass.const_expr(copy_D is not None):
                buffer = (tile_scheduler.num_tiles_executed * parts + part) % self.epi_stage
                exps = cute.make_rmem_tensor(tRS_rD.layout.shape, self.d_dtype)
                exps.store(tRS_rD.load().to(self.d_dtype))
                if is_tma_warp:
                    epi_store_pipeline.producer_acquire()
                epilogue_barrier.arrive_and_wait()
                cute.copy(tiled_copy_r2s, exps, tRS_sD[None, None, None, buffer])
                cute.arch.fence_view_async_shared()
                epilogue_barrier.arrive_and_wait()
                if is_tma_warp:
                    copy_D(src_idx=buffer, dst_idx=(0, part))
                    epi_store_pipeline.producer_commit()
        if row < cute.size(params.targets):
            self._write(params, row, tile_coord_mnkl[1], m, scale, others_0 + others_1, dot_0 + dot_1)
        return epi_read_state, epi_producer_state

    @cute.jit
    def _largest(self, acc, m, end):
        """The largest of m and of those logits that are before the vocabulary's end."""
        if end < cute.size(acc):
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = cutlass.select_(end > i, acc[i], Float32(LOWEST))
        values = [m, *(acc[i] for i in range(cute.size(acc)))]
        while cutlass.const_expr(len(values) > 1):
            values = [reduce(cute.arch.fmax, values[i : i + 3]) for i in range(0, len(values), 3)]
        return values[0]

    @cute.jit
    def _take_out(self, params, acc, target, end, row, scale):
        """Write the target's logit if it is here; neither it nor what is beyond the end counts any more.

        The store and the vote keep ptxas from making selects for each logit of this branch, rarely taken.
        """
        hit = (target >= 0) & (target < cute.size(acc))
        if cute.arch.vote_any_sync(hit | (end < cute.size(acc))):
            z_y = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(acc)):
                z_y = cutlass.select_(target == i, acc[i], z_y)
                acc[i] = cutlass.select_((target == i) | (end <= i), Float32(LOWEST), acc[i])
            if hit:
                params.target_logits[row] = z_y * scale


KERNELS = {90: HopperStatistics, 100: BlackwellStatistics}
