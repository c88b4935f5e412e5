"""FSDP2 for the policy and the critic: which weights are sharded, when they are gathered, and in what type.

embedding and head     gathered in FP32 for all of forward and backward, being one weight when tied;
                       the untied head of a vocabulary-parallel loss is never gathered
each layer's matrices  gathered in the compute type just before use, gradients summed in FP32
vectors (norms)        replicated: gathered in bfloat16 they would differ from what a single rank computes
LoRA's adapters        replicated, for the same reason; the frozen base is sharded as above, in its own type

Gradients are summed over the ranks, not averaged: the token weights are those of the whole batch.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.learner.lora import AdaptedWeight
from trainer.learner.policy_model import PolicyModel
from trainer.models.lora import merged


def shard(policy: PolicyModel, mesh: DeviceMesh, vocab_parallel: bool) -> None:
    """Shard an empty policy in place over the mesh's last dimension, still without values."""
    lm = policy.lm
    head = lm.get_output_embeddings()
    tied = head.weight is lm.get_input_embeddings().weight
    if vocab_parallel:
        policy.vocabulary_group = dist.distributed_c10d._get_default_group()
    if vocab_parallel and not tied:
        all_ranks = init_device_mesh(mesh.device_type, (mesh.size(),))
        shards = distribute_tensor(head.weight.detach(), all_ranks, [Shard(0)])
        head.weight = nn.Parameter(shards, head.weight.requires_grad)
        shard_module(policy, mesh, policy.dtype, [], {head.weight})
    else:
        shard_module(policy, mesh, policy.dtype, [head], set())
    if tied:
        head.weight = lm.get_input_embeddings().weight


def shard_module(
    root: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, ends: Sequence[nn.Module],
    replicated: set[nn.Parameter],
) -> None:  # fmt: skip
    """Shard an empty network in place: embeddings and `ends` gathered in FP32, its layers in this type."""
    ends = [*(m for m in root.modules() if isinstance(m, nn.Embedding)), *ends]
    small = (p for name, p in root.named_parameters() if p.dim() < 2 or ".lora_" in name)
    replicated = replicated | set(small)
    compute = dtype if dtype != torch.float32 else None
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    fully_shard(ends, mesh=mesh, mp_policy=full, reshard_after_forward=False, ignored_params=replicated)
    for layer in root.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=mesh, mp_policy=mixed, ignored_params=replicated)
    fully_shard(root, mesh=mesh, mp_policy=mixed, ignored_params=replicated)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root.to_empty(device=torch.device(mesh.device_type))


@torch.no_grad()
def load_from_rank0(lm: nn.Module, source: nn.Module | None) -> None:
    """Copy rank 0's weights and buffers into the shards of all ranks, tensor by tensor.

    Only rank 0 has a `source`, so that a machine's memory holds the whole model once.
    """
    values = {} if source is None else dict([*source.named_parameters(), *source.named_buffers()])
    for name, target in [*lm.named_parameters(), *lm.named_buffers()]:
        tensor = values[name] if source is not None else torch.empty(target.shape, dtype=target.dtype)
        tensor = tensor.detach().to(target.device, target.dtype).contiguous()
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(tensor, target.device_mesh, target.placements))
        else:
            dist.broadcast(tensor, 0)
            target.copy_(tensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard, in the same memory; a parameter's is a parameter."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard = cast(DTensor, tensor.detach()).to_local()
    return nn.Parameter(shard) if isinstance(tensor, nn.Parameter) else shard


def as_dtensor(shard: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor that is sharded as the parameter is, as a DTensor."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def full_tensor(parameter: Tensor | AdaptedWeight, dtype: torch.dtype) -> Tensor:
    """The whole tensor in this type. A collective: every rank must call it."""
    if isinstance(parameter, AdaptedWeight):
        base = full_tensor(parameter.base, parameter.dtype)
        return merged(base, parameter.a.detach(), parameter.b.detach(), parameter.scale).to(dtype)
    tensor = parameter.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replicas(parameter: Tensor, ranks: int) -> int:
    """Number of ranks that hold each element of the parameter."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    return ranks // math.prod(mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_shard())


def all_reduce_replicated(gradients: list[Tensor]) -> None:
    """Sum the gradients of replicated weights over the ranks, in place."""
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(summed.view_as(g))
