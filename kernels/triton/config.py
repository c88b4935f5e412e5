"""Launches and their configurations: plain functions of the device and the problem, without autotuning."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
"""True if kernels run on the CPU. Triton reads this when a kernel is defined: set it before import."""


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Launch configuration of a kernel with one program per row."""

    block: int
    """Columns of a tile."""
    warps: int = 8

    @property
    def constants(self) -> dict[str, int]:
        """The constants for which the kernel is compiled."""
        return {"BLOCK": self.block, "num_warps": self.warps}


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Launch configuration of the GEMM kernel."""

    rows: int
    columns: int
    depth: int
    """A tile of the result, and how much of the hidden size is multiplied at a time."""
    warps: int
    stages: int
    """Depth of the software pipeline: number of operand tiles in shared memory."""
    tma: bool = False
    """True: copy tiles by TMA, which needs rows aligned to 16 bytes."""
    flatten: bool = False
    """True: the next tile's copies start during this one's epilogue. Without TMA that spills registers."""
    subtiles: int = 4
    """Number of parts in which the epilogue processes a tile's columns: more parts need fewer registers."""
    piece: int = 32
    """Columns that the epilogue sums side by side. Fewer need fewer registers and instructions, but where
    warps share a row, as on Ampere, the sums then pass through shared memory."""
    group: int = 8
    """Row tiles processed together, so that their rows of h stay in the L2 cache."""
    programs_per_sm: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """The constants for which the kernel is compiled."""
        tile = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth, "GROUP": self.group}
        piece = min(self.piece, self.columns // self.subtiles)
        epilogue = {"SUBTILES": self.subtiles, "PIECE": piece, "FLATTEN": self.flatten, "TMA": self.tma}
        return tile | epilogue | {"num_warps": self.warps, "num_stages": self.stages}


HOPPER = GemmConfig(128, 256, 64, warps=8, stages=4, tma=True, flatten=True, piece=8)
"""Two warpgroups of 64 rows, 4 × 48 KB of operands and 16 or 32 KB of results in shared memory."""
HOPPER_CAPPED = GemmConfig(128, 128, 64, warps=8, stages=4, tma=True, flatten=True, piece=8)
"""tanh needs registers, so each thread has 64 results instead of 128."""
BLACKWELL = GemmConfig(128, 128, 64, warps=8, stages=4, tma=True)
AMPERE = GemmConfig(128, 128, 64, warps=8, stages=3)
AMPERE_CAPPED = GemmConfig(128, 128, 64, warps=8, stages=3, piece=16)
UNALIGNED = GemmConfig(64, 128, 64, warps=8, stages=1)
"""Choice for rows that are not aligned to 16 bytes, which neither kind of asynchronous copy accepts."""
FP32 = GemmConfig(64, 64, 16, warps=4, stages=3, subtiles=2, programs_per_sm=2)
FP32_CAPPED = GemmConfig(64, 64, 16, warps=4, stages=3, subtiles=8, programs_per_sm=2)
"""FP32 operands, multiplied without tensor cores."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first tensor. An empty grid has nothing to do."""
    if all(grid):
        with torch.cuda.device_of(next(x for x in arguments if isinstance(x, Tensor))):
            kernel[grid](*arguments, **{"num_stages": 1, "enable_fp_fusion": True} | constants)


def row_config(vocabulary: int) -> RowConfig:
    """16 elements a thread: enough 16-byte loads in flight with several rows on a multiprocessor."""
    block = max(128, min(4096, 1 << (vocabulary - 1).bit_length()))
    return RowConfig(block, max(1, min(8, block // 512)))


def gemm_config(capability: int, dtype: torch.dtype, aligned: bool, capped: bool) -> GemmConfig:
    """capability: 80, 90, …; aligned: rows start at multiples of 16 bytes; capped: the logits are."""
    if dtype == torch.float32:
        return FP32_CAPPED if capped else FP32
    if not aligned:
        return UNALIGNED
    if capability < 90:
        return AMPERE_CAPPED if capped else AMPERE
    if capability >= 100:
        return BLACKWELL
    return HOPPER_CAPPED if capped else HOPPER


def capability(device: torch.device) -> int:
    """80, 90, 100, …; 80 for the CPU, which selects the configurations without TMA."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(device: torch.device) -> int:
    """The number of streaming multiprocessors of the GPU; 2 on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
