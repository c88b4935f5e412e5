"""A network's weights with their AdamW: summed gradients, clipping, learning rate, float16's loss scale."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import LearnerConfig
from trainer.learner.ranks import Ranks
from trainer.learner.sharding import all_reduce_replicated, local_shard, replicas

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of a parameter
FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
GROWTH_STEPS = 100  # without an overflow, until the scale is doubled


def lr_share(settings: LearnerConfig, step: int, steps: float) -> float:
    """Share of the learning rate at optimizer step `step` of `steps`, both from 1.

    A linear warm-up, whose last step has the whole rate; then the schedule, which would be at
    `final_lr_share` one step after the last: at a rate of 0 the last step would be for nothing. A step beyond
    an expected last one is itself the last.
    """
    peak = max(1, settings.warmup_steps)
    if step <= peak or settings.schedule == "constant":
        return min(1.0, step / peak)
    done = (step - peak) / (max(steps, step) - peak + 1)
    remaining = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return settings.final_lr_share + (1 - settings.final_lr_share) * remaining[settings.schedule]


class LossScale:
    """Factor of the loss, so that small float16 gradients do not become 0 (arXiv 1710.03740, §3.2).

    When gradients overflow, the same step is computed again with half the factor: no data are skipped.
    """

    def __init__(self, dtype: str) -> None:
        self.dynamic = dtype == "float16"
        # (2,) the factor, and the steps since it last changed: a tensor, into which a checkpoint is read.
        self.state = torch.tensor([FIRST_SCALE if self.dynamic else 1.0, 0.0])

    @property
    def value(self) -> float:
        """The factor: a power of 2."""
        return float(self.state[0])

    def lower(self) -> bool:
        """After a gradient that is not finite: halve the factor; False if that cannot help."""
        if self.value <= 1.0:
            return False
        self.state[0], self.state[1] = self.value / 2, 0
        return True

    def record_step(self) -> None:
        """After a finite step: double the factor where it has not overflowed for long."""
        self.state[1] += self.dynamic
        if self.state[1] >= GROWTH_STEPS:
            self.state[0], self.state[1] = min(2 * self.value, LARGEST_SCALE), 0


class ShardedAdamW:
    """AdamW over this rank's shards of the weights, whose gradients are those of the loss times the scale."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], ranks: Ranks, settings: LearnerConfig, lr: float,
        scale: LossScale,
    ) -> None:  # fmt: skip
        self.weights, self.scale = dict(weights), scale
        self.parameters = [local_shard(w) for w in self.weights.values()]
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=lr, betas=settings.betas, eps=settings.eps,
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip
        self._ranks, self._clip = ranks, settings.grad_clip

    def moments(self) -> list[Tensor]:
        """AdamW's; none before the first step."""
        return [state[name] for state in self.adamw.state.values() for name in MOMENTS]

    def collect_gradients(self) -> None:
        """Sum what FSDP2 has not summed over the ranks, and give AdamW this rank's shards."""
        if self._ranks.mesh is None:
            return
        replicated = [w.grad for w in self.weights.values() if not isinstance(w, DTensor)]
        all_reduce_replicated([gradient for gradient in replicated if gradient is not None])
        for weight, parameter in zip(self.weights.values(), self.parameters, strict=True):
            if isinstance(weight.grad, DTensor):
                parameter.grad, weight.grad = weight.grad.to_local(), None

    def squared_norm(self) -> float:
        """This rank's part of the squared norm of the gradient, without the loss scale."""
        # A shard that n ranks hold enters the sum over ranks n times.
        gradients: dict[int, list[Tensor]] = {}
        for weight, parameter in zip(self.weights.values(), self.parameters, strict=True):
            if parameter.grad is not None:
                gradients.setdefault(replicas(weight, self._ranks.size), []).append(parameter.grad)
        norms = {n: float(torch.nn.utils.get_total_norm(g)) / self.scale.value for n, g in gradients.items()}
        return sum(norm**2 / n for n, norm in norms.items())

    def step(self, norm: float, lr: float) -> None:
        """One update by the gradients, clipped by their norm over all ranks."""
        factor = self.scale.value * (max(1.0, norm / self._clip) if self._clip else 1.0)
        # The fused kernel divides gradients by `grad_scale` as it reads them: clipping costs no extra pass.
        divisor = torch.tensor(factor, device=self._ranks.device) if factor != 1.0 else None
        self.adamw.grad_scale = divisor  # type: ignore[attr-defined]  # unstubbed
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
