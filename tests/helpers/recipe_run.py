"""A recipe on a task of seconds, on either engine, and what its run must show."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import environment, fork_roles, make_data, make_model, metrics

from trainer.launcher import placement
from trainer.main import main

Steps = list[dict[str, Any]]  # the metrics of each step
SHOWS: dict[str, Callable[[Steps], bool]] = {  # what an engine does otherwise than for other recipes
    "scalerl": lambda steps: all(s["train/interrupted"] > 0 and s["train/length_max"] > 6 for s in steps),
    "scalerl-bf16-head": lambda steps: 0 < abs(steps[0]["ratio/max"] - 1) < 0.1,
    "scalerl-ppo-off-8": lambda steps: [s["lag/histogram"].keys() for s in steps] == [{"0"}, {"1"}],
    "scalerl-length-penalty": lambda steps: all(s["train/interrupted"] == 0 for s in steps),
    "reinforce": lambda steps: all(s["lag/max"] == 0 for s in steps),
    "dapo-original": lambda steps: (
        sum(s["train/resampled"] for s in steps) > 0 and all(s["train/effective_prompts"] == 4 for s in steps)
    ),
    "ppo": lambda steps: [s["lag/max"] for s in steps] == [0, 1],
    "article": lambda steps: steps[0]["train/length_max"] <= 6,
}
MORE = {  # a length penalty, or larger groups, would leave none of them without variance
    # The teacher is at first the policy itself, which teaches nothing.
    "distill": ("--objective.kl.to=initial", "--objective.kl.place=in_advantage"),
    "dapo-original": ("--verifier.length_penalty.cache_tokens=0", "--pipeline.completions_per_prompt=2"),
}


def make_task(folder: Path, engine: str, patch: pytest.MonkeyPatch) -> Path:
    """A task file: sums of digits, 12 tokens a completion at most, two steps of 4 x 4. Roles are forked."""
    fork_roles(folder, patch)
    patch.setattr(placement, "cpu_has_bfloat16", lambda: True)  # slow on other CPUs, and refused there
    environment(folder)  # writes the reward's module
    interruption = {"lo": 4, "hi": 6, "phrase": "=", "end_marker": "", "answer_tokens": 3}
    contents = {
        "model": {"path": str(make_model(folder / "model"))},
        "data": {"source": str(make_data(folder)), "held_out": 8},
        "verifier": {"kind": "tests_reward:first_digit_even", "length_penalty": {"max_tokens": 12}},
        "engine": {"kind": engine, "slots": 16, "max_new_tokens": 12, "interruption": interruption},
        "learner": {"lr": 1e-3, "warmup_steps": 1},
        "pipeline": {"steps": 2, "prompts_per_step": 4, "completions_per_prompt": 4, "deadline_s": 250},
        "curriculum": {"steps": 2},
        "evaluation": {"every": 2, "samples": 2},
        "logging": {"checkpoint_every": 0, "tensorboard": False},
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(contents))
    return path


def check_two_steps(recipe: str, task: Path, run_dir: Path, *more: str) -> None:
    """Train, and check that both steps changed the weights, were evaluated, and show what is the recipe's."""
    argv = ["--recipe", recipe, "--task", str(task), "--run-dir", str(run_dir), *MORE.get(recipe, ()), *more]
    assert main(argv) == 0
    steps = metrics(run_dir, "learner/loss")
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["learner/loss"]) for row in steps)
    assert all(row["learner/grad_norm"] > 0 and row["learner/lr"] > 0 for row in steps)
    assert [row["step"] for row in metrics(run_dir, "eval/pass_rate")] == [0, 2]
    assert recipe not in SHOWS or SHOWS[recipe](steps), steps
