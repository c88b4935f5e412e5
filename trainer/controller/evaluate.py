"""The held-out scores: mean@k over the prompts of every held-out set, with its standard error.

Each task and each of `evaluation.sets` is scored on its own. The main score is that of the only task, or the
mean over the tasks of a mixture, weighted by their shares. Besides, what are k completions of a prompt worth,
estimated from n ≥ k samples of it?

    pass@k   one of the k is right: 1 − C(n − c, k) / C(n, k) with c right ones (arXiv 2107.03374)
    maj@k    the answer that most of the k have is right (arXiv 2203.11171)
    best@k   the one of the k that the judge scores highest is right

All are unbiased: pass@k and best@k are means over every choice of k of the n samples, maj@k over the ⌊n/k⌋
disjoint runs of k. What is tied wins with equal probability.
"""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import chain
from math import comb
from statistics import fmean, multimode

import numpy as np
from numpy.typing import NDArray

from trainer.config import Config
from trainer.controller.data import Dataset
from trainer.controller.mixture import shares
from trainer.controller.rollout import RolloutContext, rollout_prompt
from trainer.types import Prompt, Rollout
from trainer.verifiers.verifier import find

EVALUATION_SEED = 7_919  # of every evaluation, so that they differ by their weights only


async def evaluate(ctx: RolloutContext, dataset: Dataset, version: int) -> dict[str, float]:
    """Score the engines' present weights on all held-out sets: the numbers of the main score, and those of
    the others as `NAME/number`."""
    config = ctx.config
    tasks = {name: tuple(p for p in dataset.held_out if p.task == name) for name in config.tasks}
    sets = tasks | dataset.sets
    prompts = enumerate(chain.from_iterable(sets.values()))
    groups = iter(await asyncio.gather(*(_sample(ctx, prompt, version, i) for i, prompt in prompts)))
    scores = {name: score(config, subset, [next(groups) for _ in subset]) for name, subset in sets.items()}
    weights = np.array(list(shares(config).values()))
    main = scores.pop("") if "" in scores else weighted_mean([scores[name] for name in tasks], weights)
    return main | {f"{name}/{k}": v for name, one in scores.items() for k, v in one.items()}


async def _sample(ctx: RolloutContext, prompt: Prompt, version: int, index: int) -> list[Rollout]:
    """The rollouts of one prompt, with the judge's scores if best@k needs them."""
    k, seed = ctx.config.evaluation.samples, EVALUATION_SEED + index
    rollouts = await rollout_prompt(ctx, prompt, k, f"e{version}.{index}", seed, step=None)
    if ctx.config.evaluation.best_at and "judge" in ctx.config.tasks[prompt.task].verifier.kinds:
        judge = ctx.rewards[prompt.task].judge
        with ctx.deadline.verification():
            scores = await asyncio.gather(*(judge(prompt, r.text) for r in rollouts))
        return [replace(r, scores={"judge": s}) for r, s in zip(rollouts, scores, strict=True)]
    return rollouts


def score(config: Config, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """The numbers of one held-out set, from k rollouts of each prompt.

    `pass_rate_se` is the error from sampling k completions of these fixed prompts: the noise along one run's
    curve, by which a fit weighs its points. `prompts_se` includes the choice of prompts. `truncated` is the
    share of completions cut at the token limit."""
    correct = np.array([[r.outcome == "correct" for r in g] for g in groups], np.float64)  # (prompts, k)
    rollouts = [r for g in groups for r in g]
    (n, samples), p = correct.shape, correct.mean(1)
    numbers = {
        "pass_rate": correct.mean(),
        "pass_rate_se": sampling_error(correct),
        "prompts_se": p.std(ddof=1) / n**0.5 if n > 1 else float("nan"),
        "truncated": np.mean([r.truncated for r in rollouts]),
        "mean_tokens": np.mean([len(r.token_ids) for r in rollouts]),
    }
    wanted, right = config.evaluation, correct > 0
    numbers |= {f"pass@{k}": np.mean([pass_at_k(c, k) for c in right]) for k in wanted.pass_at}
    verifier = find(config.tasks[prompts[0].task].verifier.kind)
    if verifier.votes and wanted.maj_at:
        votes = [[verifier.vote(r.text, p) for r in g] for p, g in zip(prompts, groups, strict=True)]
        numbers |= {f"maj@{k}": np.mean(list(map(maj_at_k, right, votes, [k] * n))) for k in wanted.maj_at}
    if all("judge" in r.scores for r in rollouts):
        ranks = [[r.scores["judge"] for r in g] for g in groups]
        numbers |= {f"best@{k}": np.mean(list(map(best_at_k, right, ranks, [k] * n))) for k in wanted.best_at}
    return {name: float(x) for name, x in numbers.items()} | {"prompts": n, "samples": samples}


def weighted_mean(scores: Sequence[dict[str, float]], weights: NDArray[np.float64]) -> dict[str, float]:
    """Σ w · score of the numbers that all tasks have; √Σ (w · se)² of errors, the sum of the prompts."""
    values = {k: np.array([s[k] for s in scores]) for k in scores[0] if all(k in s for s in scores)}
    errors = {k: float(np.linalg.norm(weights * v)) for k, v in values.items() if k.endswith("_se")}
    means = {k: float(weights @ v) for k, v in values.items()}
    return means | errors | {"prompts": sum(s["prompts"] for s in scores), "samples": scores[0]["samples"]}


def sampling_error(correct: NDArray[np.float64]) -> float:
    """Standard error of the mean of 0/1 outcomes (prompts, k) for fixed prompts.

    Var = Σ_i p_i (1 − p_i) / k / n²; p_i (1 − p_i) is estimated without bias from k ≥ 2 samples. With k = 1
    it cannot be separated from the spread between prompts, so the binomial bound is used. The minimum of half
    an outcome is for perfect scores, whose estimate would be 0.
    """
    n, k = correct.shape
    p = correct.mean(1)
    variance = p * (1 - p) * k / (k - 1) if k > 1 else np.full(n, correct.mean() * (1 - correct.mean()))
    return float(max((variance.sum() / k) ** 0.5 / n, 0.5 / (n * k)))


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """The share of the choices of k samples with a right one."""
    n, c = len(correct), sum(correct)
    return 1 - comb(n - c, k) / comb(n, k)


def maj_at_k(correct: Sequence[bool], answers: Sequence[Hashable | None], k: int) -> float:
    """The mean over runs of k samples of the share of right ones among those with the most frequent answer.

    A sample whose answer is None does not vote; where none votes, the run is wrong."""
    runs = [slice(start, start + k) for start in range(0, len(correct) - k + 1, k)]
    return fmean(_majority(correct[run], answers[run]) for run in runs)


def _majority(correct: Sequence[bool], answers: Sequence[Hashable | None]) -> float:
    elected = multimode(answer for answer in answers if answer is not None)  # several, if tied: of equal size
    won = [right for right, answer in zip(correct, answers, strict=True) if answer in elected]
    return fmean(won) if won else 0.0


def best_at_k(correct: Sequence[bool], scores: Sequence[float], k: int) -> float:
    """The share of the choices of k samples whose highest score has a right one.

    The i-th best of n, from 0, is the best of k in C(n − 1 − i, k − 1) of the C(n, k) choices."""
    n = len(correct)
    tied = {s: [c for c, other in zip(correct, scores, strict=True) if other == s] for s in set(scores)}
    ranked = [fmean(tied[s]) for s in sorted(scores, reverse=True)]
    return sum(comb(n - 1 - i, k - 1) * right for i, right in enumerate(ranked)) / comb(n, k)
