"""QuACK's GEMM with our epilogue, compiled for a GPU without one and run on the CPU from its PTX.

A program, for a Python with quack-kernels: `python tests/helpers/ptx_quack.py FOLDER CAPABILITY SEEDS` prints
JSON with the errors of each case under so many schedules. CuTe leaves the PTX in FOLDER. The kernel's
configuration is the shipped one but for the cluster, which is one block here; on Blackwell that has half of
the tile's rows. Races are not looked for: the detector knows barriers of all threads alone.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any

import ptx_gemm_cases as gemm_cases
import torch
from ahead_of_time import Machine, memory_of
from ptx import GLOBAL, PARAMETERS, Program, parse
from ptx_cases import BF16, FP16, Case
from ptx_steps import program
from ptx_tasks import TensorMap
from torch import Tensor

# Ragged rows and columns; more steps than stages; whole tiles; tiles for both warpgroups of two blocks; less
# columns than a tile, and a width that is no multiple of a step.
SHAPES = [
    (70, 192, 520, BF16), (40, 456, 250, BF16), (128, 64, 384, BF16), (260, 64, 1000, BF16),
    (2, 72, 40, BF16), (70, 200, 300, FP16),
]  # fmt: skip
BLOCKS = 2
ALONE = {90: {"cluster": 1}, 100: {"cluster": 1, "rows": 128}}
PRODUCT_BYTES = {90: 1, 100: 32}
"""How long the kernel's first argument is: zeros, where products negate nothing and write all lanes."""
STORED = {90: (64, 32, 2), 100: (128, 32, 2)}
"""Rows, columns and swizzle of a part of the tile that is stored at once."""
SHARED_MEMORY = 227 << 10


def compiled(folder: Path, config: Any, dtype: torch.dtype, stores: bool) -> str:
    """The PTX of a kernel. CuTe has written it to this folder."""
    from kernels.triton import quack

    before = set(folder.glob("*.ptx"))
    quack.plan(config, dtype, stores)
    (path,) = set(folder.glob("*.ptx")) - before
    return path.read_text()


def divisor(d: int) -> tuple[int, int, int]:
    """(multiplier, shift, d) by which the kernel divides by d, as QuACK's host code has them."""
    shift = max(0, (d - 1).bit_length() - 1)
    return -(-(1 << 32 + shift) // d) & 0xFFFFFFFF, shift, d


def schedule(tiles: tuple[int, int]) -> bytes:
    """The scheduler's arguments for so many tiles of rows and columns, as QuACK's host code has them."""
    along_rows = -(-tiles[1] // 8) <= -(-tiles[0] // 8)
    long, short = tiles if not along_rows else tiles[::-1]
    group = min(8, long)
    (m0, s0, d0), (m1, s1, d1), (m2, s2, d2), (m3, s3, d3) = map(
        divisor, (tiles[0] * tiles[1], group, long % group or 1, group * short)
    )
    numbers = *tiles, 1, along_rows, m0, s0, d0, long // group, m1, s1, d1, m2, s2, d2, m3, s3, d3
    return pack("<17I", *numbers)


@dataclass
class QuackMachine:
    """`kernels.triton.quack.launch` on CPU tensors, under the schedule of the Triton kernels beside it."""

    folder: Path
    machine: Machine
    programs: dict[Any, Program] = field(default_factory=dict)

    def launch(
        self, config: Any, h: Tensor, weight: Tensor, vectors: list[Tensor], exp: Tensor | None
    ) -> None:
        y, scale, anchors, partial, z_y = vectors
        tensors = [h, weight, *([exp] if exp is not None else []), y, scale, partial, z_y]
        key = h.dtype, exp is not None
        if key not in self.programs:
            text = compiled(self.folder, config, *key)
            self.programs[key] = program(parse(text), SHARED_MEMORY)
        ready = self.programs[key]
        with memory_of([*tensors, anchors], races=False) as (memory, places):

            def address(x: Tensor) -> int:
                storage = x.untyped_storage().data_ptr()
                return GLOBAL + places[storage] + x.data_ptr() - storage

            boxes = [(config.rows, 64, 3), (config.columns, 64, 3), STORED[config.capability]]
            values = [bytes(PRODUCT_BYTES[config.capability])]
            for x in tensors[: 2 + (exp is not None)]:
                values += [bytes(128), pack("<2i", *x.shape)]
            for x in [y, scale, *([anchors] if exp is not None else [])]:
                values.append(pack("<qi4x", address(x), len(h)))
            values.append(pack("<q2i2q", address(partial), *partial.shape[1:], *partial.stride()[:2]))
            values += [pack("<qi4x", address(z_y), len(h)), pack("<i", len(weight))]
            tiles = -(-len(h) // config.rows), -(-len(weight) // config.columns)
            scheduler = schedule(tiles)
            values += [scheduler[i : i + 4] for i in range(0, len(scheduler), 4)]
            arguments, maps, matrices = bytearray(ready.kernel.parameter_bytes), {}, iter(tensors)
            for (offset, size), value in zip(ready.kernel.parameters.values(), values, strict=True):
                assert size == len(value)
                arguments[offset : offset + size] = value
                if size == 128:
                    x, (rows, columns, swizzle) = next(matrices), boxes[len(maps)]
                    maps[PARAMETERS + offset] = TensorMap(
                        address(x), (x.shape[0], x.shape[1]), 2 * x.stride(0), (rows, columns), 2, swizzle
                    )
            grid = 1, 1, min(BLOCKS, tiles[0] * tiles[1])
            replace(ready, maps=maps).run(grid, bytes(arguments), memory, self.machine.seed, False)


def cases() -> dict[str, Case]:
    """All cases by name."""
    found: dict[str, Case] = {}
    for shape in SHAPES:
        found[f"single pass {shape}"] = partial(gemm_cases.fused_epilogue, *shape)
        found[f"score {shape}"] = partial(gemm_cases.score, *shape, 0.0)
    return found


def report(folder: str, capability: int, seeds: int) -> dict[str, list[float]]:
    """Each case's errors, in bounds, under each schedule."""
    from quack.gemm_runtime import host
    from triton.runtime.jit import JITFunction

    from kernels.triton import fused, quack

    host.get_max_active_clusters = lambda *_: BLOCKS
    config = replace(quack.CONFIGS[capability], **ALONE[capability])
    machine = Machine()
    fused.quack_config, fused.multiprocessors = lambda *_: config, lambda _: 1
    fused.quack.launch = QuackMachine(Path(folder), machine).launch
    fused.score = partial(fused.score, config=config)
    JITFunction.run = lambda kernel, *args, **options: machine.launch(kernel, *args, **options)
    errors: dict[str, list[float]] = {name: [] for name in cases()}
    for name, case in cases().items():
        for machine.seed in range(seeds):
            errors[name].append(case())
    return errors


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], *map(int, sys.argv[2:]))))
