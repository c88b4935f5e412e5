"""Promises of dynamic sampling: full batches, the lag bound, its limit, no group lost, a history of all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import (
    Events,
    FakeEngine,
    FakeLearner,
    FakeRewards,
    configured,
    having,
    journal,
    lags,
    train,
    train_and_stop,
    versions,
)

from trainer.config import Config
from trainer.controller.rewards import Scored
from trainer.types import Prompt

EQUAL = {f"id{i:04d}" for i in (0, 1, 3, 6, 7, 8, 12, 13, 19)}  # of 20 prompts: all their answers are right


@pytest.fixture(autouse=True)
def rewards(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Answers of odd length are right, and all answers to the prompts of this set."""
    equal = set(EQUAL)

    async def score(self: Any, prompt: Prompt, text: str, tokens: int, step: int | None) -> Scored:
        right = prompt.prompt_id in equal or tokens % 2 == 1
        return Scored(1.0 if right else -1.0, "correct" if right else "wrong", {})

    monkeypatch.setattr(FakeRewards, "score", score)
    return equal


def one_odd(request: Any, index: int) -> int:
    return 5 + index


def resampling(tmp_path: Path, k: int, limit: int = 10, kind: str = "resample", **pipeline: Any) -> Config:
    config = configured(tmp_path, k, no_positive_resampling=False, **pipeline)
    return having(config, objective={"zero_variance": kind, "resample_limit": limit})


def check_journal(config: Config, steps: int) -> list[dict[str, Any]]:
    """Every group is in one batch, or set aside there, in order; returns the records of the steps."""
    by_id = {r["issued"]: r["prompt_id"] for r in journal(config, "issued")}
    trained = journal(config, "trained")
    assert [r["trained"] for r in trained] == list(range(1, steps + 1))
    expected = 0
    for record in trained:
        assert record["first"] == expected
        expected = record["last"] + 1
        ids = range(record["first"], expected)
        resampled = config.objective.zero_variance == "resample"
        aside = [i for i in ids if resampled and by_id[i] in EQUAL]
        assert record.get("aside", []) == aside and len(ids) - len(aside) == config.pipeline.prompts_per_step
    return trained


@pytest.mark.axis("pipeline.scheme", "pipeline_rl")
@pytest.mark.axis("objective.zero_variance", "resample")
@pytest.mark.parametrize("kind", ["keep", "resample"])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("slow", ["engine", "learner", "pushes"])
def test_batches_are_full_and_the_lag_bound_holds(tmp_path: Path, k: int, slow: str, kind: str) -> None:
    rng = np.random.default_rng(k)
    engine = FakeEngine(
        lambda r, i: 2 * int(rng.integers(0, 10)) + 1 + i,
        tick=0.001 if slow == "engine" else 0.0002,
        load_s=0.03 if slow == "pushes" else 0.0,
    )
    learner, events = FakeLearner(0.03 if slow == "learner" else 0.001), Events()
    config = resampling(tmp_path, k, kind=kind, steps=8)
    run = train(config, engine, learner, events)
    assert [len(b.sequences) for b in learner.batches] == [8] * 8  # four prompts with two completions
    for batch_lags in lags(learner):
        assert batch_lags.min() >= 0 and batch_lags.max() <= k
    assert engine.most_running <= (k + 1) * 4 + 3  # the slots, and three evaluation prompts
    trained = check_journal(config, 8)
    generated = trained[-1]["last"] + 1
    steps = {r["issued"]: r["step"] for r in journal(config, "issued")}
    # The first step that can train on a group is at most the lag from the one that does.
    for record in trained:
        ids = range(record["first"], record["last"] + 1)
        assert all(abs(record["trained"] - 1 - steps[i]) <= k for i in ids)
    resampled = [data["train/resampled"] for kind, data in events if kind == "step"]
    assert resampled == [len(r.get("aside", [])) for r in trained] and sum(resampled) == generated - 32
    assert (generated > 32 + 15) == (kind == "resample")
    assert sum(rollouts for _, rollouts in run.sampler._history.values()) == 2 * generated


def test_a_round_of_ppo_off_policy_is_filled_before_its_first_step(tmp_path: Path) -> None:
    config = resampling(tmp_path, 0, scheme="ppo_off_policy", minibatches=3)
    learner = FakeLearner(0.002)
    train(config, FakeEngine(one_odd), learner)
    assert versions(learner) == [{start} for start in (0, 3, 6, 9) for _ in range(3)]
    assert [len(b.sequences) for b in learner.batches] == [8] * 12
    trained = check_journal(config, 12)
    steps = {r["issued"]: r["step"] for r in journal(config, "issued")}
    assert all(steps[r["first"]] // 3 == steps[r["last"]] // 3 == (r["trained"] - 1) // 3 for r in trained)


@pytest.mark.parametrize("limit", [1, 3])
def test_at_its_limit_a_batch_is_trained_as_it_is_and_that_is_said_once(
    tmp_path: Path, limit: int, rewards: set[str]
) -> None:
    rewards.update(f"id{i:04d}" for i in range(20))
    rewards -= {"id0004", "id0011"}
    learner, events = FakeLearner(), Events()
    config = resampling(tmp_path, 1, limit, steps=6)
    train(config, FakeEngine(one_odd), learner, events)
    generated = [(r["last"] + 1 - r["first"], len(r.get("aside", []))) for r in journal(config, "trained")]
    assert max(n for n, _ in generated) == limit * 4 and [n - aside for n, aside in generated] == [4] * 6
    assert min(len(b.sequences) for b in learner.batches) in (0, 2)  # none of the groups kept, or one, learns
    (note,) = [d["text"] for kind, d in events if kind == "note"]
    assert f"{4 * limit - 4} groups without variance were replaced in a batch of 4" in note
    assert "objective.resample_limit" in note


@pytest.mark.parametrize("scheme", ["pipeline_rl", "ppo_off_policy"])
def test_a_resume_goes_on_with_the_next_group_and_the_history_of_all(tmp_path: Path, scheme: str) -> None:
    config = resampling(tmp_path, 2, scheme=scheme, minibatches=3)
    learner = FakeLearner(0.005)
    state = train_and_stop(config, learner, 5, engine=FakeEngine(one_odd))
    assert state["version"] == len(learner.batches) < 12
    run = train(config, FakeEngine(one_odd), learner, state=state)
    assert [len(b.sequences) for b in learner.batches] == [8] * 12
    assert max(batch_lags.max() for batch_lags in lags(learner)) <= 2
    trained = check_journal(config, 12)
    assert sum(n for _, n in run.sampler._history.values()) == 2 * (trained[-1]["last"] + 1)


def test_running_moments_have_each_group_of_a_round_once_and_go_on_after_a_resume(tmp_path: Path) -> None:
    def moments(folder: str, state: Any = None, *size: int, **scheme: Any) -> dict[str, Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        config = configured(tmp_path / folder, 0, *size, **scheme)
        config = having(config, objective={"advantage_norm": "running"})
        train(config, FakeEngine(one_odd), learner, state=state)
        equal = [r["prompt_id"] in EQUAL for r in journal(config, "issued")]
        return learner.saved[-1][1]["advantages"] | {"learning": equal.count(False)}

    learner = FakeLearner()
    # Two batches of two prompts with two completions.
    assert moments("round", None, 6, 2, scheme="ppo_off_policy", minibatches=2, epochs=3)["count"] == 8
    # Three steps of four prompts with two completions, whose advantages are 1 and −1, or 0 and 0.
    assert moments("resumed", None, 3)["count"] == 24
    after = moments("resumed", json.loads(json.dumps(learner.saved[-1][1])), 5)
    assert after["count"] == 40 and after["mean"] == pytest.approx(0, abs=1e-12)
    assert after["squares"] == pytest.approx(2 * after["learning"])
