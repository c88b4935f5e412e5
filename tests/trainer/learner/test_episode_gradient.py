"""Promise of training on episodes: one gradient, that of a plain loop in float64 over what was sampled."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import rollout
from torch import Tensor
from training import VOCABULARY, config, error, gradients_of_step, learner
from transformers import AutoModelForCausalLM

from trainer.config import ObjectiveConfig
from trainer.controller.batch import build_batch
from trainer.types import Group, Prompt, Rollout


def episodes() -> list[Group]:
    """Three prompts with five episodes of several turns, one of which failed; the last prompt's rewards are
    equal. The last two episodes of a prompt have their first turn in common."""
    rng, out = np.random.default_rng(8), []
    for g in range(3):
        rollouts: list[Rollout] = []
        parts: list[tuple[bool, list[int]]] = []
        for i in range(5):
            parts = parts[:2] if i == 4 else []
            for by_model in [False, True] * (1 + i):
                parts.append((by_model, rng.integers(0, VOCABULARY, rng.integers(1, 7)).tolist()))
            sampled = np.array([by_model for by_model, ids in parts for _ in ids])
            more: dict[str, Any] = {
                "token_ids": np.array([token for _, ids in parts for token in ids], np.int32),
                "logprobs_gen": np.where(sampled, rng.normal(-3.4, 0.7, len(sampled)), 0).astype(np.float32),
                "outcome": "error" if i == 2 else "wrong",
            }
            reward = 1.0 if g == 2 else float(rng.normal())
            rollouts.append(rollout(reward, sampled.tolist(), **more))
        prompt = Prompt(str(g), "", tuple(rng.integers(0, VOCABULARY, 3 + g).tolist()), "", {})
        out.append(Group(g, 0, prompt, tuple(rollouts)))
    return out


def cispo(logp: Tensor, gen: Tensor, advantage: float) -> Tensor:
    return -((logp - gen).exp().detach().clamp(max=1.5) * advantage * logp)


def gspo(logp: Tensor, gen: Tensor, advantage: float) -> Tensor:
    """The ratio of a whole episode: over its sampled tokens."""
    ratio = (logp - gen).mean().exp().expand(len(logp))
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)


LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "cispo": ({"max_ratio": 1.5, "aggregation": "prompt", "advantage_norm": "batch"}, cispo),  # ScaleRL's
    "gspo": ({"clip_low": 0.2, "clip_high": 0.3, "aggregation": "sample", "advantage_norm": "group"}, gspo),
}


def in_float64(model_dir: str, settings: dict[str, Any], term: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, token by token."""
    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
    groups = episodes()[:2]  # the third has no advantage
    scored = [[r for i, r in enumerate(g.rollouts) if i != 2] for g in groups]
    centred = [[r.reward - sum(x.reward for x in rs) / len(rs) for r in rs] for rs in scored]
    everything = [a for of_prompt in centred for a in of_prompt]
    loss = torch.zeros((), dtype=torch.float64)
    for g, rollouts, raw in zip(groups, scored, centred, strict=True):
        of_group = settings["advantage_norm"] == "group"
        std = float(np.std(raw if of_group else everything))
        for r, a in zip(rollouts, raw, strict=True):
            ids = torch.tensor([[*g.prompt.token_ids, *r.token_ids.tolist()]])
            logprobs = lm(ids).logits[0].log_softmax(-1)
            places = [t for t in range(len(r.token_ids)) if r.sampled[t]]
            first = len(g.prompt.token_ids)
            logp = torch.stack([logprobs[first + t - 1, r.token_ids[t]] for t in places])
            gen = torch.tensor([float(r.logprobs_gen[t]) for t in places], dtype=torch.float64)
            if settings["aggregation"] == "prompt":
                weight = 1 / (len(groups) * sum(int(x.sampled.sum()) for x in rollouts))
            else:
                weight = 1 / (sum(map(len, scored)) * len(places))
            loss = loss + weight * term(logp, gen, a / std).sum()
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro_batch_tokens", [60, 4096])
def test_the_gradient_of_episodes_is_that_of_a_plain_loop_over_what_was_sampled(
    model_dir: str, name: str, micro_batch_tokens: int
) -> None:
    settings, term = LOSSES[name]
    objective = ObjectiveConfig(loss=name, **settings)
    c = replace(config(micro_batch_tokens=micro_batch_tokens), objective=objective)
    batch = build_batch(episodes(), 1, objective, 0)
    metrics, gradients = gradients_of_step(learner(model_dir, c), batch)
    loss, expected = in_float64(model_dir, settings, term)
    assert metrics["learner/loss"] == pytest.approx(loss, rel=1e-5)
    assert error(gradients["policy"], expected) < 1e-5
    if micro_batch_tokens == 4096:  # a turn that episodes have in common is computed once
        whole = [(*s.prompt_ids.tolist(), *s.token_ids.tolist()) for s in batch.sequences]
        assert metrics["learner/input_tokens"] == len({ids[:n] for ids in whole for n in range(1, len(ids))})
