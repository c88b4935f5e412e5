"""The fused ops of `kernels` in the body, for the families whose layers are built as Llama's are.

    ─ fused_add_rms_norm ─> q, k, v ─ norm, RoPE ─> attention ─ fused_add_rms_norm ─> gate, up ─ swiglu ─>

Only forwards are replaced: modules, parameters and their names stay, and so does what checkpoints or shards
layers. Under autocast an unfused norm, rotation or sum of the residual stream is FP32, since the weights are,
and each linear layer then casts its input. A fused op is computed in FP32 as well, but writes the type that
the next product takes, once. The residual stream itself stays FP32.

An engine in bf16 has embeddings, residual stream, norms and RoPE tables in bf16. With `match_engine` they are
here, too, and learner and engine round at the same places: those where vLLM's graphs, compiled by Inductor,
write to memory. (vLLM's own CUDA kernels, as with enforce_eager, round more often.)
Weights and their gradients are FP32 in either case; those of the norms are rounded where they are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kernels import backend_info, fused_add_rms_norm, fused_qk_norm_rope, rms_norm, swiglu
from kernels.body import MAX_HEAD_DIM, MAX_WIDTH
from trainer.config import ConfigError
from trainer.learner.attention import packed_attention

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # `model_type` in a model's config.json
# (1, T, H) after the embedding; after a layer what its MLP adds, and what that is to be added to.
Stream = Tensor | tuple[Tensor, Tensor]
DTYPES = (torch.float32, torch.bfloat16)  # that the Triton kernels take


def obstacle(lm: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> str:
    """The reason why the ops of this model cannot be fused; empty if they can be."""
    config, body = lm.config, cast(Any, lm.base_model)
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(FAMILIES)}"
    if dtype not in DTYPES:
        return f"model.dtype is {_name(dtype)}"
    if device.type == "cuda" and not backend_info()["triton"]["available"]:
        return "Triton is missing"
    head_dim = body.layers[0].self_attn.head_dim
    if config.hidden_size > MAX_WIDTH or head_dim > MAX_HEAD_DIM:
        return f"rows of {config.hidden_size} or heads of {head_dim} are too wide"
    return ""


def fuse_on(device: torch.device, lm: PreTrainedModel, dtype: torch.dtype, match_engine: bool | None) -> str:
    """Fuse the ops of a model whose products are in `dtype`, if they can be; returns a line that says which.

    Empty on a CPU, where it is done only to match the engine: there the ops are no faster. `match_engine` is
    the setting: None where it is to be derived. ConfigError if it cannot be followed."""
    problem = obstacle(lm, dtype, device)
    if match_engine and (problem or dtype != torch.bfloat16):
        why = problem or f"model.dtype is {_name(dtype)}, in which both round alike without it"
        raise ConfigError(f"model.match_engine cannot be true: {why}; leave it out")
    if device.type == "cpu" and not match_engine:
        return ""
    if problem:
        return f"unfused, since {problem}"
    narrow = dtype == torch.bfloat16 and match_engine is not False
    return f"fused {fuse(lm, dtype, narrow)}" + "; residual stream in bf16, as the engine's" * narrow


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fuse(lm: PreTrainedModel, dtype: torch.dtype, match_engine: bool = False) -> str:
    """Replace the forwards of a model of FAMILIES; returns what is fused."""
    ops, body = FusedOps(dtype, match_engine), cast(Any, lm.base_model)
    if match_engine:  # the tables of RoPE follow its type
        body.embed_tokens.register_forward_hook(lambda module, args, out: out.to(dtype))
    gated = lm.config.hidden_act in ("silu", "swish")
    for layer in body.layers:
        layer.forward = _recomputed(layer, partial(ops.layer, layer))
        layer.self_attn.forward = partial(ops.attention, layer.self_attn)
        if gated and hasattr(layer.mlp, "gate_proj"):  # no mixture of experts
            layer.mlp.forward = partial(ops.mlp, layer.mlp)
    body.norm.forward = partial(ops.norm, body.norm)
    normed = hasattr(body.layers[0].self_attn, "q_norm")
    return f"RMSNorm, {'q/k norm with ' if normed else ''}RoPE" + ", SwiGLU" * gated


def _recomputed(layer: Any, forward: Callable[..., Stream]) -> Callable[..., Stream]:
    """The forward, which the backward computes again where the layer is to. Older transformers (5.19) do so
    in a layer's `__call__`; newer ones in the forward of its class, which `forward` hides."""
    if "__call__" in GradientCheckpointingLayer.__dict__:
        return forward

    def checkpointed(*args: Any, **kwargs: Any) -> Stream:
        if not (layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        stream: Stream = layer._gradient_checkpointing_func(partial(forward, **kwargs), *args)
        return stream

    return checkpointed


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The forwards, each with the module whose own it replaces."""

    dtype: torch.dtype  # of what goes into matrix products
    match_engine: bool

    def weight(self, norm: Any) -> Tensor:
        """The norm's weight in FP32, as the engine has it."""
        weight: Tensor = norm.weight
        return _Rounded.apply(weight, self.dtype) if self.match_engine else weight

    def add_norm(self, norm: Any, x: Stream) -> tuple[Tensor, Tensor]:
        """The residual stream normed, and itself."""
        options: dict[str, Any] = {"eps": norm.variance_epsilon, "dtype": self.dtype}
        if isinstance(x, Tensor):
            return rms_norm(x, self.weight(norm), **options), x
        return fused_add_rms_norm(*x, self.weight(norm), **options)

    def norm(self, norm: Any, x: Stream) -> Tensor:
        """(1, T, H) the residual stream normed."""
        return self.add_norm(norm, x)[0]

    def layer(self, layer: Any, hidden_states: Stream, **kwargs: Any) -> Stream:
        """The residual stream after a layer, from that before it."""
        normed, residual = self.add_norm(layer.input_layernorm, hidden_states)
        attended, _ = layer.self_attn(normed, **kwargs)
        normed, residual = self.add_norm(layer.post_attention_layernorm, (attended, residual))
        return layer.mlp(normed), residual

    def attention(
        self, attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """(1, T, H) what attention adds to the residual stream."""
        tokens = hidden_states.shape[:-1]
        q, k, v = (
            projection(hidden_states).view(*tokens, -1, attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        norms: dict[str, Any] = {}
        if hasattr(attention, "q_norm"):
            norms = {
                "q_weight": self.weight(attention.q_norm), "k_weight": self.weight(attention.k_norm),
                "eps": attention.q_norm.variance_epsilon,
            }  # fmt: skip
        cos, sin = (x.flatten(0, 1) for x in position_embeddings)
        q, k = fused_qk_norm_rope(q, k, cos, sin, dtype=self.dtype, **norms)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        out, _ = packed_attention(
            attention, q, k, v, attention_mask, attention.scaling, sliding_window=window, **kwargs
        )  # fmt: skip
        return attention.o_proj(out.reshape(*tokens, -1)), None

    def mlp(self, mlp: Any, x: Tensor) -> Tensor:
        """(1, T, H) from gate, up and down projection."""
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(swiglu(gate, up, dtype=self.dtype))


class _Rounded(torch.autograd.Function):
    """A weight's values in a narrower type; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
