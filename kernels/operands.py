"""Hidden states and weight as the op multiplies them, from what trainers hold: shards, autocast."""

import math
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Reduce = Literal["mean", "sum"]


def operands(
    hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None, reduce: Reduce | None
) -> tuple[Tensor, Tensor]:
    """This rank's hidden states, and the weight, or this rank's shard of it if there is a group.

    Under autocast both are in its type, as `nn.Linear` has them. A DTensor is gathered in hidden's type.
    """
    if reduce not in (None, *get_args(Reduce)):
        raise ValueError(f"reduce is {reduce!r}; expected 'mean', 'sum', or None")
    traced = torch.compiler.is_compiling()
    if not traced and any(unpack_dual(x).tangent is not None for x in (hidden, weight)):
        raise RuntimeError("hidden or weight has a tangent; the op has no forward-mode derivative (jvp)")
    if hasattr(hidden, "full_tensor"):
        raise ValueError("hidden is a DTensor; expected this rank's own rows: give hidden.to_local()")
    device = hidden.device.type  # torch 2.11 cannot trace is_autocast_available
    autocast = (traced or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)
    if autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight if hasattr(weight, "full_tensor") else weight.to(dtype)
    if hasattr(weight, "full_tensor"):
        weight = _from_shards(cast("DTensor", weight), hidden.dtype, group, reduce)
    return hidden, weight


def _from_shards(
    weight: "DTensor", dtype: torch.dtype, group: dist.ProcessGroup | None, reduce: Reduce | None
) -> Tensor:
    """The whole weight in this type; with a group this rank's rows of it."""
    names = weight.device_mesh.mesh_dim_names or ("",) * weight.device_mesh.ndim
    sharded = [name for name, x in zip(names, weight.placements, strict=True) if not x.is_replicate()]
    if len(sharded) > 1:
        raise ValueError(
            f"weight is sharded by FSDP2 and tensor parallelism ({weight.placements}); expected the latter "
            "alone: call the op in the forward of the module that FSDP2 wraps, and give group="
        )
    if group is not None:
        return _own_rows(weight, group)
    if any(map(_is_tensor_parallel, sharded)):
        raise ValueError(
            f"weight is a tensor-parallel shard (mesh dimension {sharded[0]!r}); give group=, its process "
            f"group: weight.device_mesh.get_group({sharded[0]!r})"
        )
    if reduce is None and torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError(
            "weight is a DTensor; say how its gradient is combined over the ranks: reduce='mean', which is "
            "FSDP2's default, or 'sum' after set_gradient_divide_factor(1.0); if it is a tensor-parallel "
            "shard, give group= instead"
        )
    gathered: Tensor = _Gathered.apply(weight, dtype, reduce)
    return gathered


def _is_tensor_parallel(name: str) -> bool:
    """True for the names of a mesh dimension whose ranks have the same tokens."""
    return "tp" in name or "tensor" in name


def _own_rows(weight: "DTensor", group: dist.ProcessGroup) -> Tensor:
    """This rank's shard of the vocabulary. ValueError unless the weight is sharded by rows over the group."""
    ranks = dist.get_process_group_ranks(group)
    for i, x in enumerate(weight.placements):
        if x.is_shard(0) and dist.get_process_group_ranks(weight.device_mesh.get_group(i)) == ranks:
            return weight.to_local()
    raise ValueError(f"weight is placed as {weight.placements}; expected Shard(0) over the ranks of group")


class _Gathered(torch.autograd.Function):
    """A sharded weight, whole and in `dtype`; the backward shards the sum or mean of all ranks' gradients.

    Each rank's gradient covers its own tokens, which tensor-parallel ranks share. They are combined in the
    parameter's type.
    """

    @staticmethod
    def forward(ctx: Any, weight: "DTensor", dtype: torch.dtype, reduce: Reduce | None) -> Tensor:
        mesh = weight.device_mesh
        ctx.sharding, ctx.dtype = (mesh, weight.placements), weight.dtype
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        ctx.shared = [_is_tensor_parallel(name) for name in names]
        sizes = [mesh.size(i) for i, shared in enumerate(ctx.shared) if not shared]
        ctx.ranks = math.prod(sizes) if reduce == "mean" else 1
        return cast("DTensor", weight.detach().to(dtype)).full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        from torch.distributed.tensor import DTensor, Partial, Replicate  # takes seconds to import

        mesh, placements = ctx.sharding
        partial = [Replicate() if shared else Partial() for shared in ctx.shared]
        gradients = DTensor.from_local(gradient.to(ctx.dtype), mesh, partial, run_check=False)
        return gradients.redistribute(placements=placements) / ctx.ranks, None, None


def shard_offset(weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int | Tensor, int | Tensor]:
    """(token id of this rank's first row, size of the whole vocabulary); 0-d tensors if there is a group."""
    if group is None:
        return 0, len(weight)
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=weight.device)
    lengths[dist.get_rank(group)] = len(weight)
    dist.all_reduce(lengths, dist.ReduceOp.SUM, group)
    return lengths[: dist.get_rank(group)].sum(), lengths.sum()
