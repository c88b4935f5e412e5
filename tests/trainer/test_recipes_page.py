"""The promise of docs/recipes.md: its tables say what the files say."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer import cli
from trainer.config import Config, KLConfig
from trainer.config.layers import RECIPES, read_layers

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def number(value: float) -> str:
    return f"{value:g}".removeprefix("0") if 0 < value < 1 else f"{value:g}"


def bound(config: Config) -> str:
    """What limits the ratio, and what it is taken to."""
    objective = config.objective
    if objective.loss in ("reinforce", "sft", "cispo"):
        return "no ratio" if objective.loss != "cispo" else f"ρ ≤ {number(objective.max_ratio)}"
    assert objective.clip_low is not None and objective.clip_high is not None, "a recipe states its clip"
    mask = f", mask {number(objective.mask_low)} to {number(objective.mask_high)}"
    clip = f"{number(objective.clip_low)} / {number(objective.clip_high)}"
    return clip + mask * (objective.loss == "icepop")


def scheme(config: Config) -> str:
    pipeline = config.pipeline
    if not pipeline.off_policy:
        return f"PipelineRL-{pipeline.max_lag}" if pipeline.max_lag else "on-policy"
    epochs = f", {pipeline.epochs} epochs" if pipeline.epochs > 1 else ""
    return f"PPO-off-policy-{pipeline.minibatches}{epochs}"


def kl_place(kl: KLConfig) -> str:
    names = {"as_advantage": "place of the advantage", "in_advantage": "the advantage"}
    model = {"initial": "", "generator": " to the generator"}.get(kl.to, f" to {kl.to}")
    return f"in {names.get(kl.place, f'the {kl.place}')}{model}"


def extras(config: Config) -> str:
    """What the columns before do not say."""
    objective = config.objective
    present = {
        "interruption": config.engine.interruption.enabled,
        "NPR": config.pipeline.no_positive_resampling,
        "length penalty": config.verifier.length_penalty.cache_tokens,
        f"KL {number(objective.kl.coefficient)} {kl_place(objective.kl)}": objective.kl.coefficient,
        f"entropy {number(objective.entropy_bonus)}": objective.entropy_bonus,
        f"{objective.critic.body} critic": objective.critic.body != "none",
        f"{config.learner.schedule} lr": config.learner.schedule != "constant",
        f"{config.curriculum.kind} curriculum": config.curriculum.kind != "none",
    }
    return ", ".join(text for text, shown in present.items() if shown)


def recipe_row(name: str) -> str:
    config = cli.parse(["--recipe", name]).config
    objective, pipeline = config.objective, config.pipeline
    cells = (
        f"`{name}`", objective.loss, bound(config), objective.anchor, objective.aggregation,
        objective.advantage_norm, objective.zero_variance, scheme(config),
        f"{pipeline.prompts_per_step} x {pipeline.completions_per_prompt}",
        config.model.fp32_head, extras(config) or "–",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def task_row(name: str) -> str:
    config = cli.parse(["--recipe", "grpo", "--task", name]).config
    keys = {key for layer in read_layers("task", name) for key in layer.values}
    batch = f"{config.pipeline.prompts_per_step} x {config.pipeline.completions_per_prompt}"
    tasks = config.tasks.values()
    cells = (
        f"`{name}`",
        config.model.path if "model.path" in keys else "yours",
        " + ".join(t.data.source for t in tasks) if keys & {"data.source", "mixture"} else "yours",
        " + ".join("environment" if t.environment.kind else t.verifier.kind for t in tasks)
        if keys & {"verifier.kind", "environment.kind", "mixture"}
        else "yours",
        f"{config.engine.max_new_tokens:,}" if "engine.max_new_tokens" in keys else "yours",
        batch if "pipeline.prompts_per_step" in keys else "the recipe's",
        number(config.learner.lr) if "learner.lr" in keys else "the recipe's",
    )
    return f"| {' | '.join(cell or 'yours' for cell in cells)} |"


@pytest.mark.parametrize(("folder", "row"), [(RECIPES, recipe_row), (RECIPES / "tasks", task_row)])
def test_the_tables_say_what_the_files_say(folder: Path, row: Callable[[str], str]) -> None:
    rows = [row(path.stem) for path in sorted(folder.glob("*.yaml"))]
    missing = [line for line in rows if line not in PAGE.read_text().splitlines()]
    assert not missing, "docs/recipes.md lacks these lines:\n" + "\n".join(missing)


def test_the_page_has_no_line_for_a_file_that_is_gone() -> None:
    tables = PAGE.read_text().partition("## Recipes")[2]
    names = [line.split("`")[1] for line in tables.splitlines() if line.startswith("| `")]
    assert sorted(names) == sorted(path.stem for path in RECIPES.rglob("*.yaml"))
