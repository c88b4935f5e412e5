"""Promises of the guards: what runs do not share is said, and seeds of one recipe share their reward."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated import assert_one_line_and_exit_code_2, simulated, write

from trainer.config import ConfigError
from trainer.scaling import Sigmoid
from trainer.scaling.__main__ import main
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
    other = replace(
        READING, reward_column="eval/aime25", settings={"model": "8B", "samples per prompt": "4"},
        curve=replace(RUN, R0=None),
    )  # fmt: skip
    one = replace(
        READING, reward_column="val-core/aime24", settings={"model": "3B", "samples per prompt": "1"}
    )
    columns, model, samples, start = warnings({"a": [one], "b": [other]})
    assert columns.startswith(
        "The rewards are of different columns: 'val-core/aime24' (a), 'eval/aime25' (b)."
    )
    assert model == "The runs differ in the model: '3B' (a), '8B' (b)."
    assert samples == "The runs differ in the samples per prompt: '1' (a), '4' (b)."
    assert start.endswith("measured (a), unknown (b).")


@pytest.mark.parametrize(
    ("key", "blocks"),
    [("held-out set", True), ("scorer", True), ("samples per prompt", False), ("model", False)],
)
def test_rewards_of_another_metric_are_not_comparable(key: str, blocks: bool) -> None:
    groups = {name: [replace(READING, settings={key: name})] for name in "ab"}
    assert bool(incomparable(groups, same_metric=False)) == blocks
    assert not incomparable(groups, same_metric=True)
    assert not incomparable({"a": groups["a"], "b": [READING]}, same_metric=False)  # not known


def test_steps_are_compared_with_a_warning() -> None:
    steps = replace(READING, curve=replace(RUN, unit="steps"))
    assert warnings({"a": [steps], "b": [steps]}) == [
        "Compute is in steps: comparable only if a step costs the same in all runs."
    ]
    assert warnings({"a": [steps]}) == []


@pytest.mark.parametrize(
    "change", [{"reward_column": "other"}, {"settings": {"held-out set": "AIME-25"}}], ids=str
)
def test_seeds_of_one_recipe_must_share_their_reward(change: dict[str, str]) -> None:
    known = replace(READING, settings={"held-out set": "AIME-24"})
    check_seeds({"a": [known, known], "b": [replace(known, **change)]})
    with pytest.raises(ConfigError, match="a: its runs differ in the"):
        check_seeds({"a": [known, replace(known, **change)]})


def test_the_command_warns_first_and_refuses_unlike_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("one.csv"), RUN)
    other = simulated(Sigmoid(0.3, 0.6, 2, 2500), np.arange(500, 8001, 500.0), 0.005, 1)
    write(Path("other.csv"), other)
    Path("other.csv").write_text(Path("other.csv").read_text().replace("pass_rate", "eval/pass_rate"))
    assert main(["compare", "one.csv", "other.csv", "--json", "c.json"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Note: The rewards are of different columns: 'pass_rate' (one)")
    content = json.loads(Path("c.json").read_text())
    assert "do not say which recipe is better" in " ".join(text.split()) and content["incomparable"]
    assert "The ceilings differ" not in text and content["pairs"] == []
    assert not re.search(r"\d%$|ahead|probability of being best", text, re.M)
    assert re.search("\none +1 +0[.]", text)
    assert {s["best"] for row in content["budgets"] for s in row["standings"]} == {None}
    assert main(["compare", "one.csv", "other.csv", "--same-metric"]) == 0
    again = capsys.readouterr().out
    assert "of different columns" in again and "do not say" not in again and "is ahead" in again
    for more, shown in (([], False), (["--same-metric"], True)):
        assert main(["report", "one.csv", "other.csv", "--out", "r.html", *more]) == 0
        page = Path("r.html").read_text(encoding="utf-8")
        assert ("the best with a probability" in page) == ("one against other" in page) == shown
        assert ("do not say which recipe is better" in page) != shown
    assert_one_line_and_exit_code_2(["compare", "a=one.csv,other.csv", "b=one.csv"], "same points", capsys)
    third = simulated(Sigmoid(0.3, 0.5, 2, 2500), np.arange(500, 8001, 500.0), 0.005, 2)
    write(Path("third.csv"), third)
    argv = ["compare", "a=one.csv,other.csv", "third.csv"]
    assert_one_line_and_exit_code_2(argv, "a: its runs differ in the reward column", capsys)
