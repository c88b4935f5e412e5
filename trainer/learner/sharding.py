"""FSDP2 for the policy: which weights are gathered when and in what type; weights whole and in shards.

embedding and head   gathered in FP32 for the whole of forward and backward, being one weight when tied;
                     the untied head of a vocabulary-parallel loss is never gathered
each layer's matrices  gathered in the compute type just before use, gradients summed in FP32
vectors (norms)      whole on every rank, since a norm in bfloat16 would not be what one rank computes

Gradients sum over the ranks: the loss's weights are those of the whole batch.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.learner.policy_model import PolicyModel


def shard(policy: PolicyModel, mesh: DeviceMesh, vocab_parallel: bool) -> None:
    """Shard an empty policy in place over the mesh's last dimension; `fill` it then. All ranks in step."""
    lm = policy.lm
    head = lm.get_output_embeddings()
    tied = head.weight is lm.get_input_embeddings().weight
    whole = {p for p in lm.parameters() if p.dim() < 2}
    ends: list[nn.Module] = [m for m in lm.modules() if isinstance(m, nn.Embedding)]
    if vocab_parallel:
        policy.split_vocabulary(dist.distributed_c10d._get_default_group())
    if vocab_parallel and not tied:
        everyone = init_device_mesh(mesh.device_type, (mesh.size(),))
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), everyone, [Shard(0)]))
        whole.add(head.weight)
    else:
        ends.append(head)
    half = policy.dtype if policy.dtype != torch.float32 else None
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
    fully_shard(ends, mesh=mesh, mp_policy=plain, reshard_after_forward=False, ignored_params=whole)
    for layer in lm.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=mesh, mp_policy=mixed, ignored_params=whole)
    fully_shard(policy, mesh=mesh, mp_policy=mixed, ignored_params=whole)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    policy.to_empty(device=torch.device(mesh.device_type))
    if tied:
        head.weight = lm.get_input_embeddings().weight


@torch.no_grad()
def fill(lm: nn.Module, source: nn.Module | None) -> None:
    """Give every rank its part of rank 0's weights and buffers, one after the other: only rank 0 has a
    `source`, so that a machine's memory holds the whole model once."""
    given = {} if source is None else dict([*source.named_parameters(), *source.named_buffers()])
    for name, to in [*lm.named_parameters(), *lm.named_buffers()]:
        tensor = given[name] if source is not None else torch.empty(to.shape, dtype=to.dtype)
        tensor = tensor.detach().to(to.device).contiguous()
        if isinstance(to, DTensor):
            to.copy_(distribute_tensor(tensor, to.device_mesh, to.placements))
        else:
            dist.broadcast(tensor, 0)
            to.copy_(tensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it, in the same memory; of a parameter a parameter."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = cast(DTensor, tensor.detach()).to_local()
    return nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """`part`, which goes with this rank's part of the parameter, as a tensor spread as the parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def gathered(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole of it in this type; every rank must ask."""
    tensor = parameter.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copies(parameter: Tensor, ranks: int) -> int:
    """On how many ranks each of the parameter's elements lies."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    return ranks // math.prod(mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_shard())


def sum_whole(gradients: list[Tensor]) -> None:
    """Add up, over the ranks and in place, the gradients of weights that every rank has whole."""
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for g, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(total.view_as(g))
