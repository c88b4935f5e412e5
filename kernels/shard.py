"""FSDP2's sharded head: the whole weight from a DTensor, with gradients that sum over the ranks."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def whole(weight: Tensor) -> Tensor:
    """The gathered weight if it is a DTensor, itself otherwise.

    Each rank's gradient is that of its own tokens: they are partial sums, which `full_tensor()` would
    leave rank-local without `grad_placements`.
    """
    if isinstance(weight, DTensor):
        return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    return weight
