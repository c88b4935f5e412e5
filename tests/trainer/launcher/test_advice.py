"""Advice on the split of devices, with numbers worked by hand."""

from typing import Any

import pytest
from fakes import having

from trainer.config import Config
from trainer.launcher.advice import ASSUMED, advise, advise_run, advise_shared, assumed_rates, plan, step_on
from trainer.launcher.memory_estimate import ModelSize
from trainer.launcher.placement import Split

SMALL = ModelSize(600_000_000, 28, 1024, 3072, 1024, 151_936)


@pytest.mark.parametrize(
    ("split", "idle", "width", "best", "speedup", "text"),
    [
        # Work of a step, in GPU-steps: engine 5 · 1, learner 3 · .59 = 1.77, all of it hidden.
        # 6+2: max(5/6, 1.77/2 = .885) = .885, so 1.13 times the steps; 7+1: 1.77.
        (Split(3, 5), (0.41, 0.0), 1, Split(2, 6), 1 / 0.885, "of 5+3 GPUs (engine + learner) make 6+2"),
        # engine 14 · .4 = 5.6, learner 2 · 1 = 2: balanced at 12+4: max(5.6/12, 2/4) = .5; 11+5: .509
        (Split(2, 14), (0.0, 0.6), 1, Split(4, 12), 2, "make 12+4: about 2.00x"),
        # Strictly in turns (.75 + .25 = 1): engine 6 · .25 = 1.5, learner 2 · .75 = 1.5.
        # 4+4: 1.5/4 + 1.5/4 = .75, although max alone would be .375
        (Split(2, 6), (0.25, 0.75), 1, Split(4, 4), 1 / 0.75, "make 4+4"),
        # A tenth of the time neither works, and that part does not shrink: .1 + 1.8/e + 1.2/l
        (Split(2, 6), (0.4, 0.7), 1, Split(4, 4), 1 / (0.1 + 1.8 / 4 + 1.2 / 4), "make 4+4"),
        (Split(2, 6), (0.04, 0.02), 1, Split(2, 6), 1, "6+2 GPUs (engine + learner) is the best"),
        (Split(4, 4), (0.5, 0.5), 1, Split(4, 4), 1, "both sides wait: a higher pipeline.max_lag"),
        # Engines take whole groups of GPUs: 5+3 would be possible with engines of one.
        (Split(4, 4), (0.6, 0.0), 2, Split(2, 6), 1.25, "make 6+2"),
        (Split(4, 4), (0.45, 0.0), 1, Split(3, 5), 1.25, "make 5+3"),
    ],
)
def test_the_best_split_by_hand(
    split: Split, idle: tuple[float, float], width: int, best: Split, speedup: float, text: str
) -> None:
    advice = advise(split, *idle, width=width)
    assert advice.best == best and advice.speedup == pytest.approx(speedup) and text in advice.text


def books(unit: str, **devices: float) -> dict[str, object]:
    roles = {role: {"devices": n} for role, n in devices.items()} | {"controller": {"devices": 0.0}}
    return {"unit": unit, "roles": roles}


def test_the_books_of_a_run_are_read() -> None:
    held = {"learner": 3.0, "engine": 1.0, "engine-1": 4.0}
    idle = {"learner": 0.41, "engine": 0.5, "engine-1": 0.0}  # engines (1 · .5 + 4 · .0) / 5 = 10 %
    advice = advise_run(books("GPU-hours", **held), idle, having(Config(), engine={"kind": "vllm"}))
    assert advice == advise(Split(3, 5), 0.41, 0.1)


@pytest.mark.parametrize(
    ("learner", "engine", "bound"),
    [(0.4, 0.05, "generation bounds"), (0.05, 0.4, "the learner bounds"), (0.02, 0.05, "the cores bound"),
     (0.5, 0.5, "higher pipeline.max_lag"), (0.2, 0.2, "both wait")],
)  # fmt: skip
def test_on_shared_cores_it_tells_what_bounds_the_run(learner: float, engine: float, bound: str) -> None:
    idle = {"learner": learner, "engine": engine}
    advice = advise_run(books("core-hours", learner=1.0, engine=1.0), idle, Config())
    assert advice == advise_shared("cores", learner, engine)
    assert advice.best is None and "share the cores in time, so there is no split" in advice.text
    assert bound in advice.text


@pytest.mark.parametrize(
    ("engine", "devices", "text"),
    [
        ({"kind": "vllm", "colocate": True}, (1.0, 1.0), "share the GPUs in time"),
        ({"kind": "torch"}, (0.5, 0.5), "share the GPUs in time"),
        ({"kind": "vllm", "urls": ("http://a:1",)}, (1.0, 1.0), "more engines would help first"),
        ({"kind": "torch", "tensor_parallel": 0}, (1.0, 0.0), "more engines would help first"),
    ],
)
def test_shared_gpus_and_engines_elsewhere_have_no_split(
    engine: dict[str, Any], devices: tuple[float, float], text: str
) -> None:
    held = books("GPU-hours", learner=devices[0], engine=devices[1])
    idle = {"learner": 0.5, "engine": 0.0}
    assert text in advise_run(held, idle, having(Config(), engine=engine)).text


def test_a_plan_names_the_best_split_and_its_gain() -> None:
    engine = {"kind": "vllm", "slots": 96, "max_new_tokens": 800}
    pipeline = {"prompts_per_step": 16, "completions_per_prompt": 8, "max_lag": 4}
    config = having(Config(), engine=engine, pipeline=pipeline)
    splits = [(Split(8 - engines, engines), config) for engines in range(1, 8)]
    starved = plan(config, SMALL, Split(1, 7), splits)
    assert starved.best is not None and starved.best.learner > 1 and starved.speedup > 1.5
    assert f"learner.ranks {starved.best.learner}" in starved.text and "assumed rates" in starved.text
    best = plan(config, SMALL, starved.best, splits)
    assert best.speedup == 1 and plan(config, SMALL, starved.best).text.endswith("the best split")
    made = {s: 3600 / step_on(c, SMALL, s).step for s, c in splits}
    second = sorted(made, key=made.__getitem__)[-2]
    assert best.text.endswith(f"fits, so it is taken; the next, {second}, would make {made[second]:.3g}")
    assert "share the cores in time" in plan(config, SMALL, Split(1, 1, 2)).text


def test_recomputed_activations_take_a_third_more_training_on_the_splits_that_recompute() -> None:
    """2 FLOPs a parameter and token forward once more, beside 6; another split need not recompute."""
    engine = {"kind": "vllm", "slots": 96, "max_new_tokens": 800}
    config = having(Config(), engine=engine)
    recomputing = having(config, learner={"checkpoint_activations": True})
    split, other = Split(2, 6), Split(3, 5)
    train = [step_on(c, SMALL, split).train for c in (recomputing, config)]
    assert train[0] == pytest.approx(train[1] * 4 / 3)
    text = plan(recomputing, SMALL, split, [(split, config), (other, config)]).text
    assert f"make {3600 / step_on(recomputing, SMALL, split).step:.3g} steps" in text
    gain = step_on(recomputing, SMALL, split).step / step_on(config, SMALL, other).step
    assert f"5+3 would be about {gain:.2f}x as fast" in text


@pytest.mark.parametrize("split", [Split(4, 1), Split(4, 8), Split(1, 1, 4)])
@pytest.mark.parametrize("width", [1, 4])
def test_remote_engines_are_no_part_of_a_plan(split: Split, width: int) -> None:
    urls = ("http://a:1", "http://b:1")
    config = having(Config(), engine={"kind": "vllm", "urls": urls, "tensor_parallel": width})
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
