"""Training of the critic (PPO): the value loss, its gradient and AdamW, and their metrics.

own      a value network beside the policy, with its own pass over the micro-batches
shared   a head on the policy's hidden states: its loss is added to the policy's, and so also moves the body

In both the weights of the critic alone (network or head) have their own AdamW, clipped by their own norm.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.config import Config
from trainer.learner.fused_body import fuse_on
from trainer.learner.inputs import make_inputs
from trainer.learner.optimizer import LossScale, ShardedAdamW
from trainer.learner.packing import MicroBatch
from trainer.learner.policy_model import PolicyModel, PolicyOutput, hidden_states, load, prepare
from trainer.learner.ranks import Ranks
from trainer.learner.schedule import DUMMY, MicroStep
from trainer.learner.sharding import load_from_rank0, shard_module

LR_RATIO = 5  # of the value network's learning rate to the policy's: 5e-6 to 1e-6 in arXiv 2503.24290

# (8,) sums over loss tokens: their number, weight · term, clipped, return R, R², error R − V, its square; and
# the squared norm of the gradient. They add up over micro-batches and ranks.
Sums = NDArray[np.float64]
NO_SUMS: Sums = np.zeros(8)


def overflowed(sums: Sums) -> bool:
    """True if the gradient alone is not finite, as where float16's loss scale is too high."""
    return bool(np.isfinite(sums[:-1]).all() and not np.isfinite(sums[-1]))


def value_metrics(sums: Sums) -> dict[str, float]:
    """The loss without its coefficient, 1 − Var(R − V) / Var(R) before the step, the share of tokens that are
    clipped and so have no gradient, and the gradient's norm before clipping."""
    tokens, loss, clipped, *moments, squared_norm = sums.tolist()
    r, r2, e, e2 = (x / max(1.0, tokens) for x in moments)
    return {
        "critic/loss": loss,
        "critic/explained_variance": 1 - (e2 - e**2) / (r2 - r**2) if r2 > r**2 else math.nan,
        "critic/clipped": clipped / max(1.0, tokens),
        "critic/grad_norm": math.sqrt(squared_norm),
    }


class ValueModel(nn.Module):
    """A value network of its own. Its body starts as the policy does, and runs as the policy's: packed, with
    FP32 master weights, under autocast to its type."""

    def __init__(self, model_dir: str, config: Config, empty: bool) -> None:
        super().__init__()
        lm = load(model_dir, empty)
        prepare(lm, config.learner.checkpoint_activations)
        dtype = getattr(torch, config.objective.critic.dtype)
        self.body, self.head, self.dtype = lm.base_model, value_head(lm), dtype

    def forward(self, batch: MicroBatch) -> Tensor:
        """(N,) values, each on the row that predicts its token: of the state before it."""
        # The head is FP32: in bfloat16 values near 1 would have steps of 1/128.
        device = self.head.weight.device
        inputs = make_inputs(batch, self.dtype, device).to(device)
        out: Tensor = self.head(hidden_states(self.body, inputs, self.dtype).float())
        return out.sum(1)  # (N, 1): FSDP2 wants no view


def value_head(lm: PreTrainedModel) -> nn.Linear:
    """The linear map from a hidden state to its value.

    It starts at 0, so every first value is 0: the first advantages are the discounted rewards, and not the
    noise of a random head, which GAE would hand on to the policy.
    """
    head = nn.Linear(lm.get_output_embeddings().weight.shape[1], 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class Critic:
    """The value network (or its head on the policy), its optimizer and its loss."""

    def __init__(
        self, config: Config, model_dir: str, policy: PolicyModel, scale: LossScale, ranks: Ranks
    ) -> None:
        """A shared body has the loss scale of the policy."""
        self.settings, self._ranks = config.objective.critic, ranks
        self.model: ValueModel | None = None
        module: nn.Module
        if self.settings.body == "own":
            module = self.model = _value_model(config, model_dir, ranks)
            scale = LossScale(self.settings.dtype)
        else:
            module = policy.value_head = value_head(policy.lm).to(ranks.device)
        weights = dict(module.named_parameters())
        self.lr = self.settings.lr or LR_RATIO * config.learner.lr
        self.optimizer = ShardedAdamW(weights, ranks, config.learner, self.lr, scale)

    def values(self, m: MicroBatch, policy: PolicyOutput) -> Tensor:
        """(N,) values before the loss tokens, where the policy's output is that of the same tokens."""
        values = policy.values if self.model is None else self.model(m)
        assert values is not None
        return values

    def loss(self, m: MicroBatch, values: Tensor) -> tuple[Tensor, Tensor]:
        """coefficient · Σ_t w_t · value term, of values (N,) with a gradient; and (7,) the first sums."""
        assert m.values is not None and m.returns is not None
        columns = (torch.from_numpy(x) for x in (m.values, m.returns, m.token_weights))
        old, r, weights = (x.to(values.device, non_blocking=True) for x in columns)
        term, clipped = value_term(values, old, r, self.settings.value_clip)
        weighted, error = weights * term, r - values.detach()
        summands = torch.ones_like(r), weighted.detach(), clipped, r, r**2, error, error**2
        sums = torch.stack([x.sum(dtype=torch.float64) for x in summands])
        return self.settings.coefficient * weighted.sum(), sums * (m is not DUMMY)

    def gradients(self, steps: Sequence[MicroStep], sums: list[Tensor]) -> Sums:
        """Complete the gradients of the critic's weights; returns this rank's sums. A shared body's backward
        has been done with the policy's loss, which also gave the `sums`."""
        if self.model is not None:
            sums = []
            for step in steps:
                loss, ours = self.loss(m := step[self._ranks.rank], self.model(m))
                (loss * self.optimizer.scale.value).backward()
                sums.append(ours)
        self.optimizer.collect_gradients()
        return np.append(torch.stack(sums).sum(0).cpu().numpy(), self.optimizer.squared_norm())


def value_term(
    values: Tensor,  # (N,)
    old: Tensor,  # (N,) before the first step on these tokens
    returns: Tensor,  # (N,)
    clip: float,
) -> tuple[Tensor, Tensor]:
    """½ (V − R)² of each token, and True where it is clipped; with a clip ε the larger of it and of

        ½ (V_old + clip(V − V_old, −ε, ε) − R)²      (arXiv 2005.12729, §3)

    which has no gradient in V where V is outside: a value moves by about ε for each batch of data.
    """
    plain = (values - returns) ** 2
    bounded = (old + (values - old).clamp(-clip, clip) - returns) ** 2
    clipped = (bounded > plain) & ((values - old).abs() > clip) if clip else torch.zeros_like(plain).bool()
    return torch.where(clipped, bounded, plain) / 2, clipped


def _value_model(config: Config, model_dir: str, ranks: Ranks) -> ValueModel:
    """The network on this rank's device: whole, or its shard."""
    model = ValueModel(model_dir, config, empty=ranks.mesh is not None)
    fuse_on(ranks.device, model.body, model.dtype, False)  # type: ignore[arg-type]  # it is the body of an LM
    if ranks.mesh is None:
        return model.to(ranks.device)
    shard_module(model, ranks.mesh, model.dtype, [], set(model.head.parameters()))
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    load_from_rank0(model.body, load(model_dir).base_model if ranks.rank == 0 else None)
    return model
