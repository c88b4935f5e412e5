"""FSDP2's sharded head: the whole weight from a DTensor, with gradients that sum over the ranks."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def whole(weight: Tensor) -> Tensor:
    """The gathered weight if it is a DTensor, itself otherwise.

    Each rank's gradient is that of its own tokens: they are partial sums, which `full_tensor()` would
    leave rank-local without `grad_placements`.
    """
    if not hasattr(weight, "full_tensor"):
        return weight
    from torch.distributed.tensor import DTensor, Partial  # seconds to import: only for who has one

    sharded = cast(DTensor, weight)
    return sharded.full_tensor(grad_placements=[Partial()] * sharded.device_mesh.ndim)
