"""Promise of PPO with a critic: from rewards to gradients, the trainer does what a plain PPO in float64 does.

`PlainPPO` is textbook PPO: padded, token by token, with its own GAE, clip, value loss, normalisation and
clipping. It takes nothing from the project but the numbers that both are given.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import rollout
from torch import Tensor, nn
from training import VOCABULARY, config, error, gradients_of_step, learner, make_model
from transformers import AutoModel, AutoModelForCausalLM

from trainer.config import Config, CriticConfig, KLConfig, ObjectiveConfig
from trainer.controller.batch import build_batch
from trainer.controller.scores import to_score
from trainer.types import Group, Prompt

LR, CRITIC_LR, EPS, MAX_NORM = 0.05, 0.02, 1e-2, 0.3
GAMMA, LAMBDA, CLIP, COEFFICIENT, BETA = 0.9, 0.8, 0.2, 0.5, 0.3


@dataclass
class Sample:
    prompt: list[int]
    tokens: list[int]
    sampled: list[bool]
    reward: float
    reference: list[float]  # log-probs of a reference policy


class PlainPPO:
    """Policy and value network in float64, with or without a common body."""

    def __init__(self, model_dir: str, own: bool, value_clip: float, beta: float, head: nn.Linear) -> None:
        options: Any = {"dtype": torch.float64, "attn_implementation": "eager"}
        self.policy = AutoModelForCausalLM.from_pretrained(model_dir, **options)
        self.body = AutoModel.from_pretrained(model_dir, **options) if own else None
        self.head = nn.Linear(head.in_features, 1, dtype=torch.float64)
        self.head.load_state_dict(head.state_dict())
        self.value_clip, self.beta = value_clip, beta
        critic = [*(self.body.parameters() if self.body else ()), *self.head.parameters()]
        self.parameters = [list(self.policy.parameters()), critic]
        settings: Any = {"betas": (0.9, 0.95), "eps": EPS, "weight_decay": 0.01}
        self.optimizers = [
            torch.optim.AdamW(p, lr=lr, **settings)
            for p, lr in zip(self.parameters, (LR, CRITIC_LR), strict=True)
        ]

    def forward(self, samples: list[Sample]) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and values of each sample's sampled tokens."""
        longest = max(len(s.prompt) + len(s.tokens) for s in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, s in zip(ids, samples, strict=True):
            row[: len(s.prompt) + len(s.tokens)] = torch.tensor(s.prompt + s.tokens)
        out = self.policy(ids, output_hidden_states=True)
        hidden = self.body(ids).last_hidden_state if self.body else out.hidden_states[-1]
        logp, values = out.logits.log_softmax(-1), self.head(hidden)[..., 0]
        rows = []
        for i, s in enumerate(samples):
            at = [(len(s.prompt) + t - 1, token) for t, token in enumerate(s.tokens) if s.sampled[t]]
            rows.append((torch.stack([logp[i, p, token] for p, token in at]), values[i, [p for p, _ in at]]))
        return rows

    @torch.no_grad()
    def collect(self, samples: list[Sample]) -> list[dict[str, Tensor]]:
        """Old log-probs and values, GAE advantages and returns of each sample."""
        data = []
        for s, (logp, values) in zip(samples, self.forward(samples), strict=True):
            reference = torch.tensor([x for x, real in zip(s.reference, s.sampled, strict=True) if real])
            rewards = -self.beta * (logp - reference)
            rewards[-1] += s.reward
            advantages, following = torch.zeros_like(values), 0.0
            for t in reversed(range(len(values))):
                next_value = values[t + 1] if t + 1 < len(values) else 0.0
                following = rewards[t] + GAMMA * next_value - values[t] + GAMMA * LAMBDA * following
                advantages[t] = following
            data.append({"logp": logp, "values": values, "a": advantages, "returns": advantages + values})
        return data

    def update(self, samples: list[Sample], data: list[dict[str, Tensor]]) -> dict[str, Any]:
        """One optimizer step; the losses, the gradients before clipping and the normalised advantages."""
        raw = torch.cat([d["a"] for d in data])
        advantages = (raw - raw.mean()) / raw.std(correction=0)
        logp, values = (torch.cat(x) for x in zip(*self.forward(samples), strict=True))
        names = ("logp", "values", "returns")
        old_logp, old_values, returns = (torch.cat([d[name] for d in data]) for name in names)
        ratio = torch.exp(logp - old_logp)
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        errors = (values - returns) ** 2
        if self.value_clip:
            near = torch.max(torch.min(values, old_values + self.value_clip), old_values - self.value_clip)
            errors = torch.max(errors, (near - returns) ** 2)
        value_loss = errors.mean() / 2
        (policy_loss + COEFFICIENT * value_loss).backward()
        gradients = [[p.grad.clone() for p in group] for group in self.parameters]  # type: ignore[union-attr]
        norms = [float(nn.utils.clip_grad_norm_(group, MAX_NORM)) for group in self.parameters]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ratio, values = ratio.detach(), values.detach()
        explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        moved = float((ratio - 1).abs().max()), float(((values - old_values).abs() > self.value_clip).sum())
        return {
            "policy_loss": policy_loss.item(), "value_loss": value_loss.item(), "gradients": gradients,
            "norms": norms, "explained": float(explained), "advantages": advantages, "returns": returns,
            "moved": moved,
        }  # fmt: skip


def make_samples() -> list[Sample]:
    """Four prompts of three completions; most have two injected tokens."""
    rng, samples = np.random.default_rng(5), []
    for g in range(4):
        prompt = rng.integers(0, VOCABULARY, 3 + g).tolist()
        for n in (2, 5, 8):
            sampled = [not 1 <= t < 3 for t in range(n)] if n > 2 else [True] * n
            tokens, reference = rng.integers(0, 5, n).tolist(), rng.normal(-3.4, 0.5, n).tolist()
            samples.append(Sample(prompt, tokens, sampled, float(rng.normal()), reference))
    return samples


def make_groups(samples: list[Sample]) -> list[Group]:
    rollouts = [rollout(s.reward, s.sampled, token_ids=np.array(s.tokens, np.int32)) for s in samples]
    prompts = [Prompt(str(i), "", tuple(samples[3 * i].prompt), "", {}) for i in range(len(samples) // 3)]
    return [Group(i, 0, prompt, tuple(rollouts[3 * i : 3 * i + 3])) for i, prompt in enumerate(prompts)]


def settings(body: Any, value_clip: float, beta: float, dtype: Any = "float32") -> Config:
    critic = CriticConfig(
        body=body, dtype=dtype, lr=CRITIC_LR, gamma=GAMMA, gae_lambda=LAMBDA, value_clip=value_clip,
        coefficient=COEFFICIENT,
    )  # fmt: skip
    objective = ObjectiveConfig(
        loss="ppo", anchor="recomputed", aggregation="token", advantage_norm="batch", critic=critic,
        kl=KLConfig(coefficient=beta, estimator="k1", place="reward"),
    )  # fmt: skip
    c = config(lr=LR, eps=EPS, grad_clip=MAX_NORM, micro_batch_tokens=40)
    return replace(c, objective=objective)


@pytest.mark.axis("objective.critic.body", "own", "shared")
@pytest.mark.axis("objective.critic.dtype", "float32")
@pytest.mark.parametrize("body", ["own", "shared"])
@pytest.mark.parametrize(("value_clip", "beta"), [(0.0, 0.0), (0.02, 0.0), (0.02, BETA)])
def test_two_minibatches_are_a_plain_ppos(body: str, value_clip: float, beta: float, tmp_path: Path) -> None:
    model_dir = make_model("tied", tmp_path)
    one = learner(model_dir, settings(body, value_clip, beta))
    critic = one.critic
    assert critic is not None
    head = critic.model.head if critic.model else one.model.value_head
    assert head is not None and not any(p.any() for p in head.parameters())
    torch.manual_seed(1)
    for p in head.parameters():
        p.data.normal_(0, 0.3)  # values of 0 would leave GAE nothing to do
    plain = PlainPPO(model_dir, body == "own", value_clip, beta, head)
    samples, objective = make_samples(), one.config.objective
    scores = [
        replace(x, logprobs_ref=np.array(s.reference, np.float32))
        for s, x in zip(samples, one.score(to_score(make_groups(samples))), strict=True)
    ]
    data = plain.collect(samples)
    for step, part in ((1, slice(0, 6)), (2, slice(6, 12))):
        batch = build_batch(make_groups(samples[part]), step, objective, step - 1, scores[part])
        metrics, gradients = gradients_of_step(one, batch)
        expected = plain.update(samples[part], data[part])
        for name in ("advantages", "returns"):
            ours = np.concatenate([getattr(s, name)[s.token_weights > 0] for s in batch.sequences])
            np.testing.assert_allclose(ours, expected[name].numpy(), rtol=1e-5, atol=1e-5)
        assert metrics["learner/loss"] == pytest.approx(expected["policy_loss"], rel=1e-5, abs=1e-6)
        assert metrics["critic/loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
        assert metrics["critic/explained_variance"] == pytest.approx(expected["explained"], rel=1e-5)
        norms = [metrics["learner/grad_norm"], metrics["critic/grad_norm"]]
        np.testing.assert_allclose(norms, expected["norms"], rtol=1e-5)
        for ours_by_name, theirs in zip(gradients.values(), expected["gradients"], strict=True):
            names = list(ours_by_name)
            assert error(ours_by_name, dict(zip(names, theirs, strict=True))) < 1e-5
        ratio, clipped = expected["moved"]
        assert (ratio > CLIP and metrics["ratio/truncated"] > 0) if step == 2 else ratio < 1e-12
        assert (metrics["critic/clipped"] > 0) == bool(value_clip and step == 2 and clipped)
