"""Promises of `fit --by`: the tasks of a run, its prompts by difficulty, and what they share."""

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from helpers.logs import write_jsonl

from trainer.scaling import Sigmoid
from trainer.scaling.curve.average import DEFAULT
from trainer.scaling.curve.sigmoid import Curve, EvalPoint, curve_of
from trainer.scaling.parts import BUCKETS, buckets, shared_start

COMPUTE = np.arange(0, 6001, 250.0)
MATH, CODE = Sigmoid(0.10, 0.60, 1.6, 2000), Sigmoid(0.20, 0.50, 1.8, 1500)


def task(law: Sigmoid, seed: int, transient: float) -> Curve:
    """A sigmoid with something learned at once beside it."""
    noise = np.random.default_rng(seed).normal(0, 0.004, len(COMPUTE))
    rewards = law.reward(COMPUTE) + transient * -np.expm1(-COMPUTE / 360) + noise
    rows = zip(COMPUTE.tolist(), rewards.tolist(), strict=True)
    return curve_of("task", "steps", (EvalPoint(i, c, r, 0.004) for i, (c, r) in enumerate(rows)))


def in_transients(parts: list[Curve]) -> float:
    """The probability that the first part has a transient, before its own points are seen."""
    return sum(t.probability for t in shared_start(parts)[0].transients)


def test_the_parts_learn_their_start_from_each_other() -> None:
    own = task(MATH, 0, 0.1)
    assert sum(t.probability for t in DEFAULT.transients) == 0.5
    assert in_transients([own]) == pytest.approx(0.5)  # nothing but the prior
    assert in_transients([own, task(CODE, 1, 0.1)]) > 0.8
    assert in_transients([own, task(CODE, 1, 0.0)]) < 0.45


def test_prompts_that_are_alike_are_in_no_bucket_harder_than_in_another() -> None:
    """Sorted by the same evaluation, or by all together, the hard ones would be the unlucky ones."""
    points = [EvalPoint(i, float(i), 0.5, 0.0) for i in range(12)]
    p = np.linspace(0.2, 0.8, 12)[:, None]
    rates = np.random.default_rng(0).binomial(4, p, (12, 600)) / 4
    curves = buckets(rates, 4, points)
    means = {name: np.array([q.pass_rate for q in part]) for name, part in curves.items()}
    errors = np.array([q.pass_rate_se for q in curves["hard"]])
    assert errors == pytest.approx(np.sqrt(p * (1 - p) / 800)[:, 0], rel=0.15)  # 4 completions of 200 prompts
    gap = means["easy"] - means["hard"]
    assert abs(gap.mean()) < 3 * errors.mean() * np.sqrt(2 / 12) and (np.abs(gap) < 4 * errors).all()
    naive = np.argsort(rates.sum(0))
    assert (rates[:, naive[-200:]].mean() - rates[:, naive[:200]].mean()) > 0.1


def test_each_bucket_has_the_pass_rates_of_its_prompts() -> None:
    p = np.repeat([0.1, 0.5, 0.9], 100) + np.linspace(0, 0.05, 10)[:, None]
    rates = np.random.default_rng(2).binomial(64, p) / 64
    curves = buckets(rates, 64, [EvalPoint(i, float(i), 0.5, 0.0) for i in range(10)])
    for name, start in zip(BUCKETS, (0.1, 0.5, 0.9), strict=True):
        measured = [q.pass_rate for q in curves[name]]
        assert measured == pytest.approx(start + np.linspace(0, 0.05, 10), abs=0.02)


def test_a_row_for_each_task_and_for_each_third_of_the_prompts(command: Command) -> None:
    tasks = {"math": task(MATH, 0, 0.0), "math/aime": task(CODE, 1, 0.0)}
    Path("run").mkdir()
    rows = [
        {"step": i, "gpu_hours": c, "eval/pass_rate": float(MATH.reward(c))}
        | {f"eval/{name}/pass_rate": curve.evaluations[i].pass_rate for name, curve in tasks.items()}
        for i, c in enumerate(COMPUTE.tolist())
    ]
    write_jsonl(Path("run/metrics.jsonl"), rows)
    rates = np.random.default_rng(0).binomial(8, [[float(MATH.reward(c))] * 60 for c in COMPUTE]) / 8
    lines = [{"step": i, "set": "", "pass": {"1": row, "8": row}} for i, row in enumerate(rates.tolist())]
    write_jsonl(Path("run/held_out.jsonl"), lines)
    text = command("fit run --by task --plot t.svg --json t.json")
    assert text.json["math"]["at_2x"]["value"] == pytest.approx(MATH.reward(12_000), abs=0.03)
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["task", "math", "aime"]
    assert "math: A" in Path("t.svg").read_text() and "aime: A" in Path("t.svg").read_text()
    text = command("fit run --by difficulty")
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["difficulty", *BUCKETS]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("fit a.jsonl --by task", "needs the rewards of several tasks"),
        ("fit a.jsonl --by difficulty", "has no held_out.jsonl"),
        ("fit a.jsonl --by difficulty --reward-column loss", "not of loss"),
        ("fit a.jsonl a.jsonl --by task", "of one run"),
        ("fit a.jsonl --by task --families", "--families"),
        ("fit b.jsonl --by difficulty", "holds 2 runs"),
        ("fit c.jsonl --by task", "there is one point"),
    ],
)
def test_what_has_no_parts_is_refused(command: Command, line: str, says: str) -> None:
    rows = [{"step": i, "loss": 0.1, "eval/pass_rate": i / 20} for i in range(9)]
    write_jsonl(Path("a.jsonl"), rows)
    write_jsonl(Path("b.jsonl"), [row | {"run": run} for run in "xy" for row in rows])
    write_jsonl(
        Path("c.jsonl"), [{"compute/total": 0.0, "eval/math/pass_rate": 0.2, "eval/code/pass_rate": 0.1}]
    )
    assert says in command(line, exit_code=2)


def test_a_task_whose_column_begins_the_others_is_one_of_them(command: Command) -> None:
    rows = [{"step": i, "score": i / 20, "score/math": i / 30, "score/code": i / 40} for i in range(9)]
    write_jsonl(Path("a.jsonl"), rows)
    text = command("fit a.jsonl --by task --reward-column scor")
    assert {line.split()[0] for line in text.splitlines()[1:4]} == {"score", "math", "code"}
