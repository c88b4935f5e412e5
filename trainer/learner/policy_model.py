"""The policy: a causal LM whose forward runs body and loss over one packed micro-batch.

Body and loss are under one root module, so that FSDP2, which wraps it, sees every use of every parameter;
nothing may call the body directly. Master weights are FP32. With a 16-bit dtype the body runs under autocast,
and the head gets hidden states and weights rounded to that type, as the engine does: their products are exact
in FP32. Logits are FP32 unless `fp32_head` is off.

With the vocabulary split over ranks, each rank holds some rows of the head and gets the hidden states of all
ranks: every rank's loss is then that of the whole micro-step.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from kernels import (
    KL,
    NonFiniteError,
    Objective,
    SequenceObjective,
    forward_kl,
    linear_logprob,
    policy_loss,
    topk_logprob,
)
from trainer.config import ConfigError, ModelConfig
from trainer.learner.inputs import Inputs, make_inputs
from trainer.learner.packing import MicroBatch
from trainer.learner.part_times import LOSS_HEAD, PartTimes
from trainer.models.experts import Routers

LOGITS = 1 << 25  # of a teacher, in memory at a time
# Settings of heads that do more than multiply.
UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyOutput(NamedTuple):
    """Results for the N loss tokens of a micro-batch."""

    loss: Tensor | None  # None when scoring; with a split vocabulary the sum over all ranks
    logprobs: Tensor  # (N,) nats, at the temperature
    entropy: Tensor  # (N,) nats
    values: Tensor | None = None  # (N,) FP32, where the critic is a head on this body
    problem: str = ""  # why there are no finite numbers; `loss.backward()` still works, to keep ranks in step
    stats: Mapping[str, Tensor] = {}  # the loss's own: means over the tokens of all ranks that share the head
    top: tuple[Tensor, Tensor] | None = None  # (N, k) ids and log-probs of the likeliest tokens, if asked for


def load(model_dir: str, empty: bool = False) -> PreTrainedModel:
    """The causal LM with FP32 weights; an empty one has shapes only, on the meta device."""
    options: dict[str, Any] = {"attn_implementation": "packed", "experts_implementation": "autocast"}
    options["dtype"] = torch.float32
    if not empty:
        return AutoModelForCausalLM.from_pretrained(model_dir, use_safetensors=True, **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), **options)


def prepare(lm: PreTrainedModel, checkpoint_activations: bool) -> None:
    """Switch dropout off, and the recomputation of activations on or off."""
    lm.train(checkpoint_activations)  # transformers checkpoints activations in training mode only
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if checkpoint_activations:
        # Without dropout there are no random numbers to restore, which on a GPU would cost a wait a layer.
        lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


class PolicyModel(nn.Module):
    """The causal LM of `model_dir`, in `lm`."""

    def __init__(
        self, model_dir: str, config: ModelConfig, checkpoint_activations: bool = False, empty: bool = False
    ) -> None:
        super().__init__()
        self.lm = load(model_dir, empty)
        self.dtype = getattr(torch, config.dtype)
        self.logits_dtype = torch.float32 if config.fp32_head in ("both", "learner") else self.dtype
        head = self.lm.get_output_embeddings()
        unsupported = [name for name in UNSUPPORTED if getattr(self.lm.config, name, None) is not None]
        if unsupported or getattr(head, "bias", None) is not None:
            raise ConfigError(
                f"model.path {model_dir}: its head has {', '.join(unsupported) or 'a bias'}; "
                "expected logits = hidden @ weight.T: give another model"
            )
        prepare(self.lm, checkpoint_activations)
        self.routers: Routers | None = None  # of a mixture whose experts are replayed
        self.vocabulary_group: dist.ProcessGroup | None = None  # of the ranks that share the head, if any
        self.value_head: nn.Linear | None = None  # of a critic that shares the body; no part of `lm`
        # On a GPU which ops are fused, and what computes attention; of a mixture why no experts are replayed.
        self.kernels = ""
        self.times: PartTimes | None = None  # of forward and backward, if they are to be measured

    def freeze(self) -> None:
        """Without gradients, and the layers' matrices in the type to which autocast rounds them."""
        wide = {m.weight for m in self.lm.modules() if isinstance(m, nn.Embedding)}
        wide.add(self.lm.get_output_embeddings().weight)
        for parameter in self.lm.requires_grad_(False).parameters():
            if parameter.dim() > 1 and parameter not in wide:
                parameter.data = parameter.data.to(self.dtype)

    def freeze_weights(self, patterns: Sequence[str]) -> None:
        """Leave the weights with such names untrained. ConfigError if there is none, or no other."""
        weights = dict(self.lm.named_parameters())
        for pattern in patterns:
            for name in (matches := fnmatch.filter(weights, pattern)):
                weights[name].requires_grad_(False)
            if not matches or not any(weight.requires_grad for weight in weights.values()):
                which = "every weight that was left to train" if matches else "no weight of this model"
                first, *_, last = weights
                names = f"some of {len(weights)}, {first!r} to {last!r}"
                raise ConfigError(f"learner.freeze {pattern!r} is {which}; expected {names}")

    @property
    def loss_replicas(self) -> int:
        """Number of ranks that count the loss of each token."""
        return 1 if self.vocabulary_group is None else dist.get_world_size(self.vocabulary_group)

    def forward(
        self,
        batch: MicroBatch,
        objective: Objective | SequenceObjective | None,
        temperature: float,
        peers: Sequence[MicroBatch] = (),  # the micro-batch of every rank, this one included
        kl: KL | None = None,
        entropy_bonus: float = 0.0,
        inputs: Inputs | None = None,  # the micro-batch's, if they are made already
        top: tuple[Tensor, Tensor] | None = None,  # (N, k) a teacher's likeliest ids, and their log-probs
        top_coefficient: float = 0.0,  # of the forward KL to them, in the loss
        likeliest: tuple[int, int] = (0, 0),  # k tokens to return without an objective, and their ids' bound
    ) -> PolicyOutput:
        """Loss, log-probs and entropy of the micro-batch; without an objective it only scores."""
        times, device = self.times, self.lm.device
        columns = self.columns(objective, kl)
        inputs = (inputs or self.inputs(batch, peers, columns)).to(device)
        if self.routers:  # until the backward has ended, which may compute layers again
            self.routers.replayed = inputs.experts
        hidden, weight = hidden_states(self.lm.base_model, inputs, self.dtype, times), self._head()
        values = None if self.value_head is None else self.value_head(hidden.float()).sum(1)
        hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)  # as the engine rounds them
        group, ours = self.vocabulary_group, slice(None)
        if group is not None:
            ends = np.cumsum([0, *(len(p.targets) for p in peers)]).tolist()
            hidden = _GatherHidden.apply(hidden, ends, group)
            ours = slice(*ends[dist.get_rank(group) :][:2])

        of_tokens: dict[str, Any] = dict(inputs.columns)
        options: dict[str, Any] = {
            "temperature": temperature, "logits_dtype": self.logits_dtype, "group": group,
        }  # fmt: skip
        if likeliest[0]:
            tokens = likeliest_tokens(hidden, weight, temperature, *likeliest)
            return PolicyOutput(None, hidden[:, 0], hidden[:, 0], top=tokens)
        if objective is None:
            logprobs, entropy, *_ = linear_logprob(hidden, weight, **options, **of_tokens)
            return PolicyOutput(None, logprobs[ours], entropy[ours], values)
        options |= {"objective": objective, "kl": kl, "entropy_bonus": entropy_bonus}
        try:
            with times.part(LOSS_HEAD) if times else nullcontext():
                out = policy_loss(hidden, weight, **options, **of_tokens)
        except NonFiniteError as e:
            zeros = hidden.detach().new_zeros(len(batch.targets))
            return PolicyOutput(0 * (hidden.sum() + weight.sum()), zeros, zeros, values, str(e))
        if times:
            times.backward_of(LOSS_HEAD, hidden, out.loss)
        loss, stats = out.loss, out.stats
        if top is not None:
            kl_top = forward_kl(topk_logprob(hidden, weight, top[0], temperature=temperature), top[1])
            loss = loss + top_coefficient * (of_tokens["token_weights"] * kl_top).sum()
            stats = {**stats, "kl/ref": kl_top.detach().mean()}
        return PolicyOutput(loss, out.logprobs[ours], out.entropy[ours], values, stats=stats)

    @staticmethod
    def columns(objective: Objective | SequenceObjective | None, kl: KL | None) -> dict[str, str]:
        """Names of the micro-batch's columns that the loss, or scoring, takes, by its arguments."""
        columns = {"targets": "targets"}
        if objective is not None:
            columns |= {"logprobs_gen": "anchor"} | {n: n for n in ("advantages", "token_weights")}
        if isinstance(objective, SequenceObjective):
            columns["sequences"] = "owners"
        if kl is not None:
            columns["logprobs_ref"] = "logprobs_ref"
        return columns

    def inputs(self, batch: MicroBatch, peers: Sequence[MicroBatch], columns: Mapping[str, str]) -> Inputs:
        """The tensors of a micro-batch in the host's memory; the columns are those of all ranks that share
        the head."""
        sharing = peers if self.vocabulary_group is not None else (batch,)
        arrays = {
            name: np.concatenate([getattr(b, column) for b in sharing]) for name, column in columns.items()
        }
        experts = None
        if self.routers is not None and batch.experts is not None:
            experts = self.routers.tensor(batch.experts)
        return make_inputs(batch, self.dtype, self.lm.device, arrays, experts)

    def _head(self) -> Tensor:
        """The head's weight, or this rank's rows of it."""
        weight: Tensor = self.lm.get_output_embeddings().weight
        if isinstance(weight, DTensor):
            return weight.to_local()
        if self.vocabulary_group is None:
            return weight
        shards = weight.tensor_split(dist.get_world_size(self.vocabulary_group))
        return shards[dist.get_rank(self.vocabulary_group)]


def likeliest_tokens(
    hidden: Tensor, weight: Tensor, temperature: float, k: int, bound: int
) -> tuple[Tensor, Tensor]:
    """(N, k) the likeliest tokens with ids below `bound` after each of hidden (N, H), and their log-probs."""
    logprobs, ids, weight = [], [], weight.float()
    for rows in hidden.split(max(1, LOGITS // len(weight))):
        top = (rows.float() @ weight.T / temperature)[:, :bound].log_softmax(1).topk(min(k, bound))
        logprobs.append(top.values)
        ids.append(top.indices)
    return torch.cat(ids), torch.cat(logprobs)


def hidden_states(
    body: nn.Module, inputs: Inputs, dtype: torch.dtype, times: PartTimes | None = None
) -> Tensor:
    """The body's hidden states (N, H) that predict the loss tokens, computed in this type."""
    with torch.autocast(inputs.ids.device.type, dtype, enabled=dtype != torch.float32):
        out = body(
            input_ids=inputs.ids[None], position_ids=inputs.positions[None], use_cache=False,
            packed=inputs.packed, times=times,
        )  # fmt: skip
    return out.last_hidden_state[0].index_select(0, inputs.rows)


class _GatherHidden(torch.autograd.Function):
    """All ranks' hidden states (N, H), concatenated. In the backward every rank has the gradient of all rows
    and keeps that of its own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ends: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        counts = [end - start for start, end in pairwise(ends)]
        padded = hidden.new_zeros(max(counts), hidden.shape[1])
        padded[: len(hidden)] = hidden
        by_rank = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(by_rank, padded, group)
        ctx.rows = slice(ends[rank], ends[rank + 1])
        return torch.cat([rows[:n] for rows, n in zip(by_rank, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.rows], None, None


class _Cast:
    """A module whose parameters read as `dtype`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def autocast_experts(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts for transformers to call: (T, H) from the top_k `index` (T, k) of each token, by `weights`.

    They run in the compute type, as linear layers do: torch.autocast does not cover grouped matrix products.
    """
    device = hidden.device.type
    module: Any = experts
    if torch.is_autocast_enabled(device):
        module = _Cast(experts, torch.get_autocast_dtype(device))
    out: Tensor = grouped_mm_experts_forward(module, hidden, index, weights)
    return out


ExpertsInterface.register("autocast", autocast_experts)
