"""QuACK's GEMM in place of Triton's under `row_kernel="fused-epilogue"`: when it is taken, and its launch."""
# mypy: disable-error-code="import-not-found"

import importlib.metadata
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..backends import notice

VECTORS = ("targets", "inverse_temperature", "anchors", "partial", "target_logits")
VERSION = "0.6.5"  # of quack-kernels: its classes are no stable interface


@dataclass(frozen=True, slots=True)
class QuackConfig:
    """A tile of the result and who computes it."""

    rows: int
    columns: int
    cluster: int
    """Blocks, one above the other, that load their columns' weights once for all."""
    pingpong: bool
    """Two warpgroups have a tile each, one multiplies during the other's epilogue. Else they share a tile."""
    capability: int = 90


CONFIGS = {
    90: QuackConfig(128, 192, cluster=2, pingpong=True),
    100: QuackConfig(256, 256, cluster=2, pingpong=False, capability=100),  # rows of both blocks
}
"""By compute capability."""


def quack_config(capability: int, dtypes: set[torch.dtype], aligned: bool) -> QuackConfig | None:
    """The configuration for 16-bit operands of one type, whose rows TMA can copy; None: Triton's GEMM."""
    config = CONFIGS.get(capability)
    if config is None or not aligned or len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        return None
    if why_not():
        notice(f"kernels: row_kernel 'fused-epilogue' takes Triton's GEMM instead of QuACK's: {why_not()}")
        return None
    return config


@cache
def why_not() -> str:
    """The reason why QuACK is not used on any GPU; empty if it is, on those of CONFIGS."""
    try:
        version = importlib.metadata.version("quack-kernels")
    except importlib.metadata.PackageNotFoundError:
        return f"not installed; pip install quack-kernels=={VERSION}"
    return "" if version == VERSION else f"quack-kernels {version} is installed; expected {VERSION}"


def launch(
    config: QuackConfig,
    h: Tensor,
    weight: Tensor,
    vectors: list[Tensor],  # those of VECTORS
    exp: Tensor | None,  # None: the statistics alone, from each tile's maximum
) -> None:
    """Run the GEMM on the device of its tensors."""
    from quack.gemm_runtime.host import run_gemm_epi_plan

    with torch.cuda.device_of(h):
        values: dict[str, Any] = dict(zip(VECTORS, vectors, strict=True)) | {"vocabulary": len(weight)}
        if exp is None:
            del values["anchors"]
        run_gemm_epi_plan(plan(config, h.dtype, exp is not None), h, weight, exp, None, values)


@cache
def plan(config: QuackConfig, dtype: torch.dtype, stores: bool) -> Any:
    """The compiled kernel, for any number of rows and columns and any width."""
    from quack.gemm_runtime.host import build_gemm_epi_plan

    from .quack_gemm import KERNELS

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    values: dict[str, Any] = {name: new(8) for name in VECTORS if stores or name != "anchors"}
    values |= {"targets": new(8, dtype=torch.int64), "partial": new(3, 1, 8), "vocabulary": 8}
    return build_gemm_epi_plan(
        KERNELS[config.capability],
        divmod(config.capability, 10),
        new(8, 64, dtype=dtype), new(8, 64, dtype=dtype),
        new(8, 8, dtype=torch.bfloat16) if stores else None,
        None,
        epi_values=values,
        tile_M=config.rows, tile_N=config.columns, cluster_M=config.cluster, cluster_N=1,
        pingpong=config.pingpong,
    )  # fmt: skip
