"""The policy: a causal LM whose forward runs body and loss over one packed micro-batch.

Body and loss stand under one root module, so that whatever wraps this module (FSDP2) sees every use of
every parameter; nothing may call the body past it. Master weights are FP32. With dtype bfloat16 the body
runs under autocast, and the head sees hidden states and weights rounded to bfloat16, which is what the
engine receives, so that its products are exact in FP32; its logits are FP32 unless `fp32_head` is off.

With the vocabulary split over ranks, each rank holds a part of the head and sees the hidden states of all of
them: the loss is then the whole round's on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernels import CISPO, NonFiniteError, linear_logprob, policy_loss
from trainer.config import ConfigError, ModelConfig
from trainer.learner.attention import HALF, flash_kernel, layout
from trainer.learner.moe import EXPERTS
from trainer.learner.packing import MicroBatch

UNSUPPORTED = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)  # heads that are more than a product


class PolicyOutput(NamedTuple):
    """Of the N loss tokens of a micro-batch."""

    loss: Tensor | None  # None when only scored; the sum over the round where the vocabulary is split
    logprobs: Tensor  # (N,) nats, at the temperature
    entropy: Tensor  # (N,) nats
    problem: str = ""  # why there are no numbers; the loss is 0 or NaN then, and can be run backward in step


def load(model_dir: str, empty: bool = False) -> PreTrainedModel:
    """The causal LM with FP32 weights; an empty one has shapes only, and lies on the meta device."""
    how: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": "packed",
        "experts_implementation": EXPERTS,
    }
    if not empty:
        return AutoModelForCausalLM.from_pretrained(model_dir, **how)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), **how)


class PolicyModel(nn.Module):
    """Wraps the causal LM at `model_dir`."""

    def __init__(
        self, model_dir: str, config: ModelConfig, checkpoint_activations: bool = False, empty: bool = False
    ) -> None:
        super().__init__()
        self.lm = load(model_dir, empty)
        self.dtype = getattr(torch, config.dtype)
        self.logits_dtype = torch.float32 if config.fp32_head else self.dtype
        head = self.lm.get_output_embeddings()
        odd = [name for name in UNSUPPORTED if getattr(self.lm.config, name, None) is not None]
        if odd or getattr(head, "bias", None) is not None:
            raise ConfigError(
                f"model.path {model_dir}: its head has {', '.join(odd) or 'a bias'}; "
                "expected logits = hidden @ weight.T: give another model"
            )
        self.lm.train(checkpoint_activations)  # transformers checkpoints in training mode only
        for module in self.lm.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.vocabulary_group: dist.ProcessGroup | None = None
        if checkpoint_activations:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.lm.parameters()).device

    @property
    def loss_copies(self) -> int:
        """On how many ranks each token's loss is counted."""
        return 1 if self.vocabulary_group is None else dist.get_world_size(self.vocabulary_group)

    def split_vocabulary(self, group: dist.ProcessGroup) -> None:
        """From now on the head's rows are split over the group, which must be in step."""
        self.vocabulary_group = group

    def forward(
        self,
        batch: MicroBatch,
        objective: CISPO | None,
        temperature: float,
        peers: Sequence[MicroBatch] = (),  # what each rank computes now, this one included
    ) -> PolicyOutput:
        """Loss, log-probs and entropy of the micro-batch; without an objective it only scores."""
        hidden, weight = self._hidden(batch), self._head()
        hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)  # rounded as the engine's are
        group, own = self.vocabulary_group, slice(None)
        if group is not None:
            ends = np.cumsum([0, *(len(p.targets) for p in peers)]).tolist()
            hidden = _Everyones.apply(hidden, ends, group)
            own = slice(*ends[dist.get_rank(group) :][:2])

        def tokens(name: str) -> Tensor:
            values = [getattr(b, name) for b in (peers if group is not None else (batch,))]
            return torch.from_numpy(np.concatenate(values)).to(hidden.device, non_blocking=True)

        how: dict[str, Any] = {
            "temperature": temperature, "logits_dtype": self.logits_dtype, "group": group,
        }  # fmt: skip
        if objective is None:
            logprobs, entropy = linear_logprob(hidden, weight, tokens("targets"), **how)
            return PolicyOutput(None, logprobs[own], entropy[own])
        per_token: dict[str, Any] = {
            name: tokens(name) for name in ("logprobs_gen", "advantages", "token_weights")
        }
        try:
            out = policy_loss(hidden, weight, tokens("targets"), objective=objective, **per_token, **how)
        except NonFiniteError as e:
            zeros = hidden.detach().new_zeros(len(batch.targets))
            return PolicyOutput(0 * (hidden.sum() + weight.sum()), zeros, zeros, str(e))
        return PolicyOutput(out.loss, out.logprobs[own], out.entropy[own])

    def _head(self) -> Tensor:
        """The head's weight, or this rank's rows of it."""
        weight: Tensor = self.lm.get_output_embeddings().weight
        if isinstance(weight, DTensor):
            return weight.to_local()
        if self.vocabulary_group is None:
            return weight
        parts = weight.tensor_split(dist.get_world_size(self.vocabulary_group))
        return parts[dist.get_rank(self.vocabulary_group)]

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """(N, H): the hidden states that predict the loss tokens."""
        device = self.device
        ids, positions, rows = (
            torch.from_numpy(x).to(device, non_blocking=True)
            for x in (batch.input_ids, batch.position_ids, batch.rows)
        )
        flash = device.type == "cuda" and self.dtype in HALF and flash_kernel() is not None
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            out = self.lm.base_model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                packed=_on(device, layout(batch.segments, flash)),
            )
        return out.last_hidden_state[0].index_select(0, rows)


class _Everyones(torch.autograd.Function):
    """(N, H) of every rank, one behind the other. Each rank has the whole gradient and keeps its own rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ends: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        counts = [end - start for start, end in pairwise(ends)]
        padded = hidden.new_zeros(max(counts), hidden.shape[1])
        padded[: len(hidden)] = hidden
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group)
        ctx.own = slice(ends[rank], ends[rank + 1])
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.own], None, None


def _on(device: torch.device, thing: Any) -> Any:
    """The thing with every tensor in it on the device."""
    if isinstance(thing, Tensor):
        return thing.to(device, non_blocking=True)
    if isinstance(thing, tuple):
        return tuple(_on(device, x) for x in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _on(device, getattr(thing, f.name)) for f in fields(thing)})
    return thing
