"""The held-out scores: mean@k over the prompts of every held-out set, with its standard error.

Each task and each of `evaluation.sets` is scored on its own. The main score is that of the only task, or the
mean over the tasks of a mixture, weighted by their shares. Besides, what are k completions of a prompt worth,
estimated from n ≥ k samples of it?

    pass@k   one of the k is right: 1 − C(n − c, k) / C(n, k) with c right ones (arXiv 2107.03374)
    maj@k    the answer that most of the k have is right (arXiv 2203.11171)
    best@k   the one of the k that the judge scores highest is right

Beside the pass rate stands the mean reward, which training maximises, and the mean of each part of it.

All are unbiased: pass@k and best@k are means over every choice of k of the n samples, maj@k over the ⌊n/k⌋
disjoint runs of k. What is tied wins with equal probability.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from math import comb, inf
from statistics import fmean, multimode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import Config, SetConfig, TaskConfig
from trainer.controller.context import RolloutContext
from trainer.controller.data import Dataset
from trainer.controller.mixture import shares
from trainer.controller.rollout import rollout_prompt
from trainer.types import Prompt, Rollout
from trainer.verifiers.verifier import find

Report = Callable[[str, Prompt, list[Rollout]], None]
EVALUATION_SEED = 7_919  # of every evaluation, so that they differ by their weights only


async def evaluate(
    ctx: RolloutContext, dataset: Dataset, version: int, report: Report = lambda name, prompt, rollouts: None
) -> dict[str, Any]:
    """Score the engines' present weights on all held-out sets, as the event `eval` says it: the numbers of
    the main score, those of the others as `NAME/number`, and each prompt's. `report` gets each prompt's
    rollouts when they are there, and its set."""
    config, further, began = ctx.config, ctx.config.sets, time.monotonic()
    tasks = {name: tuple(p for p in dataset.held_out if p.task == name) for name in config.tasks}
    sets = tasks | dataset.sets
    named = [(name, prompt) for name, subset in sets.items() for prompt in subset]

    async def sample(index: int, name: str, prompt: Prompt) -> list[Rollout]:
        k = further[name].samples if name in further else config.evaluation.samples
        seed = EVALUATION_SEED + index
        rollouts = await rollout_prompt(ctx, prompt, k, f"e{version}.{index}", seed, step=None)
        report(name, prompt, rollouts)
        return rollouts

    rollouts = iter(await asyncio.gather(*(sample(i, *one) for i, one in enumerate(named))))
    groups = {name: [next(rollouts) for _ in subset] for name, subset in sets.items()}
    scores = {name: score(config, subset, groups[name]) for name, subset in sets.items()}
    worth = {name: by_prompt(config.scored[name], sets[name], groups[name]) for name in sets}
    weights = np.array(list(shares(config).values()))
    main = scores.pop("") if "" in scores else weighted_mean([scores[name] for name in tasks], weights)
    numbers = main | {f"{name}/{k}": v for name, one in scores.items() for k, v in one.items()}
    return {"step": version, "seconds": time.monotonic() - began, "by_prompt": worth} | numbers


def score(config: Config, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """The numbers of one held-out set, from k rollouts of each prompt.

    `pass_rate_se`, as every `_se` but `prompts_se`, is the error from sampling k completions of these fixed
    prompts: the noise along one run's curve, by which a fit weighs its points. `prompts_se` includes the
    choice of prompts. `truncated` is the share of completions cut at the token limit."""
    correct = np.array([[r.outcome == "correct" for r in g] for g in groups], np.float64)  # (prompts, k)
    rollouts = [r for g in groups for r in g]
    (n, samples), p = correct.shape, correct.mean(1)
    task = config.scored[prompts[0].task]
    means = {"mean_reward": [_filled([r.reward if r.scored else None for r in g]) for g in groups]}
    for name in sorted({name for r in rollouts for name in r.scores} - {task.verifier.kind}):
        means[f"reward/{name}"] = [[r.scores.get(name, 0.0) for r in g] for g in groups]
    numbers = {
        "pass_rate": correct.mean(),
        "pass_rate_se": sampling_error(correct),
        "prompts_se": p.std(ddof=1) / n**0.5 if n > 1 else float("nan"),
        "truncated": np.mean([r.truncated for r in rollouts]),
        "mean_tokens": np.mean([len(r.token_ids) for r in rollouts]),
    }
    for name, rows in means.items():
        numbers |= {name: np.mean(rows), f"{name}_se": sampling_error(np.array(rows, np.float64))}
    if task.environment.kind:
        numbers["unscored"] = np.mean([not r.scored for r in rollouts])
    evaluation = config.evaluation
    wanted = {"pass": evaluation.pass_at, "maj": evaluation.maj_at, "best": evaluation.best_at}
    for name, worth in at_k(task, prompts, groups).items():
        numbers |= {f"{name}@{k}": np.mean(worth(k)) for k in wanted[name] if k <= samples}
    return {name: float(x) for name, x in numbers.items()} | {"prompts": n, "samples": samples}


def _filled(rewards: Sequence[float | None]) -> list[float]:
    """The rewards, with their mean in the place of those that there are not; 0 of none."""
    known = [r for r in rewards if r is not None]
    return [fmean(known or [0.0]) if r is None else r for r in rewards]


def at_k(
    task: TaskConfig | SetConfig, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]
) -> dict[str, Callable[[int], list[float]]]:
    """The worth of k completions of each prompt as functions of k: pass, and if they exist maj and best."""
    verifier, right = find(task.verifier.kind), [[r.outcome == "correct" for r in g] for g in groups]
    worth = {"pass": lambda k: [pass_at_k(c, k) for c in right]}
    if verifier.votes and not task.environment.kind:
        votes = [[verifier.vote(r.text, p) for r in g] for p, g in zip(prompts, groups, strict=True)]
        worth["maj"] = lambda k: list(map(maj_at_k, right, votes, repeat(k)))
    if "judge" in task.verifier.kinds:
        ranks = [[r.scores.get("judge", -inf) for r in g] for g in groups]
        worth["best"] = lambda k: list(map(best_at_k, right, ranks, repeat(k)))
    return worth


def by_prompt(
    task: TaskConfig | SetConfig, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]
) -> dict[str, dict[int, list[float]]]:
    """The worth of 1, 2, 4, … completions of each prompt, by measure and k."""
    ks = [1 << i for i in range(len(groups[0]).bit_length())]
    worth = at_k(task, prompts, groups)
    return {m: {k: [round(x, 4) for x in of_k(k)] for k in ks} for m, of_k in worth.items()}


def weighted_mean(scores: Sequence[dict[str, float]], weights: NDArray[np.float64]) -> dict[str, float]:
    """Σ w · score of the numbers that all tasks have; √Σ (w · se)² of errors, the sum of the prompts."""
    values = {k: np.array([s[k] for s in scores]) for k in scores[0] if all(k in s for s in scores)}
    errors = {k: float(np.linalg.norm(weights * v)) for k, v in values.items() if k.endswith("_se")}
    means = {k: float(weights @ v) for k, v in values.items()}
    return means | errors | {"prompts": sum(s["prompts"] for s in scores), "samples": scores[0]["samples"]}


def sampling_error(values: NDArray[np.float64]) -> float:
    """Standard error of the mean of outcomes, 0 or 1, or of rewards (prompts, k) for fixed prompts.

    Var = Σ_i s_i² / k / n²; s_i² is estimated without bias from k ≥ 2 samples of prompt i. With k = 1 it
    cannot be separated from the spread between prompts, so the variance of all is used, which is greater. The
    minimum of half an outcome is for perfect scores, whose estimate would be 0.
    """
    n, k = values.shape
    variance = values.var(1, ddof=1) if k > 1 else np.full(n, values.var())
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
