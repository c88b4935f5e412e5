"""Checks what a caller gives the ops; every ValueError says what was given and what was expected."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_shapes(
    hidden: Tensor, weight: Tensor, logits_dtype: torch.dtype, per_token: dict[str, Tensor | None]
) -> None:
    """ValueError on wrong shapes, types or devices; `per_token` holds `targets` and whatever else is (N,)."""
    shapes = tuple(hidden.shape), tuple(weight.shape)
    if hidden.dim() != 2 or weight.dim() != 2 or shapes[0][1] != shapes[1][1] or not weight.shape[0]:
        raise ValueError(f"expected hidden (N, H) and weight (V, H), given {shapes[0]} and {shapes[1]}")
    types = {"hidden": hidden.dtype, "weight": weight.dtype, "logits_dtype": logits_dtype}
    for name, dtype in types.items():
        if dtype not in _FLOATS:
            raise ValueError(f"{name}: expected a floating type, given {dtype}")
    n = hidden.shape[0]
    for name, x in {"weight": weight, **per_token}.items():
        if x is None:
            continue
        if name != "weight" and x.shape != (n,):
            raise ValueError(f"{name}: expected shape ({n},), as hidden has {n} rows, given {tuple(x.shape)}")
        if name in ("targets", "sequences") and x.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"expected integer {name}, given {x.dtype}")
        if x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device}, hidden on {hidden.device}; put both on one device")


def check_values(
    hidden: Tensor, vocabulary: int, targets: Tensor, inverse_temperature: Tensor, **per_token: Tensor | None
) -> None:
    """ValueError on ids outside the vocabulary and on NaN; on the CPU only: elsewhere the host would wait."""
    if hidden.device.type != "cpu" or not len(targets):
        return
    low, high = (int(x) for x in targets.aminmax())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"targets hold ids from {low} to {high}; expected 0 to {vocabulary - 1}")
    if not bool((inverse_temperature.isfinite() & (inverse_temperature > 0)).all()):
        raise ValueError("temperature holds values that are not above 0")
    for name, x in {"hidden": hidden, **per_token}.items():
        if x is not None and not bool(x.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity")


def check_log_probs(logp: Tensor, entropy: Tensor) -> None:
    """ValueError if they are not finite though hidden is; on the CPU. Spares a pass over the weight."""
    if logp.device.type == "cpu" and not bool((logp + entropy).isfinite().all()):
        raise ValueError("weight holds NaN or infinity, or the logits exceed their type")


def inverse(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """(N,) 1/temperature, in the type that logits are accumulated in."""
    n = hidden.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; expected a number above 0")
        return torch.full((n,), 1.0 / temperature, dtype=dtype, device=hidden.device)
    if temperature.shape not in ((), (n,)):
        raise ValueError(f"temperature: expected a number or shape ({n},), given {tuple(temperature.shape)}")
    return temperature.detach().to(hidden.device, dtype).reciprocal().expand(n)
