"""'autocast' experts for transformers: a mixture of experts runs in the compute type, as linear layers do.

torch.autocast does not cover grouped matrix products: FP32 master weights would be multiplied in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS = "autocast"


class _Cast:
    """A module whose parameters read as `dtype`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def autocast_experts(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls: (T, H) from the top_k experts `index` (T, k) of each token, by `weights`."""
    device = hidden.device.type
    module: Any = experts
    if torch.is_autocast_enabled(device):
        module = _Cast(experts, torch.get_autocast_dtype(device))
    out: Tensor = grouped_mm_experts_forward(module, hidden, index, weights)
    return out


ExpertsInterface.register(EXPERTS, autocast_experts)
