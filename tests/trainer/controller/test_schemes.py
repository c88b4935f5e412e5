"""Promises of PPO-off-policy-k: versions and lag of every batch, what engines hold when, epochs, resume."""

from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, FakeLearner, configured, having, journal, train, train_and_stop, versions

from trainer.config import Config, EvaluationConfig, KLConfig, PipelineConfig
from trainer.controller.rounds import Minibatch, deal
from trainer.types import TokenScores


def off_policy(tmp_path: Path, k: int, steps: int, evaluate_every: int = 100, **more: Any) -> Config:
    """Two prompts a step and two completions a prompt; no evaluation but the first and the last."""
    scheme = {"scheme": "ppo_off_policy", "minibatches": k, "no_positive_resampling": False}
    return having(configured(tmp_path, 0, steps, 2, **scheme, **more), evaluation={"every": evaluate_every})


@pytest.mark.axis("pipeline.scheme", "ppo_off_policy")
@pytest.mark.axis("pipeline.epochs", 2)
@pytest.mark.parametrize(
    ("k", "epochs", "steps", "expected"),
    [
        (1, 1, 3, [0, 1, 2]),  # strictly on-policy
        (2, 1, 5, [0, 0, 2, 2, 4]),  # the last round has one batch
        (3, 1, 6, [0, 0, 0, 3, 3, 3]),
        (2, 2, 7, [0, 0, 0, 0, 4, 4, 4]),  # lag up to 3; the last round ends in its second epoch
    ],
)
def test_every_batch_of_a_round_is_of_the_rounds_first_version(
    tmp_path: Path, k: int, epochs: int, steps: int, expected: list[int]
) -> None:
    engine, learner = FakeEngine(lambda r, i: 9), FakeLearner(0.002)
    config = off_policy(tmp_path, k, steps, epochs=epochs)
    train(config, engine, learner)
    assert versions(learner) == [{v} for v in expected]
    assert config.pipeline.lag_bound == k * epochs - 1
    lag = max(b.step - 1 - v for b, v in zip(learner.batches, expected, strict=True))
    assert lag == min(k * epochs, steps) - 1
    assert engine.held == [0, *sorted({*expected, steps} - {0})]  # no version in between reached the engines
    assert [b.publish for b in learner.batches] == [b.step in engine.held for b in learner.batches]
    if epochs == 1:  # also a shortened last round generates only what its steps train on
        steps_of = [(r["trained"], r["first"], r["last"]) for r in journal(config, "trained")]
        assert steps_of == [(i + 1, 2 * i, 2 * i + 1) for i in range(steps)]
        assert len(journal(config, "issued")) == len(journal(config, "finished")) == 2 * steps


def test_each_epoch_has_every_group_once_dealt_anew_and_the_history_counts_it_once(tmp_path: Path) -> None:
    config = off_policy(tmp_path, 4, 12, epochs=3)
    run = train(config)
    first, *later = (journal(config, "trained")[i : i + 4] for i in (0, 4, 8))
    assert [(r["first"], r["last"]) for r in first] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    orders = [[i for r in epoch for i in r["groups"]] for epoch in later]
    assert [sorted(order) for order in orders] == [list(range(8))] * 2
    assert list(range(8)) != orders[0] != orders[1]
    assert sum(rollouts for _, rollouts in run.sampler._history.values()) == 8 * 2


def test_dealing_depends_on_the_seed_alone() -> None:
    groups: list[Any] = [object() for _ in range(6)]
    round_ = [Minibatch((groups[i], groups[i + 1])) for i in (0, 2, 4)]
    dealt = [[m.groups for m in deal(round_, 2, seed)] for seed in ((1, 0), (1, 0), (1, 3))]
    assert dealt[0] == dealt[1] != dealt[2] and dealt[0][:3] == [m.groups for m in round_]
    assert list(deal([], 3, (0,))) == []


def test_the_data_of_a_round_are_scored_once_by_the_policy_that_generated_them(tmp_path: Path) -> None:
    asked: list[tuple[int, bool]] = []

    class Scoring(FakeLearner):
        async def score(self, sequences: Any, logprobs: bool) -> Any:
            asked.append((len(sequences), logprobs))
            name = len(self.batches)  # the version, and the prompt's last token
            return [TokenScores(s.token_ids * 0.0 + 100 * name + s.prompt_ids[-1]) for s in sequences]

    learner, config = Scoring(), off_policy(tmp_path, 2, 7, epochs=2)
    config = having(config, objective={"anchor": "recomputed"})
    train(config, FakeEngine(), learner)
    assert asked == [(8, True)] * 2  # two batches of two prompts with two completions
    asked.clear()
    with_kl = {"anchor": "generator", "kl": KLConfig(coefficient=0.1)}
    train(having(config, objective=with_kl), FakeEngine(), Scoring())
    assert asked == [(8, False)] * 2  # of the policy nothing is needed
    for batch, start in zip(learner.batches, [0] * 4 + [4] * 3, strict=True):
        for s in batch.sequences:
            assert s.logprobs_old is not None
            assert set(s.logprobs_old.tolist()) == {100 * start + float(s.prompt_ids[-1])}


@pytest.mark.parametrize("weight_push", ["file", "nccl"])
def test_an_evaluation_in_mid_round_sees_its_version_alone(tmp_path: Path, weight_push: str) -> None:
    config = having(off_policy(tmp_path, 4, 8, evaluate_every=3), engine={"weight_push": weight_push})
    engine, learner = FakeEngine(lambda r, i: 9), FakeLearner(0.002)
    train(config, engine, learner)
    assert engine.held == [0, 3, 4, 6, 8]
    assert [engine.versions[name] for name in ("e0", "e3", "e6", "e8")] == [{0}, {3}, {6}, {8}]
    assert versions(learner) == [{0}] * 4 + [{4}] * 4


def test_colocated_engines_sleep_through_a_round(tmp_path: Path) -> None:
    log: list[str] = []
    config = having(off_policy(tmp_path, 3, 6), engine={"weight_push": "ipc", "colocate": True})
    train(config, FakeEngine(log=log), FakeLearner(log=log))
    steps = [entry for entry in log if entry in ("pause", "resume") or entry.startswith("step")]
    rounds = [["pause", *(f"step {s}" for s in round_), "resume"] for round_ in ((1, 2, 3), (4, 5, 6))]
    # The first pair is the push of version 0, the last one that of the checkpoint.
    assert steps == ["pause", "resume", *rounds[0], *rounds[1], "pause", "resume"]
    assert [entry for entry in log if entry.startswith("label")] == ["label 0", "label 3", "label 6"]


@pytest.mark.parametrize(("epochs", "stop_after"), [(1, 2), (1, 4), (2, 2), (2, 6)])
def test_a_resume_in_mid_round_trains_every_prompt_once_an_epoch_with_groups_of_its_own_version(
    tmp_path: Path, epochs: int, stop_after: int
) -> None:
    config = off_policy(tmp_path, 4, 12, epochs=epochs)
    learner = FakeLearner(0.003)
    state = train_and_stop(config, learner, stop_after)
    made = len(learner.batches)
    assert stop_after <= state["version"] == made < 12
    rounds, steps = divmod(made, 4 * epochs)
    assert state["group_id"] == rounds * 8 + min(steps, 4) * 2  # whether or not all epochs came
    run = train(config, FakeEngine(lambda r, i: 7), learner, state=state)
    assert [b.step for b in learner.batches] == list(range(1, 13))
    starts = range(made, 12, 4 * epochs)
    expected = [{start} for start in starts for _ in range(min(4 * epochs, 12 - start))]
    assert versions(learner)[made:] == expected  # the rest of the round that was cut short is dropped
    first = [(r["first"], r["last"]) for r in journal(config, "trained") if "first" in r]
    assert [i for i, _ in first] == list(range(0, 2 * len(first), 2))  # none lost, none twice
    assert sum(rollouts for _, rollouts in run.sampler._history.values()) == 2 * 2 * len(first)


@pytest.mark.parametrize(
    ("pipeline", "every", "files"),
    [
        (PipelineConfig(max_lag=8), 10, 11),  # eight more than held, kept and being written
        (PipelineConfig(scheme="ppo_off_policy", minibatches=1), 10, 3),
        (PipelineConfig(scheme="ppo_off_policy", minibatches=8), 10, 4),  # an evaluation in a round, at most
        (PipelineConfig(scheme="ppo_off_policy", minibatches=4, epochs=2), 2, 7),  # of 1 to 8: 2, 4, 6, 8
    ],
)
def test_only_versions_for_the_engines_are_files(pipeline: PipelineConfig, every: int, files: int) -> None:
    assert Config(pipeline=pipeline, evaluation=EvaluationConfig(every=every)).weight_files == files
