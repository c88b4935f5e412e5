"""Sharded heads: FSDP2's DTensor, which is gathered, and a vocabulary split over a process group."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor


def gather_weight(weight: Tensor) -> Tensor:
    """The full weight: gathered if it is a DTensor, unchanged otherwise.

    Each rank's gradient covers its own tokens only, so the ranks' gradients are partial sums. Without
    `grad_placements`, `full_tensor()` would not add them up.
    """
    if not hasattr(weight, "full_tensor"):
        return weight
    from torch.distributed.tensor import DTensor, Partial  # takes seconds to import

    sharded = cast(DTensor, weight)
    return sharded.full_tensor(grad_placements=[Partial()] * sharded.device_mesh.ndim)


def shard_offset(weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int | Tensor, int | Tensor]:
    """(token id of this rank's first row, size of the whole vocabulary); 0-d tensors if there is a group."""
    if group is None:
        return 0, len(weight)
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=weight.device)
    lengths[dist.get_rank(group)] = len(weight)
    dist.all_reduce(lengths, dist.ReduceOp.SUM, group)
    return lengths[: dist.get_rank(group)].sum(), lengths.sum()
