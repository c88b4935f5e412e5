"""The experts that a mixture routes each token to: recorded where it is generated, replayed where it is
trained (R3, arXiv 2510.11370).

    hidden ──router──> logits ── softmax ──> top k: ids, weights ──> experts
                         │                          │ recorded: (T, layers, k) ids
                         └── softmax ──> weights of the ids that are replayed, as the family normalises them

Rounding, or weights of another version, may choose other experts for the same token: a jump of its log-prob,
where a dense model differs a little. With the ids replayed, what remains is a smooth function of the logits,
and the routers are trained through the weights of their experts.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.config import ConfigError

# `model_type` of the families whose routers return logits, the weights of the top k, and their ids, where the
# weights are a softmax over all experts, divided by their sum unless `norm_topk_prob` is False.
FAMILIES = ("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
Ids = NDArray[Any]  # (T, layers · k): of engines uint8 or uint16; of a micro-batch int16, −1 where not known


def obstacle(config: Any) -> str:
    """The reason why experts of a model with this config (of transformers) cannot be replayed; or empty."""
    family = config.get_text_config().model_type
    return "" if family in FAMILIES else f"{family} is none of {', '.join(FAMILIES)}"


def replays_experts(setting: bool | None, config: Any) -> bool:
    """True if experts are replayed under this `model.replay_experts`; ConfigError if they cannot be."""
    problem = obstacle(config)
    if setting and problem:
        raise ConfigError(f"model.replay_experts cannot be true: {problem}; leave it out")
    return not problem and setting is not False


class Routers:
    """The routers of a model of FAMILIES; while `replayed` is set they take its ids."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self.layers = lm.config.get_text_config().num_hidden_layers
        self.replayed: Tensor | None = None  # (T, layers, k) ids of the next passes; −1: the router's choice
        self._chosen: dict[int, Tensor] = {}  # (T, k) of the last pass, by layer
        experts = 0
        for name, module in lm.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                layer = int(name.split("layers.")[1].split(".")[0])
                module.register_forward_hook(partial(self._route, layer))
                experts = max(experts, int(module.num_experts))
        if not experts:
            raise RuntimeError(
                f"{lm.config.model_type}: no router of it is found, so no experts can be replayed"
            )
        self.dtype = np.uint8 if experts <= 256 else np.uint16

    def recorded(self) -> Ids:
        """(T, layers · k) the ids of the last pass; 0 in layers without experts."""
        none = torch.zeros_like(next(iter(self._chosen.values())))
        ids = torch.stack([self._chosen.get(i, none) for i in range(self.layers)], 1).flatten(1)
        recorded: Ids = ids.cpu().numpy().astype(self.dtype)
        return recorded

    def tensor(self, ids: Ids) -> Tensor:
        """(T, layers, k) to be replayed."""
        return torch.from_numpy(ids).unflatten(1, (self.layers, -1))

    def _route(self, layer: int, router: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, index = output
        if self.replayed is None:
            self._chosen[layer] = index
            return output
        ids = self.replayed[:, layer].to(index.dtype)
        ids = ids.where(ids >= 0, index)
        # At least FP32, as the families compute it; autocast leaves a softmax there.
        values = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).gather(1, ids)
        if getattr(router, "norm_topk_prob", True):
            values = values / values.sum(-1, keepdim=True)
        return logits, values.to(weights.dtype), ids
