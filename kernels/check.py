"""Checks what a caller gives the ops; every ValueError says what was given and what was expected."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def checked(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, **per_token: Tensor) -> Tensor:
    """ValueError on wrong shapes, types, devices or ids; returns 1/temperature as (N,)."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden (N, H) and weight (V, H), given {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.dtype not in _FLOATS or weight.dtype not in _FLOATS:
        raise ValueError(f"expected floating hidden and weight, given {hidden.dtype} and {weight.dtype}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"expected integer targets, given {targets.dtype}")
    n, v = len(hidden), len(weight)
    for name, tensor in {"targets": targets, **per_token}.items():
        if tensor.shape != (n,):
            raise ValueError(f"{name}: expected shape ({n},) for {n} rows of hidden, given {tuple(tensor.shape)}")
    for name, tensor in {"weight": weight, "targets": targets, **per_token}.items():
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}; put both on one device")
    if hidden.device.type == "cpu":  # elsewhere these would make the host wait
        if n and not (0 <= int(targets.min()) and int(targets.max()) < v):
            raise ValueError(f"targets hold ids from {targets.min()} to {targets.max()}; expected 0 to {v - 1}")
        for name, tensor in {"hidden": hidden, **per_token}.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} holds NaN or infinity")
    return _inverse(temperature, hidden)


def _inverse(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    n = len(hidden)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if isinstance(temperature, Tensor):
        if temperature.shape not in ((), (n,)):
            raise ValueError(f"temperature: expected a number or shape ({n},), given {tuple(temperature.shape)}")
        return temperature.to(hidden.device, dtype).reciprocal().expand(n)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a number above 0")
    return torch.full((n,), 1.0 / temperature, dtype=dtype, device=hidden.device)
