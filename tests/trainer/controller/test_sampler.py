"""Promises of the sampler: epochs without gaps, no-positive-resampling, exact resume."""

import json

import pytest
from fakes import group

from trainer.config import PipelineConfig
from trainer.controller.sampler import IssuedPrompt, Sampler
from trainer.types import Prompt


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"text {i}", (i,), "0", {}) for i in range(n)]


def issued(sampler: Sampler, step: int = 0) -> IssuedPrompt:
    one = sampler.next(step)
    assert one is not None
    return one


def test_every_epoch_has_each_prompt_once_and_epochs_differ() -> None:
    sampler = Sampler(prompts(7), PipelineConfig(), seed=3)
    epochs = [[issued(sampler) for _ in range(7)] for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(i.prompt.prompt_id for i in epoch) == [f"p{i}" for i in range(7)]
        assert {i.epoch for i in epoch} == {number}
    assert [i.group_id for epoch in epochs for i in epoch] == list(range(21))
    orders = [[i.prompt.prompt_id for i in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.axis("pipeline.no_positive_resampling", True)
def test_a_prompt_solved_over_its_whole_history_is_never_issued_again() -> None:
    items = prompts(4)
    sampler = Sampler(items, PipelineConfig(npr_threshold=0.9), seed=0)
    for _ in range(4):
        sampler.next(0)
    sampler.record(group(items[2], 9, 10))  # .9 reaches the threshold
    sampler.record(group(items[1], 8, 10))  # .8 does not
    seen = {issued(sampler).prompt.prompt_id for _ in range(9)}
    assert seen == {"p0", "p1", "p3"}
    sampler.record(group(items[1], 10, 10))  # 18 of 20: now solved
    assert sampler.solved("p1") and sampler.solved_share == 0.5
    assert {issued(sampler).prompt.prompt_id for _ in range(8)} <= {"p0", "p3"}


def test_only_the_latest_epochs_of_the_history_count() -> None:
    items = prompts(2)
    sampler = Sampler(items, PipelineConfig(npr_history=2), seed=0)
    for correct in (0, 4, 10):
        sampler.record(group(items[0], correct, 10))
    assert not sampler.solved("p0")  # 14 of 20
    resumed = Sampler(items, PipelineConfig(npr_history=2), seed=0)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    for one in (sampler, resumed):
        one.record(group(items[0], 8, 10))
        assert one.solved("p0")  # 18 of 20, but 22 of 40 in all
    everything = Sampler(items, PipelineConfig(), seed=0)
    everything.load_state_dict({**sampler.state_dict(), "history": {"p0": [18, 20]}})  # as always written
    everything.record(group(items[0], 8, 20))
    assert not everything.solved("p0") and everything.state_dict()["history"] == {"p0": [26, 40]}


@pytest.mark.axis("pipeline.no_positive_resampling", False)
def test_the_switch_turns_no_positive_resampling_off() -> None:
    items = prompts(2)
    sampler = Sampler(items, PipelineConfig(no_positive_resampling=False), seed=0)
    sampler.record(group(items[0], 8, 8))
    assert {issued(sampler).prompt.prompt_id for _ in range(4)} == {"p0", "p1"}


def test_no_prompt_comes_once_all_are_solved_and_the_reason_is_given() -> None:
    items = prompts(2)
    sampler = Sampler(items, PipelineConfig(), seed=0)
    for item in items:
        sampler.record(group(item, 8, 8))
    assert sampler.next(0) is None
    assert "all 2 training prompts" in sampler.exhausted
    assert "no_positive_resampling false" in sampler.exhausted
