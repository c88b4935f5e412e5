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

from trainer.policy_model import PolicyModel


def shard(policy: PolicyModel, mesh: DeviceMesh, vocab_parallel: bool) -> None:
    """Shard the policy in place over the mesh's last dimension, in step on every rank."""
    lm = policy.lm
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    whole = {p for p in lm.parameters() if p.dim() < 2}
    for p in whole:
        p.data = p.data.to(mesh.device_type)
    if vocab_parallel:
        policy.split_vocabulary(dist.distributed_c10d._get_default_group())
        if head.weight is not embedding.weight:
            everyone = init_device_mesh(mesh.device_type, (mesh.size(),))
            head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), everyone, [Shard(0)]))
            whole.add(head.weight)
    ends = [embedding, head] if head.weight not in whole else embedding
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = (
        plain
        if policy.dtype == torch.float32
        else MixedPrecisionPolicy(
            param_dtype=policy.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    )
    fully_shard(ends, mesh=mesh, mp_policy=plain, reshard_after_forward=False, ignored_params=whole)
    for layer in lm.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=mesh, mp_policy=mixed, ignored_params=whole)
    fully_shard(policy, mesh=mesh, mp_policy=mixed, ignored_params=whole)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


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
