"""LoRA in the learner: a base frozen in `model.dtype`, and FP32 adapters, which alone have gradients.

    forward     y = x Wᵀ,  W = W0 + scale · B A, rounded to `model.dtype`: the weight that the engines get
    backward    dx = dy W,  dA = scale · (dy B)ᵀ x,  dB = scale · dyᵀ (x Aᵀ)

The products are those of `x W0ᵀ + scale · (x Aᵀ) Bᵀ`, but learner and engine round at the same places. The
sum W lives for one product, and is made again in the backward: 4 · rank FLOP for each of its numbers, where
the products have 4 for each token. On several ranks the base is sharded, and the adapters are replicated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.config import ConfigError, LoraConfig
from trainer.models.lora import Adapter, merged


class LoraLinear(nn.Linear):
    """A linear layer with a frozen weight (out, in) and an adapter; `add_adapters` makes it."""

    lora_A: nn.Parameter  # (rank, in) FP32
    lora_B: nn.Parameter  # (out, rank) FP32
    scale: float
    base_alone = False  # True: without the adapter

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)."""
        if self.base_alone:
            return super().forward(input)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        out: Tensor = _MergedLinear.apply(
            input, self.weight, self.bias, self.lora_A, self.lora_B, self.scale
        )  # fmt: skip
        return out


class _MergedLinear(torch.autograd.Function):
    """The products at the head of this module."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, base, a, b)
        ctx.scale = scale
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, merged(base, a, b, scale), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, base, a, b = ctx.saved_tensors
        dx = gradient @ merged(base, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        dy, x = gradient.flatten(0, -2), x.flatten(0, -2)
        da = (dy @ b.to(dy.dtype)).T @ x
        db = dy.T @ (x @ a.to(x.dtype).T)
        return dx, None, None, ctx.scale * da.to(a.dtype), ctx.scale * db.to(b.dtype), None


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A frozen weight with its adapter: one weight for the engines. `sharding.full_tensor` sums it."""

    base: Tensor  # (out, in), perhaps sharded
    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def numel(self) -> int:
        """Numbers of the sum."""
        return self.base.numel()


def add_adapters(lm: PreTrainedModel, dtype: torch.dtype, lora: LoraConfig, seed: int) -> None:
    """Freeze the model, its matrices in `dtype`, and adapt its linear layers other than the head.

    A is uniform in ± 1/√in, as PEFT's is, and depends on the seed alone; B is 0, so that the first policy is
    the base. ConfigError if one of `lora.targets` is no linear layer of the model.
    """
    head = lm.get_output_embeddings()
    linears = {n: m for n, m in lm.named_modules() if type(m) is nn.Linear and m is not head}
    kinds = {name.rpartition(".")[2] for name in linears}
    if unknown := sorted(set(lora.targets) - kinds):
        raise ConfigError(
            f"model.lora.targets: no linear layer of this model is named {', '.join(unknown)}; expected some "
            f"of {', '.join(sorted(kinds))}"
        )
    if not linears:
        raise ConfigError("model.lora.rank: this model has no linear layer to adapt; expected 0, no LoRA")
    for parameter in lm.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
    if dtype.itemsize < 4:  # the residual stream stays FP32, as without LoRA
        lm.get_input_embeddings().register_forward_hook(lambda module, args, out: out.float())
    random = torch.Generator().manual_seed(seed)
    for name, linear in linears.items():
        if not lora.targets or name.rpartition(".")[2] in lora.targets:
            _adapt(linear, lora, random)


def _adapt(linear: nn.Linear, lora: LoraConfig, random: torch.Generator) -> None:
    """Make it a LoraLinear, in place."""
    width, device = linear.in_features, linear.weight.device
    a = torch.empty(lora.rank, width).uniform_(-(width**-0.5), width**-0.5, generator=random)
    linear.__class__ = LoraLinear
    linear.scale = lora.alpha / lora.rank  # type: ignore[assignment]  # it is a LoraLinear now
    linear.lora_A = nn.Parameter(a.to(device))
    linear.lora_B = nn.Parameter(torch.zeros(linear.out_features, lora.rank, device=device))


def adapted_layers(lm: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by name."""
    return {name: m for name, m in lm.named_modules() if isinstance(m, LoraLinear)}


def adapter_of(lm: nn.Module, base: str, lora: LoraConfig) -> Adapter | None:
    """The model's adapter, whose tensors are those that are trained; None without LoRA."""
    pairs = {name: (m.lora_A, m.lora_B) for name, m in adapted_layers(lm).items()}
    return Adapter(base, lora.alpha, pairs) if pairs else None


def weights_for_engines(lm: nn.Module) -> Mapping[str, Tensor | AdaptedWeight]:
    """The model's weights by name, those with an adapter as one weight each."""
    adapted = {
        f"{name}.weight": AdaptedWeight(m.weight, m.lora_A, m.lora_B, m.scale)
        for name, m in adapted_layers(lm).items()
    }
    return {n: adapted.get(n, p) for n, p in lm.named_parameters() if ".lora_" not in n}


def without_adapters(model: nn.Module, *args: Any) -> Any:
    """The output of the base alone."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.base_alone = True
    try:
        return model(*args)
    finally:
        for layer in layers:
            layer.base_alone = False
