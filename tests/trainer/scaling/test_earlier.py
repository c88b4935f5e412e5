"""Promises of --like: earlier runs of the same kind make the forecast of a new one narrower, and right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from simulated import write

from trainer.config import ConfigError
from trainer.scaling import Curve
from trainer.scaling.curve.average import DEFAULT
from trainer.scaling.earlier import (
    NO_DRIFT,
    Earlier,
    _random_effect,
    describe_prior,
    learn,
    prior_after,
    prior_of_kind,
)
from trainer.scaling.forecast import backtest, summarize
from trainer.scaling.simulate import simulated

pytestmark = pytest.mark.slow

NOISE, POINTS = 0.006, 30


def logistic_to_1(c: np.ndarray, p: float, scale: float) -> np.ndarray:
    odds = 0.15 / 0.85 * np.exp(4.2 * (c / scale) ** p)
    return np.asarray(odds / (1 + odds))


def slowing(c: np.ndarray, p: float, scale: float) -> np.ndarray:
    """Beyond a third of the compute it rises half as fast as any of the laws would."""
    return logistic_to_1(np.minimum(c, 1 / 3) + 0.5 * np.clip(c - 1 / 3, 0, None), p, scale)


def run(kind: Callable[..., np.ndarray], seed: int, p: float = 0.7, spread: float = 0.05) -> Curve:
    rng = np.random.default_rng(seed)
    c = np.arange(POINTS + 1) / POINTS
    truth = kind(c, p * np.exp(spread * rng.standard_normal()), np.exp(0.2 * rng.standard_normal()))
    return simulated(lambda _: truth, c, rng.normal(0, NOISE, len(c)), NOISE, f"run {seed}")


def tried(kind: Callable[..., np.ndarray], like: Earlier | None, share: float, count: int = 8) -> list:
    return [backtest(run(kind, 100 + seed), share, like=like) for seed in range(count)]


@pytest.fixture(scope="module")
def earlier() -> Earlier:
    return learn({f"recipe {seed}": [run(logistic_to_1, seed)] for seed in range(6)})


def test_the_mean_and_spread_of_exactly_known_values_are_those_of_a_sample() -> None:
    x = 1.3 + 0.2 * np.random.default_rng(0).standard_normal(200)
    mean, sd = _random_effect([[(value, 1e-6)] for value in x], (0.0, 10.0))
    assert mean == pytest.approx(x.mean(), abs=1e-3) and sd == pytest.approx(x.std(), rel=0.06)
    # one value as uncertain as the prior: half-way between them
    mean, sd = _random_effect([[(1.0, 0.5)]], (0.0, 0.5))
    assert 0.3 < mean < 0.5 and 0.35 < sd < 0.7


def test_the_seeds_of_a_recipe_count_as_one_run() -> None:
    for recipes in (1, 2):  # also where there is but one recipe
        one = {f"recipe {i}": [run(logistic_to_1, i)] for i in range(recipes)}
        thrice = {k: [replace(runs[0], name=f"seed {s}") for s in range(3)] for k, runs in one.items()}
        first, second = prior_of_kind(learn(one)), prior_of_kind(learn(thrice))
        for law, same in zip(first.laws, second.laws, strict=True):
            assert law.probability == pytest.approx(same.probability)
            assert law.shape == same.shape or law.shape == pytest.approx(same.shape)
        for transient, same_one in zip(first.transients, second.transients, strict=True):
            assert transient.probability == pytest.approx(same_one.probability)


def test_earlier_runs_say_which_law_and_how_steep_it_is(earlier: Earlier) -> None:
    prior = prior_after(earlier, run(logistic_to_1, 100))
    assert prior.laws[3].probability > 0.7 > 0.2 > prior.laws[0].probability
    assert prior.laws[3].shape is not None
    mean, sd = prior.laws[3].shape
    assert np.exp(mean) == pytest.approx(0.7, rel=0.15) and sd < 0.2
    assert sum(law.probability for law in prior.laws) == pytest.approx(1)


def test_with_earlier_runs_a_quarter_predicts_the_end_with_half_the_doubt(earlier: Earlier) -> None:
    alone, like = (summarize(tried(logistic_to_1, prior, 0.25)) for prior in (None, earlier))
    assert like["width"] < 0.5 * alone["width"] and like["error"] < 0.03
    assert like["coverage"] >= 6 / 8


def test_where_all_laws_are_wrong_the_errors_of_earlier_forecasts_correct_the_new_one() -> None:
    earlier = learn({f"recipe {seed}": [run(slowing, seed)] for seed in range(6)})
    mean, sd = prior_after(earlier, run(slowing, 100)).drift
    assert mean > 0.1 and sd < 0.3  # what they learned of p made them expect too little
    alone, like = (summarize(tried(slowing, prior, 0.33)) for prior in (None, earlier))
    assert like["error"] < 0.7 * alone["error"]
    assert like["coverage"] >= 6 / 8


def test_a_run_learns_nothing_from_itself_or_from_its_own_recipe() -> None:
    groups = {f"recipe {seed}": [run(logistic_to_1, seed)] for seed in range(3)}
    groups["recipe 0"].append(run(logistic_to_1, 9, p=2.0))
    all_of_them, others = learn(groups), learn({k: v for k, v in groups.items() if k != "recipe 0"})
    member = groups["recipe 0"][0]
    for points in (len(member.points), 9):  # also of its beginning
        seen = Curve("the same under another name", member.unit, member.points[:points], member.R0)
        without, expected = (prior_after(prior, seen) for prior in (all_of_them, others))
        assert without.laws[3].shape == pytest.approx(expected.laws[3].shape, rel=0.02)
        assert without.drift == pytest.approx(expected.drift, abs=0.02)
    alone = learn({"recipe 0": groups["recipe 0"]})
    assert prior_after(alone, member).laws == DEFAULT.laws


def with_transient(c: np.ndarray, p: float, scale: float) -> np.ndarray:
    return logistic_to_1(c, p, scale) - 0.12 * np.exp(-c / 0.1)


def test_whether_runs_start_with_a_transient_is_learned(earlier: Earlier) -> None:
    new = run(logistic_to_1, 100)
    with_it = prior_after(learn({f"recipe {seed}": [run(with_transient, seed)] for seed in range(3)}), new)
    without = prior_after(earlier, new)
    usual, learned, other = (sum(t.probability for t in x.transients) for x in (DEFAULT, with_it, without))
    assert learned > usual + 0.1 and learned > other + 0.1


def test_two_runs_with_an_evaluation_in_common_are_two_runs() -> None:
    one, other = run(logistic_to_1, 0), run(logistic_to_1, 1)
    shared = Curve("other", other.unit, (one.points[0], *other.points[1:]), other.R0)
    assert len(learn({"a": [shared]}).without(one).runs) == 1
    assert len(learn({"a": [one]}).without(one).runs) == 0


def test_of_one_recipe_each_run_is_forecast_by_the_others_and_one_run_by_none() -> None:
    runs = [run(logistic_to_1, seed) for seed in range(4)]
    new = run(logistic_to_1, 100)
    together, apart = (
        prior_after(learn(groups), new)
        for groups in ({"a": runs}, {f"recipe {i}": [r] for i, r in enumerate(runs)})
    )
    assert together.drift != NO_DRIFT and together.drift[1] > apart.drift[1]  # one recipe says less than four
    earlier = learn({"a": runs[:1]})
    assert prior_after(earlier, new).drift == NO_DRIFT
    assert "is assumed" in describe_prior(prior_after(earlier, new), earlier)
    assert "nothing was learned" in describe_prior(DEFAULT, earlier.without(runs[0]))


def test_runs_that_say_nothing_are_refused_by_name() -> None:
    whole = run(logistic_to_1, 0)
    short = Curve("short.csv", whole.unit, whole.points[:5], whole.R0)
    with pytest.raises(ConfigError, match=r"--like short.csv: it has 5 evaluations beyond R0.*at least 6"):
        learn({"a": [whole], "b": [short]})
    with pytest.raises(ConfigError, match="compute is in FLOPs and GPU-hours; expected one unit"):
        learn({"a": [whole], "b": [Curve("other", "FLOPs", whole.points, whole.R0)]})


def test_a_log_without_R0_says_much_the_same(earlier: Earlier) -> None:
    logs = learn({past.group: [replace(past.curve, R0=None)] for past in earlier.runs})
    ours, theirs = prior_of_kind(logs).laws[-1], prior_of_kind(earlier).laws[-1]
    assert ours.probability == pytest.approx(theirs.probability, abs=0.15)
    assert ours.shape and theirs.shape and ours.shape[0] == pytest.approx(theirs.shape[0], abs=0.15)


def test_a_run_that_has_fallen_is_named_and_widens_nothing(earlier: Earlier) -> None:
    whole = run(logistic_to_1, 50)
    fallen = [
        replace(p, pass_rate=p.pass_rate * (0.2 if i > 0.7 * POINTS else 1))
        for i, p in enumerate(whole.points)
    ]
    collapsed = Curve("collapsed", whole.unit, tuple(fallen), whole.R0)
    groups = {past.group: [past.curve] for past in earlier.runs}
    more = learn(groups | {"other": [collapsed]})
    new = run(logistic_to_1, 60)
    assert prior_after(more, new) == prior_after(earlier, new)
    assert "Nothing is learned from collapsed: the reward has fallen" in describe_prior(
        prior_after(more, new), more
    )
    alone = learn({"other": [collapsed]})  # it says what it can
    assert not alone.runs[0].fallen
    assert "have fallen from their peak, and count" in describe_prior(prior_after(alone, new), alone)
    own = next(iter(earlier.runs))
    beside = learn({own.group: [own.curve], "other": [collapsed]}).without(own.curve)
    assert describe_prior(prior_after(beside, own.curve), beside).startswith("Nothing is learned from coll")


def test_the_commands_forecast_with_earlier_runs(command: Command) -> None:
    for seed in range(4):
        curve = run(logistic_to_1, seed)
        write(Path(f"{seed}.csv"), replace(curve, points=curve.points[: 8 if seed == 0 else None]))
    outputs = {}
    for like in ("", "--like 1.csv 2.csv 3.csv"):
        for line in ("predict 0.csv --at 1", "fit 0.csv", "backtest 1.csv --fit-until 25%"):
            outputs[line.split()[0], bool(like)] = command(f"{line} {like}").words
    learned = "From 3 earlier runs of 3 recipes: such a run follows a logistic of C^p to 1"
    assert learned in outputs["predict", True] and learned in outputs["fit", True]
    assert all(outputs[name, True] != outputs[name, False] for name in ("predict", "fit", "backtest"))
    assert "not those of the run's own recipe" in outputs["backtest", True]
    assert "nothing.csv" in command("predict 1.csv --at 1 --like 0.csv nothing.csv", exit_code=2)
