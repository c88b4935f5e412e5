"""Heads in shards: FSDP2's, gathered from a DTensor; and the vocabulary's over a process group."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
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


def place(weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int | Tensor, int | Tensor]:
    """(id of the first row of this rank's shard, size of the whole vocabulary); 0-d tensors in a group."""
    if group is None:
        return 0, len(weight)
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=weight.device)
    lengths[dist.get_rank(group)] = len(weight)
    dist.all_reduce(lengths, dist.ReduceOp.SUM, group)
    return lengths[: dist.get_rank(group)].sum(), lengths.sum()
