"""Promises of the guards: what runs do not share is said, and seeds of one recipe share their reward."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import Command
from simulated import simulated, write

from trainer.config import ConfigError
from trainer.scaling import Sigmoid
from trainer.scaling.comparability import check_seeds, incomparable, warnings
from trainer.scaling.reading.read import Reading

RUN = simulated(Sigmoid(0.3, 0.6, 2, 2500), np.arange(500, 8001, 500.0), 0.005, 0)
READING = Reading(RUN, "'gpu_hours'", "'pass_rate'", "none", "pass_rate")


def test_alike_runs_have_no_warning() -> None:
    settings = {"model": "8B", "held-out set": "AIME-24"}
    known = replace(READING, settings=settings)
    assert warnings({"a": [READING], "b": [READING, READING]}) == []
    assert warnings({"a": [known], "b": [READING]}) == []  # what is not known is no difference


def test_each_difference_is_one_sentence_that_names_the_recipes() -> None:
    small, large = {"model": "3B", "samples per prompt": "1"}, {"model": "8B", "samples per prompt": "4"}
    one = replace(READING, reward_column="val-core/aime24", settings=small)
    unknown = replace(READING, curve=replace(RUN, R0=None))
    other = replace(unknown, reward_column="eval/aime25", settings=large)
    columns, model, samples, start = warnings({"a": [one], "b": [other]})
    assert "are of different columns: 'val-core/aime24' (a), 'eval/aime25' (b)." in columns
    assert model == "The runs differ in the model: '3B' (a), '8B' (b)."
    assert samples == "The runs differ in the samples per prompt: '1' (a), '4' (b)."
    assert start.endswith("measured (a), unknown (b).")


@pytest.mark.parametrize("key", ["held-out set", "scorer", "samples per prompt", "model"])
def test_rewards_of_another_metric_are_not_comparable(key: str) -> None:
    blocks = key in ("held-out set", "scorer")
    groups = {name: [replace(READING, settings={key: name})] for name in "ab"}
    assert bool(incomparable(groups, same_metric=False)) == blocks
    assert not incomparable(groups, same_metric=True)
    assert not incomparable({"a": groups["a"], "b": [READING]}, same_metric=False)  # not known


def test_steps_are_compared_with_a_warning() -> None:
    steps = replace(READING, curve=replace(RUN, unit="steps"))
    (warning,) = warnings({"a": [steps], "b": [steps]})
    assert warning == "Compute is in steps: comparable only if a step costs the same in all runs."
    assert warnings({"a": [steps]}) == []


OTHERS: list[dict[str, Any]] = [{"reward_column": "x"}, {"settings": {"held-out set": "AIME-25"}}]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_seeds_of_one_recipe_must_share_their_reward(change: dict[str, Any]) -> None:
    known = replace(READING, settings={"held-out set": "AIME-24"})
    check_seeds({"a": [known, known], "b": [replace(known, **change)]})
    with pytest.raises(ConfigError, match="a: its runs differ in the"):
        check_seeds({"a": [known, replace(known, **change)]})


@pytest.mark.slow
def test_the_commands_warn_first_and_refuse_unlike_seeds(command: Command) -> None:
    for name, A, seed in (("one", 0.6, 0), ("other", 0.6, 1), ("third", 0.5, 2)):
        run = simulated(Sigmoid(0.3, A, 2, 2500), np.arange(500, 8001, 500.0), 0.005, seed)
        write(Path(f"{name}.csv"), run)
    Path("other.csv").write_text(Path("other.csv").read_text().replace("pass_rate", "eval/pass_rate"))
    text = command("compare one.csv other.csv --json c.json")
    assert text.startswith("Note: The rewards are of different columns: 'pass_rate' (one)")
    assert "do not say which recipe is better" in text.words and text.json["incomparable"]
    assert "The ceilings differ" not in text and text.json["pairs"] == []
    assert not re.search(r"\d%$|ahead|probability of being best", text, re.M)
    assert re.search("\none +1 +0[.]", text)
    assert {s["best"] for row in text.json["budgets"] for s in row["standings"]} == {None}
    again = command("compare one.csv other.csv --same-metric")
    assert "of different columns" in again and "do not say" not in again and "is ahead" in again
    for more, shown in (("", False), ("--same-metric", True)):
        command(f"report one.csv other.csv --out r.html {more}")
        page = Path("r.html").read_text(encoding="utf-8")
        assert ("the best with a probability" in page) == ("one against other" in page) == shown
        assert ("do not say which recipe is better" in page) != shown
    assert "same points" in command("compare a=one.csv,other.csv b=one.csv", exit_code=2)
    unlike = command("compare a=one.csv,other.csv third.csv", exit_code=2)
    assert "a: its runs differ in the reward column" in unlike
