"""The simulated pipeline, against cases worked by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bench.pipeline.simulate import Outcome, Rates, Scheme, Workload, simulate
from trainer.launcher.placement import Split

# 2 prompts × 2 completions of 10 tokens: 40 tokens a step
WORK = Workload(prompts=2, prompt_tokens=0.0, lengths=np.full((1, 2), 10))
# 0.1 s a decoding step: 1 s for a batch, and 0.05 s a token in training: 2 s for a step on one device
RATES = Rates(decode_step_s=0.1, decode_token_s=0.0, slots=1000, train_token_s=0.05)
ONE = Split(1, 1)
SCHEMES = [Scheme("pipeline", k) for k in (0, 1, 4)] + [Scheme("ppo", k) for k in (1, 2, 4)]


def rates(**changes: Any) -> Rates:
    return Rates(**{n: getattr(RATES, n) for n in Rates.__dataclass_fields__} | changes)


def spread(completions: int = 4, prompts: int = 8, seed: int = 0) -> Workload:
    """Unequal lengths, of 1 to 60 tokens."""
    lengths = np.random.default_rng(seed).integers(1, 61, (500, completions))
    return Workload(prompts=prompts, prompt_tokens=5.0, lengths=lengths)


def test_on_policy_alternates_generation_and_training() -> None:
    found = simulate(WORK, RATES, ONE, Scheme("pipeline", 0))
    assert found.steps_per_hour == pytest.approx(3600 / 3)  # 1 s + 2 s
    assert found.learner_idle == pytest.approx(1 / 3) and found.engine_idle == pytest.approx(2 / 3)
    assert found.lag == {0: 1.0} and found.tokens_per_s == pytest.approx(40 / 3)


def test_every_stage_of_an_on_policy_step_adds_up() -> None:
    stages = {
        "push_s": 0.25,
        "step_s": 0.5,
        "verify_s": 0.125,
        "build_s": 0.0625,
        "report_s": 1.0,
        "issue_s": 2.0,
    }
    work = Workload(prompts=2, prompt_tokens=3.0, lengths=np.full((1, 2), 10), trained_share=0.5)
    found = simulate(work, rates(**stages, prefill_token_s=0.1), ONE, Scheme("pipeline", 0))
    prefill, generate, train = 2 * 3 * 0.1, 1.0, 0.5 * (40 + 2 * 3) * 0.05
    assert 3600 / found.steps_per_hour == pytest.approx(prefill + generate + train + sum(stages.values()))


def test_one_step_of_lag_hides_the_shorter_side() -> None:
    found = simulate(WORK, RATES, ONE, Scheme("pipeline", 1))
    assert found.steps_per_hour == pytest.approx(3600 / 2)  # the learner's 2 s; the engine's 1 s is hidden
    assert found.learner_idle == pytest.approx(0) and found.engine_idle == pytest.approx(0.5)
    assert found.lag == {1: 1.0}


@pytest.mark.parametrize("k", [1, 4])
def test_an_instant_learner_leaves_the_engines_throughput(k: int) -> None:
    # 0.02 s a token and 10 slots: 50 tokens/s while slots are full
    found = simulate(
        WORK, rates(decode_step_s=0.0, decode_token_s=0.02, train_token_s=0.0), ONE, Scheme("pipeline", k)
    )
    assert found.tokens_per_s == pytest.approx(50) and found.steps_per_hour == pytest.approx(3600 * 50 / 40)
    assert found.engine_idle == pytest.approx(0) and found.learner_idle == pytest.approx(1)


def test_slots_make_sequences_queue() -> None:
    found = simulate(WORK, rates(slots=1), ONE, Scheme("pipeline", 0))
    assert 3600 / found.steps_per_hour == pytest.approx(4 * 1.0 + 2)  # 4 sequences, one after another


def test_devices_divide_the_work() -> None:
    # 12 sequences at 0.1 s each and step: 1.2 s on one engine, 0.4 s on each of three
    work = Workload(prompts=6, prompt_tokens=0.0, lengths=np.full((1, 2), 10))
    found = simulate(work, rates(decode_step_s=0.0, decode_token_s=0.1), Split(2, 3), Scheme("pipeline", 0))
    assert 3600 / found.steps_per_hour == pytest.approx(10 * 0.4 + 120 * 0.05 / 2)


def test_ppo_off_policy_generates_k_batches_then_makes_k_steps() -> None:
    found = simulate(WORK, RATES, ONE, Scheme("ppo", 4))
    assert 3600 / found.steps_per_hour == pytest.approx((1 + 4 * 2) / 4)  # four batches decode side by side
    assert found.lag == pytest.approx(
        {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    ) and found.lag_mean == pytest.approx(1.5)


def test_ppo_off_policy_1_is_on_policy() -> None:
    runs = [
        simulate(spread(), RATES, ONE, c, steps=20, warm=2) for c in (Scheme("ppo", 1), Scheme("pipeline", 0))
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("train_token_s", [0.0, 0.002, 0.02])
def test_no_token_is_older_than_k(k: int, train_token_s: float) -> None:
    fast = rates(train_token_s=train_token_s, decode_token_s=0.001, slots=20, push_s=0.3)
    found = simulate(spread(), fast, ONE, Scheme("pipeline", k))
    assert min(found.lag) >= 0 and found.lag_max <= k
    if (
        train_token_s == 0.02
    ):  # the learner bounds the run: the pipeline is full, and tokens as old as they may be
        assert found.lag_max == k


def test_weights_swap_in_mid_sequence() -> None:
    # The learner takes 2.5 s, the pushed version reaches sequences of 10 s at their tokens 1, 26, 51 ...
    work = Workload(prompts=1, prompt_tokens=0.0, lengths=np.full((1, 1), 100))
    found = simulate(work, rates(train_token_s=0.025), ONE, Scheme("pipeline", 4))
    assert 3600 / found.steps_per_hour == pytest.approx(2.5)
    assert found.lag == pytest.approx({1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}, abs=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_token_generated_is_trained_on_once(scheme: Scheme) -> None:
    work = Workload(prompts=2, prompt_tokens=0.0, lengths=np.full((1, 2), 10))
    found = simulate(work, RATES, ONE, scheme, steps=8, warm=0, ends=True)
    seconds = 8 * 3600 / found.steps_per_hour
    assert found.tokens_per_s * seconds == pytest.approx(8 * 40)  # no group beyond the last batch
    busy = (1 - found.learner_idle) * seconds
    assert busy == pytest.approx(8 * 2)  # 2 s a step, whatever the order of things
    assert sum(found.lag.values()) == pytest.approx(1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_faster_stages_never_make_a_slower_run(scheme: Scheme) -> None:
    slow = rates(decode_token_s=0.002, slots=24, push_s=0.4, step_s=0.2, verify_s=0.1, prefill_token_s=0.01)
    base = simulate(spread(), slow, ONE, scheme, steps=16)
    for name in ("decode_token_s", "train_token_s", "push_s", "step_s", "verify_s", "prefill_token_s"):
        changes = {n: getattr(slow, n) for n in Rates.__dataclass_fields__} | {
            name: 0.5 * getattr(slow, name)
        }
        assert (
            simulate(spread(), Rates(**changes), ONE, scheme, steps=16).steps_per_hour
            >= 0.999 * base.steps_per_hour
        )


def test_more_lag_never_makes_a_slower_run() -> None:
    slow = rates(decode_token_s=0.002, slots=64, push_s=0.4)
    speeds = [simulate(spread(), slow, ONE, Scheme("pipeline", k)).steps_per_hour for k in (0, 1, 2, 4, 8)]
    assert all(b >= 0.98 * a for a, b in pairwise(speeds)) and speeds[2] > 1.1 * speeds[0]


def test_the_same_seed_gives_the_same_run_and_another_nearly() -> None:
    def run(seed: int) -> Outcome:
        return simulate(spread(), RATES, ONE, Scheme("pipeline", 1), seed=seed)

    assert run(1) == run(1) != run(2)
    assert run(1).steps_per_hour == pytest.approx(run(2).steps_per_hour, rel=0.05)


def test_shared_cores_go_round() -> None:
    # Engine (2 threads) and learner (2 threads) on 2 cores: each at half its speed while both are busy.
    shared = Split(2, 2, cores=2)
    on_policy = simulate(WORK, RATES, shared, Scheme("pipeline", 0))
    assert 3600 / on_policy.steps_per_hour == pytest.approx(3)  # never both
    pipelined = simulate(WORK, RATES, shared, Scheme("pipeline", 1))
    # 1 s of generation takes 2 s beside the learner, which gets 1 s done meanwhile, and 1 s more alone
    assert 3600 / pipelined.steps_per_hour == pytest.approx(3)
    assert pipelined.engine_idle == pytest.approx(1 / 3) and pipelined.learner_idle == pytest.approx(0)
    # 1 s of hand-over (one thread) beside 1 s of generation (two): both at 2/3 of their speed
    handing = simulate(WORK, rates(train_token_s=0.0, build_s=1.0), shared, Scheme("pipeline", 1))
    assert 3600 / handing.steps_per_hour == pytest.approx(1.5)
    few = simulate(WORK, RATES, Split(1, 1, cores=2), Scheme("pipeline", 1))
    assert 3600 / few.steps_per_hour == pytest.approx(2)  # a core for each


def test_evaluation_goes_first_and_holds_newer_weights_back() -> None:
    work = replace(WORK, evaluation_every=2, evaluation_lengths=(30.0,) * 4)
    # Two steps: generate 1 s, train 2 s; the same again, then 3 s of evaluation. Version 2 starts its
    # groups beside the evaluation, so step 3 is not delayed; its weights wait until the evaluation is done.
    found = simulate(work, RATES, ONE, Scheme("pipeline", 0), steps=20, warm=2)
    assert 3600 / found.steps_per_hour == pytest.approx((3 + 3) / 2)
    long = replace(work, evaluation_lengths=(50.0,) * 4)
    found = simulate(long, RATES, ONE, Scheme("pipeline", 0), steps=20, warm=2)
    assert 3600 / found.steps_per_hour == pytest.approx((5 + 3) / 2)  # version 3 is pushed after 5 s, not 3
    queued = simulate(long, rates(slots=4), ONE, Scheme("pipeline", 0), steps=20, warm=2)
    assert queued.steps_per_hour < found.steps_per_hour  # the evaluation takes every slot first


@pytest.mark.parametrize(("kind", "k"), [("pipeline", -1), ("ppo", 0)])
def test_schemes_have_a_least_k(kind: str, k: int) -> None:
    with pytest.raises(ValueError, match="expected k of at least"):
        Scheme(kind, k)  # type: ignore[arg-type]


def test_unsteady_stages_wait_for_each_other() -> None:
    # Engine and learner at 2 s a step each: steady, nobody waits. Now half of the learner's steps take 1 s,
    # half 3 s: in turns that costs nothing. Side by side the learner waits w' = max(0, 2 - w - L) after one
    # of L s: never after 3 s, and 1 s after 1 s unless it had just waited. A third of them wait: 2 + 1/3 s.
    steady = rates(decode_step_s=0.2)
    unsteady = rates(decode_step_s=0.2, train_scatter=(0.5, 1.5))
    turns = simulate(WORK, unsteady, ONE, Scheme("pipeline", 0), steps=400)
    assert 3600 / turns.steps_per_hour == pytest.approx(4, rel=0.03)
    beside = [simulate(WORK, r, ONE, Scheme("pipeline", 1), steps=400) for r in (steady, unsteady)]
    assert 3600 / beside[0].steps_per_hour == pytest.approx(2)
    assert 3600 / beside[1].steps_per_hour == pytest.approx(7 / 3, rel=0.03)
    assert beside[1].learner_idle == pytest.approx(1 / 7, abs=0.02)
