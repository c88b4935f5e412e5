"""The fused ops of `kernels` in the body, for the families whose layers are built as Llama's are.

    stream ─ rms_norm ─> q, k, v ─ norm, RoPE ─> attention ─ fused_add_rms_norm ─> gate, up ─ swiglu ─> + ─>

Only forwards are replaced: modules, parameters and their names stay, and so does what checkpoints or shards
layers. Under autocast an unfused norm, rotation or sum of the residual stream is FP32, since the weights are,
and each linear layer then casts its input. A fused op is computed in FP32 as well, but writes the type that
the next product takes, once. The residual stream itself stays FP32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels import backend_info, fused_add_rms_norm, fused_qk_norm_rope, rms_norm, swiglu
from kernels.body import MAX_HEAD_DIM, MAX_WIDTH
from trainer.learner.attention import packed_attention

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # `model_type` in a model's config.json
DTYPES = (torch.float32, torch.bfloat16)  # that the Triton kernels take


def obstacle(lm: PreTrainedModel, dtype: torch.dtype) -> str:
    """Why the ops of this model cannot be fused; empty if they can be."""
    config, body = lm.config, cast(Any, lm.base_model)
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(FAMILIES)}"
    if dtype not in DTYPES:
        return f"model.dtype is {str(dtype).removeprefix('torch.')}"
    if not backend_info()["triton"]["available"]:
        return "Triton is missing"
    head_dim = body.layers[0].self_attn.head_dim
    if config.hidden_size > MAX_WIDTH or head_dim > MAX_HEAD_DIM:
        return f"rows of {config.hidden_size} or heads of {head_dim} are too wide"
    return ""


def fuse_on(device: torch.device, lm: PreTrainedModel, dtype: torch.dtype) -> str:
    """Fuse the ops of a model whose products are in `dtype`, if they can be; returns a line that says which.

    Empty on a CPU: there the ops are no faster."""
    if device.type == "cpu":
        return ""
    problem = obstacle(lm, dtype)
    return f"unfused, since {problem}" if problem else f"fused {fuse(lm, dtype)}"


def fuse(lm: PreTrainedModel, dtype: torch.dtype) -> str:
    """Replace the forwards of a model of FAMILIES; returns what is fused."""
    ops, body = FusedOps(dtype), cast(Any, lm.base_model)
    gated = lm.config.hidden_act in ("silu", "swish")
    for layer in body.layers:
        layer.forward = partial(ops.layer, layer)
        layer.self_attn.forward = partial(ops.attention, layer.self_attn)
        layer.input_layernorm.forward = partial(ops.norm, layer.input_layernorm)
        if gated and hasattr(layer.mlp, "gate_proj"):  # no mixture of experts
            layer.mlp.forward = partial(ops.mlp, layer.mlp)
    body.norm.forward = partial(ops.norm, body.norm)
    normed = hasattr(body.layers[0].self_attn, "q_norm")
    return f"RMSNorm, {'q/k norm with ' if normed else ''}RoPE" + ", SwiGLU" * gated


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The forwards, each with the module whose own it replaces."""

    dtype: torch.dtype  # of what goes into matrix products

    def norm(self, norm: Any, x: Tensor) -> Tensor:
        """x (1, T, H) normed."""
        return rms_norm(x, norm.weight, norm.variance_epsilon, dtype=self.dtype)

    def layer(self, layer: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """(1, T, H) the residual stream after a layer, from that before it."""
        attended, _ = layer.self_attn(layer.input_layernorm(hidden_states), **kwargs)
        norm = layer.post_attention_layernorm
        normed, residual = fused_add_rms_norm(
            attended, hidden_states, norm.weight, norm.variance_epsilon, dtype=self.dtype
        )
        return residual + layer.mlp(normed)

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
            norms = {name: getattr(attention, f"{name[0]}_norm").weight for name in ("q_weight", "k_weight")}
            norms["eps"] = attention.q_norm.variance_epsilon
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
