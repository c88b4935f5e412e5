"""QuACK's GEMM h Wᵀ, warp-specialised, with the epilogues SCORE and SINGLE_PASS of `kernels.triton.gemm`.

QuACK hands the accumulator to `epi_visit_acc` while it is in registers, before its own epilogue rounds and
stores what is left there. A warp has 16 whole rows of a tile, each of them in the registers of four lanes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

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
        inside = row < cute.size(params.targets)
        scale, target, anchor = Float32(1.0), Int32(-1), Float32(0.0)
        if inside:
            scale = Float32(params.inverse_temperature[row])
            target = Int32(params.targets[row]) - first_column
            if cutlass.const_expr(params.anchors is not None):
                anchor = Float32(params.anchors[row])
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
        if cutlass.const_expr(params.anchors is not None):
            m = cutlass.select_((m - anchor) * scale > RAISE, m, anchor)
        scale_2 = scale * LOG2_E
        m_2 = fma(m, scale_2, 0.0)
        others, dot = [Float32(0.0)] * 2, [Float32(0.0)] * 2
        for i in cutlass.range_constexpr(len(registers)):
            v_2 = fma(acc[registers[i]], scale_2, -m_2)
            e = cute.math.exp2(v_2, fastmath=True)
            others[i % 2] = others[i % 2] + e
            dot[i % 2] = fma(e, v_2, dot[i % 2])
            acc[registers[i]] = e
        others, dot = others[0] + others[1], dot[0] + dot[1]
        for distance in cutlass.range_constexpr(1, 3):
            others = others + cute.arch.shuffle_sync_bfly(others, offset=distance)
            dot = dot + cute.arch.shuffle_sync_bfly(dot, offset=distance)
        error = fma(m, scale_2, -m_2)
        shrink = 1.0 - error * LN_2
        if inside & (lane_column == 0):
            params.partial[0, tile, row] = m * scale
            params.partial[1, tile, row] = shrink * others
            params.partial[2, tile, row] = shrink * LN_2 * (dot - error * others)


class HopperStatistics(Statistics, GemmSm90):
    """The kernel for sm_90."""


KERNELS = {90: HopperStatistics}
