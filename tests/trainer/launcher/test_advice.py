"""Advice on the split of devices, with numbers worked by hand."""

import pytest

from trainer.config import Config, EngineConfig, InterruptionConfig, PipelineConfig
from trainer.launcher.advice import (
    ASSUMED,
    advise,
    advise_run,
    advise_shared,
    assumed_rates,
    plan,
)
from trainer.launcher.memory_estimate import ModelSize
from trainer.launcher.placement import Split

SMALL = ModelSize(600_000_000, 28, 1024, 3072, 1024, 151_936)


def test_an_idle_learner_gives_a_gpu_to_the_engine() -> None:
    # Work of a step, in GPU-steps: engine 5 · 1, learner 3 · .59 = 1.77, all of it hidden.
    # 6+2: max(5/6, 1.77/2 = .885) = .885, so 1.13 times the steps; 7+1: 1.77.
    advice = advise(Split(3, 5), learner_idle=0.41, engine_idle=0.0)
    assert advice.best == Split(2, 6) and advice.speedup == pytest.approx(1 / 0.885)
    assert advice.text == (
        "learner idle 41%, engine idle 0%: give 1 GPU of the learner to the engine: 5+3 -> 6+2 "
        "(engine + learner), about 1.13x steps per hour"
    )


def test_an_idle_engine_gives_gpus_to_the_learner() -> None:
    # engine 14 · .4 = 5.6, learner 2 · 1 = 2: balanced at 12+4: max(5.6/12, 2/4) = .5; 11+5: .509
    advice = advise(Split(2, 14), learner_idle=0.0, engine_idle=0.6)
    assert advice.best == Split(4, 12) and advice.speedup == pytest.approx(2)
    assert "give 2 GPUs of the engine to the learner: 14+2 -> 12+4" in advice.text


def test_what_was_not_hidden_stays_so() -> None:
    # Strictly in turns (.75 + .25 = 1): engine 6 · .25 = 1.5, learner 2 · .75 = 1.5.
    # 4+4: 1.5/4 + 1.5/4 = .75, although max alone would be .375
    advice = advise(Split(2, 6), learner_idle=0.25, engine_idle=0.75)
    assert advice.best == Split(4, 4) and advice.speedup == pytest.approx(1 / 0.75)
    # A tenth of the time neither works: that part does not shrink. .1 + 3 · .6/4 + ... on 4+4
    neither = advise(Split(2, 6), learner_idle=0.4, engine_idle=0.7)
    engine, learner = 6 * 0.3, 2 * 0.6
    times = {e: 0.1 + engine / e + learner / (8 - e) for e in range(1, 8)}
    best = min(times, key=lambda e: times[e])
    assert neither.best == Split(8 - best, best) and neither.speedup == pytest.approx(1 / times[best])


def test_a_good_split_is_left_alone() -> None:
    advice = advise(Split(2, 6), learner_idle=0.04, engine_idle=0.02)
    assert advice.best == Split(2, 6) and advice.speedup == 1 and "6+2 GPUs" in advice.text
    in_turns = advise(Split(4, 4), learner_idle=0.5, engine_idle=0.5)
    assert in_turns.best == Split(4, 4) and "higher pipeline.max_lag" in in_turns.text


def test_engines_take_whole_groups_of_gpus() -> None:
    advice = advise(Split(4, 4), learner_idle=0.6, engine_idle=0.0, width=2)
    assert advice.best == Split(2, 6)  # 5+3 would be possible with engines of one GPU
    assert advise(Split(4, 4), learner_idle=0.45, engine_idle=0.0, width=1).best == Split(3, 5)


def books(unit: str, **devices: float) -> dict[str, object]:
    roles = {role: {"devices": n} for role, n in devices.items()} | {"controller": {"devices": 0.0}}
    return {"unit": unit, "devices_total": sum(devices.values()), "roles": roles}


def test_the_books_of_a_run_are_read() -> None:
    config = Config(engine=EngineConfig(kind="vllm"))
    held = {"learner": 3.0, "engine": 1.0, "engine-1": 4.0}
    # engines idle (1 · .5 + 4 · .0) / 5 = 10 %
    advice = advise_run(books("GPU-hours", **held), {"learner": 0.41, "engine": 0.5, "engine-1": 0.0}, config)
    assert advice == advise(Split(3, 5), 0.41, 0.1)


@pytest.mark.parametrize(
    ("learner", "engine", "bound"),
    [(0.4, 0.05, "generation bounds"), (0.05, 0.4, "the learner bounds"), (0.02, 0.05, "the cores bound"),
     (0.5, 0.5, "higher pipeline.max_lag"), (0.2, 0.2, "both wait")],
)  # fmt: skip
def test_on_shared_cores_it_tells_what_bounds_the_run(learner: float, engine: float, bound: str) -> None:
    config = Config()
    held = {"learner": 1.0, "engine": 1.0}
    advice = advise_run(books("core-hours", **held), {"learner": learner, "engine": engine}, config)
    assert advice == advise_shared("2 cores", learner, engine)
    assert advice.best is None and "share the 2 cores in time, so there is no split" in advice.text
    assert bound in advice.text


def test_shared_gpus_and_remote_engines_have_no_split() -> None:
    held = {"learner": 1.0, "engine": 1.0}
    colocated = Config(engine=EngineConfig(kind="vllm", colocate=True))
    idle = {"learner": 0.5, "engine": 0.5}
    assert "share the 2 GPUs in time" in advise_run(books("GPU-hours", **held), idle, colocated).text
    remote = Config(engine=EngineConfig(kind="vllm", urls=("http://a:1",)))
    idle = {"learner": 0.5, "engine": 0.0}
    assert "more servers would help first" in advise_run(books("GPU-hours", **held), idle, remote).text


def test_a_plan_names_the_best_split_and_its_gain() -> None:
    config = Config(
        engine=EngineConfig(kind="vllm", slots=96, max_new_tokens=800),
        pipeline=PipelineConfig(prompts_per_step=16, completions_per_prompt=8, max_lag=4),
    )
    starved = plan(config, SMALL, Split(1, 7))
    assert starved.best is not None and starved.best.learner > 1 and starved.speedup > 1.5
    assert f"learner.ranks {starved.best.learner}" in starved.text and "assumed rates" in starved.text
    assert plan(config, SMALL, starved.best).speedup == 1
    assert "share the 2 cores in time" in plan(config, SMALL, Split(1, 1, 2)).text


@pytest.mark.parametrize("split", [Split(4, 1), Split(4, 8), Split(1, 1, 4)])
@pytest.mark.parametrize("width", [1, 4])
def test_remote_engines_are_no_part_of_a_plan(split: Split, width: int) -> None:
    urls = ("http://a:1", "http://b:1")
    config = Config(engine=EngineConfig(kind="vllm", urls=urls, tensor_parallel=width))
    advice = plan(config, SMALL, split)
    assert (advice.best, advice.speedup) == (None, 1)
    assert advice.text == "the engines are on other machines, so there is no split to choose"


def test_assumed_rates_by_hand() -> None:
    a = {name: assumption.value for name, assumption in ASSUMED.items()}
    rates = assumed_rates(1e9, layers=10, kv_width=100, context=1000)
    read = a["bandwidth"] * a["decode_share"]
    assert rates.decode_step_s == pytest.approx(2e9 / read)
    assert rates.decode_token_s == pytest.approx(4e6 / read + 2e9 / (a["peak"] * a["decode_share"]))
    assert rates.train_token_s == pytest.approx(6e9 / (a["peak"] * a["train_mfu"]))
    two = assumed_rates(1e9, layers=10, kv_width=100, context=1000, width=2)
    assert two.decode_token_s == rates.decode_token_s / 2 and two.train_token_s == rates.train_token_s
    assert all(assumption.source for assumption in ASSUMED.values())


def test_interrupted_completions_bound_the_planned_length() -> None:
    short = InterruptionConfig(enabled=True, lo=50, hi=100, answer_tokens=20)
    pipeline = PipelineConfig(prompts_per_step=8, completions_per_prompt=4)
    plans = [
        plan(Config(engine=EngineConfig(kind="vllm", interruption=i), pipeline=pipeline), SMALL, Split(1, 1))
        for i in (short, InterruptionConfig())
    ]
    assert "1+1 GPUs" in plans[0].text and plans[0].text != plans[1].text
