"""Promises of curricula: hand-worked shares, the order of difficulty, exact resume, clear errors, lengths."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, FakeLearner, configured, group, journal, train, train_and_stop
from test_sampler import issued

from trainer.config import Config, ConfigError, CurriculumConfig, PipelineConfig
from trainer.controller.curriculum import completion_limit, difficulties, open_count
from trainer.controller.mixture import Mixture
from trainer.controller.sampler import Sampler
from trainer.types import Prompt

NO_NPR = PipelineConfig(prompts_per_step=2, no_positive_resampling=False)
BY_LEVEL = CurriculumConfig(kind="linear", by="level", start=0.2, steps=4)


def leveled(n: int) -> list[Prompt]:
    """Prompts p0 to p9, the last one the easiest."""
    return [Prompt(f"p{i}", f"text {i}", (i,), "0", {"level": n - i}, place=f"d.jsonl:{i}") for i in range(n)]


def names(sampler: Sampler, n: int, step: int = 0) -> list[str]:
    return [issued(sampler, step).prompt.prompt_id for _ in range(n)]


@pytest.mark.axis("curriculum.kind", "none", "linear", "exponential")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [  # of 81, from a ninth = 9
        ("none", [81, 81, 81, 81, 81]),
        ("linear", [9, 27, 45, 81, 81]),  # + 72 / 4 a step
        ("exponential", [9, 16, 27, 81, 81]),  # 81 · 9^-(1 − t) = 9 · 9^t: 9 · 9^(1/4) = 15.6, 9 · 3
    ],
)
def test_what_is_open_grows_as_worked_by_hand(kind: Any, expected: list[int]) -> None:
    config = CurriculumConfig(kind=kind, steps=4, length_start=1 / 9)
    assert [open_count(config, 1 / 9, 81, step) for step in (0, 1, 2, 4, 100)] == expected
    assert [completion_limit(config, 81, step) for step in (0, 1, 2, 4, 100)] == expected
    assert completion_limit(config, 81, None) == 81  # evaluations have the full length
    assert completion_limit(replace(config, length_start=1.0), 81, 0) == 81
    assert open_count(replace(config, kind="linear"), 0.1, 30, 0) == 3  # and not 4: .1 · 30 > 3 in floats


def test_the_easiest_prompts_by_a_column_open_first() -> None:
    sampler = Sampler(leveled(10), NO_NPR, 0, BY_LEVEL)
    by_step = [names(sampler, 2, step) for step in range(30)]
    assert set(by_step[0]) == {"p8", "p9"}  # .2 of 10, and .2 more a step
    for step in (1, 2, 3):
        assert set(by_step[step]) <= {f"p{i}" for i in range(8 - 2 * step, 10)}
    assert {name for step in by_step[4:] for name in step} == {f"p{i}" for i in range(10)}


def test_solved_prompts_make_room_for_harder_ones() -> None:
    items = leveled(10)
    sampler = Sampler(items, PipelineConfig(prompts_per_step=100), 0, BY_LEVEL)
    for i in (9, 8):
        sampler.record(group(items[i], 8, 8))
    assert set(names(sampler, 6)) == {"p7", "p6"}  # .2 of the other eight, rounded up
    for item in items:
        sampler.record(group(item, 100, 100))
    assert sampler.next(0) is None


def test_the_measured_pass_rate_orders_prompts_and_unmeasured_ones_count_half() -> None:
    items = leveled(10)
    config = CurriculumConfig(kind="linear", by="pass_rate", start=0.4, steps=4)
    sampler = Sampler(items, replace(NO_NPR, prompts_per_step=100), 0, config)
    for i, correct in ((0, 1), (1, 9), (2, 4), (3, 6)):
        sampler.record(group(items[i], correct, 10))
    # .9, .6, six of .5 in the order of their ids, .4, .1
    assert set(names(sampler, 12)) == {"p1", "p3", "p4", "p5"}
    sampler.record(group(items[5], 0, 10))
    sampler.record(group(items[2], 10, 10))  # 14 of 20
    assert set(names(sampler, 12)) == {"p1", "p2", "p3", "p4"}


@pytest.mark.parametrize(("kind", "by"), [("none", "level"), ("linear", "level"), ("linear", "pass_rate")])
def test_a_restored_sampler_continues_like_an_uninterrupted_one(kind: Any, by: str) -> None:
    config = replace(BY_LEVEL, kind=kind, by=by, steps=12)
    pipeline = replace(NO_NPR, no_positive_resampling=kind == "none", npr_threshold=0.3)
    unbroken, broken = (Sampler(leveled(10), pipeline, 3, config) for _ in range(2))
    for i in range(9):
        for sampler in (unbroken, broken):
            sampler.record(group(issued(sampler, i // 2).prompt, i % 4, 8))
    resumed = Sampler(leveled(10)[::-1], pipeline, 3, config)
    resumed.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    for i in range(30):
        expected = issued(unbroken, (9 + i) // 2)
        assert issued(resumed, (9 + i) // 2) == expected
        for sampler in (unbroken, resumed):
            sampler.record(group(expected.prompt, i % 3, 8))


def test_a_row_without_a_number_is_named() -> None:
    rows: list[dict[str, Any]] = [{"level": 1}, {"other": 2}, {"level": "hard"}, {"level": True}]
    rows += [{"level": float("nan")}, {"level": None}, {"level": {"digits": 3}}]
    items = [Prompt(f"p{i}", f"text {i}", (i,), "", row, place=f"d.jsonl:{i}") for i, row in enumerate(rows)]
    with pytest.raises(ConfigError, match=r"by is 'level'; d.jsonl:1: no column 'level'; there are 'other'"):
        Sampler(items[:2], NO_NPR, 0, BY_LEVEL)
    for item, value in zip(items[2:6], ("'hard'", "True", "nan", "None"), strict=True):
        with pytest.raises(ConfigError, match=f"{item.place} has {value} there; expected a number"):
            difficulties([item], "level")
    assert difficulties(items[6:], "level.digits") == {"p6": 3.0}
    with pytest.raises(ConfigError, match=r"d.jsonl:6: no column"):
        difficulties(items[6:], "level.digits.more")
    Sampler(items, NO_NPR, 0, replace(BY_LEVEL, kind="none"))  # without a curriculum nobody asks


def test_completions_grow_longer_in_training_only(tmp_path: Path) -> None:
    config = configured(tmp_path, 0, steps=4)
    config = replace(config, curriculum=CurriculumConfig(kind="linear", steps=3, length_start=0.25))
    engine = FakeEngine()
    train(config, engine)
    limits = {r.request_id: r.max_tokens for r in engine.requests}
    assert [limits[f"g{4 * step}"] for step in range(4)] == [10, 20, 30, 40]
    assert limits["e0.0"] == limits["e4.2"] == 40


@pytest.mark.parametrize(("stop", "more"), [(1, [2, 2]), (3, [3, 3, 4, 4]), (6, [6, 6, 7, 7])])
def test_a_round_cut_short_keeps_its_groups_steps(tmp_path: Path, stop: int, more: list[int]) -> None:
    """Rounds of two batches of two prompts and three epochs. Stopped after step 1, the second batch (step 1,
    from 0) is issued again, in a round with one of step 2. Later, the next group begins the next round."""
    epochs = {"scheme": "ppo_off_policy", "minibatches": 2, "epochs": 3, "no_positive_resampling": False}
    config = configured(tmp_path, 0, 12, 2, **epochs)
    config = replace(config, curriculum=CurriculumConfig(kind="linear", steps=10, length_start=0.25))
    state = train_and_stop(config, FakeLearner(0.005), stop)
    assert state["version"] == stop
    engine = FakeEngine()
    train(config, engine, state=state)
    expected = dict(enumerate([0, 0, 1, 1, *more]))
    steps = {r["issued"]: r["step"] for r in journal(config, "issued")}
    assert {i: steps[i] for i in expected} == expected
    first_epochs = {r["trained"] for r in journal(config, "trained") if "first" in r}
    assert {r["step"] for r in journal(config, "learned")} == first_epochs
    for request in engine.requests:  # 10 of 40 tokens, and 3 more a step
        group_id = int(request.request_id[1:].split(".")[0])
        if request.request_id[0] == "g" and group_id in expected:
            assert request.max_tokens == min(40, 10 + 3 * steps[group_id])


def test_the_tasks_of_a_mixture_grow_by_the_steps_of_the_run() -> None:
    mixture = Mixture({"": Sampler(leveled(10), NO_NPR, 0, BY_LEVEL)}, Config(pipeline=NO_NPR), print)
    drawn = [one for step in (0, 0, 4) if (one := mixture.next(step))]
    assert [one.step for one in drawn] == [0, 0, 4]
    assert {one.prompt.prompt_id for one in drawn[:2]} == {"p8", "p9"}
