"""The policy: a causal LM whose forward runs body and loss over one packed micro-batch.

Body and loss stand under one root module, so that whatever wraps this module (FSDP2) sees every use of
every parameter; nothing may call the body past it. Master weights are FP32. With dtype bfloat16 the body
runs under autocast, and the head sees hidden states and weights rounded to bfloat16, which is what the
engine receives; its logits are FP32 unless `fp32_head` is off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kernels import CISPO, linear_logprob, policy_loss
from trainer.attention import layout
from trainer.config import ConfigError, ModelConfig
from trainer.packing import MicroBatch

UNSUPPORTED = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)  # heads that are more than a product


class PolicyOutput(NamedTuple):
    """Of the N loss tokens of a micro-batch."""

    loss: Tensor | None  # None when only scored
    logprobs: Tensor  # (N,) nats, at the temperature
    entropy: Tensor  # (N,) nats


class PolicyModel(nn.Module):
    """Wraps the causal LM at `model_dir`."""

    def __init__(self, model_dir: str, config: ModelConfig, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="packed"
        )
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
        if checkpoint_activations:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, batch: MicroBatch, objective: CISPO | None, temperature: float) -> PolicyOutput:
        """Loss, log-probs and entropy of the micro-batch; without an objective it only scores."""
        hidden, weight = self._hidden(batch), self.lm.get_output_embeddings().weight
        if self.dtype != torch.float32:  # rounded as the engine's are; gradients stay FP32
            hidden, weight = (x + (x.to(self.dtype).float() - x).detach() for x in (hidden.float(), weight))
        targets = torch.from_numpy(batch.targets)
        if objective is None:
            scores = linear_logprob(
                hidden, weight, targets, temperature=temperature, logits_dtype=self.logits_dtype
            )
            return PolicyOutput(None, *scores)
        out = policy_loss(
            hidden,
            weight,
            targets,
            logprobs_gen=torch.from_numpy(batch.logprobs_gen),
            advantages=torch.from_numpy(batch.advantages),
            token_weights=torch.from_numpy(batch.token_weights),
            objective=objective,
            temperature=temperature,
            logits_dtype=self.logits_dtype,
        )
        return PolicyOutput(out.loss, out.logprobs, out.entropy)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """(N, H): the hidden states that predict the loss tokens."""
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            out = self.lm.base_model(
                input_ids=torch.from_numpy(batch.input_ids)[None],
                position_ids=torch.from_numpy(batch.position_ids)[None],
                use_cache=False,
                packed=layout(batch.segments),
            )
        return out.last_hidden_state[0].index_select(0, torch.from_numpy(batch.rows))
