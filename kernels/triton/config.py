"""Launch shapes: a plain function of the capability and the problem, no autotuning."""

import os
from dataclasses import dataclass

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
"""Whether kernels run on the CPU. Triton reads this when it is imported: so do we."""


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Of a kernel with one program per row."""

    block: int
    """Columns of a tile."""
    warps: int = 8


def row_config(vocabulary: int) -> RowConfig:
    """16 elements a thread: enough 16-byte loads in flight with several rows on a multiprocessor."""
    block = max(128, min(4096, 1 << (vocabulary - 1).bit_length()))
    return RowConfig(block, max(1, min(8, block // 512)))


def capability(device: torch.device) -> int:
    """80, 90, 100; 90 for the CPU, whose configs are then Hopper's."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
