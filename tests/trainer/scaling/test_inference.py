"""Promises of inference: what doubling N is worth is that of probabilities known in closed form."""

import json
import math
from math import comb
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from helpers.logs import write_jsonl
from scipy.optimize import brentq

from trainer.scaling import Sigmoid, inference
from trainer.scaling.inference import doublings, rewards
from trainer.scaling.reading.held_out import Worth

pytestmark = pytest.mark.slow

LAW, SAMPLES, NS = Sigmoid(R0=0.05, A=0.9, B=1.5, C_mid=3.0), 8, (1, 2, 4, 8)
COMPUTE = np.linspace(0, 10, 26)
DIFFICULTIES = np.exp(np.random.default_rng(0).normal(0, 0.7, 20_000))  # a prompt's p is R(C)^difficulty


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "RESAMPLES", 8)


def pass_at(n: int, p: np.ndarray) -> np.ndarray:
    return 1 - (1 - p) ** n


def counted(correct: np.ndarray) -> dict[int, list[float]]:
    """pass@N of prompts with so many right of SAMPLES, by the combinations."""
    return {n: [1 - comb(SAMPLES - c, n) / comb(SAMPLES, n) for c in correct.tolist()] for n in NS}


def simulated(seed: int, prompts: int = 200) -> Worth:
    rng = np.random.default_rng(seed)
    u = rng.choice(DIFFICULTIES, prompts)
    rows = [list(counted(rng.binomial(SAMPLES, LAW.reward(c) ** u)).values()) for c in COMPUTE]
    return Worth("pass", COMPUTE, NS, np.array(rows))


def test_without_noise_the_worth_of_a_doubling_is_that_of_the_law() -> None:
    """All prompts alike: p(C + ΔC) = 1 − (1 − p(C))² whatever N is: ΔC is found by inverting the sigmoid."""
    p = LAW.reward(COMPUTE)
    exact = np.stack([pass_at(n, p) for n in NS], 1)[:, :, None]
    worth, at = Worth("pass", COMPUTE, NS, exact), (1.0, 2.0, 5.0)
    expected = [LAW.compute_for(float(pass_at(2, LAW.reward(c)))) - c for c in at]
    assert [c + more > COMPUTE[-1] for c, more in zip(at, expected, strict=True)] == [False, False, True]
    for change in doublings(worth, at, 0.9):
        c, value = change.compute, change.worth.value
        if c == 5:  # it would end at 27
            assert math.isinf(value) and math.isinf(change.worth.low)
        elif change.n < 4:  # at N = 8 the curve is nearly flat
            assert value == pytest.approx(expected[at.index(c)], rel=0.03)
    curve = rewards(worth, 0.9)["2"]
    assert [c for c, _ in curve] == COMPUTE.tolist() and curve[5][1].value == pass_at(2, p)[5]


def test_where_a_doubling_adds_nothing_it_is_worth_nothing() -> None:
    flat = Worth("pass", COMPUTE, NS, np.full((len(COMPUTE), len(NS), 3), 0.5))
    assert {change.worth.value for change in doublings(flat, (2.0, 5.0), 0.9)} == {0.0}


def test_intervals_hold_the_worth_among_prompts_of_all_difficulties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "RESAMPLES", 30)
    at, within = 2.0, []
    for n in (1, 2, 4):
        goal = float(pass_at(2 * n, LAW.reward(at) ** DIFFICULTIES).mean())
        end = brentq(lambda c, n=n, r=goal: pass_at(n, LAW.reward(c) ** DIFFICULTIES).mean() - r, at, 9)
        within.append(end - at)
    held = [
        change.worth.low <= truth <= change.worth.high
        for seed in range(5)
        for change, truth in zip(doublings(simulated(seed), [at], 0.9), within, strict=True)
    ]
    assert sum(held) >= 11  # of 15; binomial(15, .9) has less in 1% of cases


def write_run(folder: Path, evaluations: int = 25) -> None:
    """A run of 2 core-hours, whose engine took 3600 core-seconds for 1e6 tokens; its completions have 50."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    u, rows, lines = rng.choice(DIFFICULTIES, 100), [], []
    for step in range(evaluations):
        worth = counted(rng.binomial(SAMPLES, LAW.reward(10 * step / evaluations) ** u))
        rows.append({
            "step": step, "compute/total": 2 * step / (evaluations - 1), "eval/pass_rate": np.mean(worth[1]),
            "eval/mean_tokens": 50, "train/rollout_tokens": 1e6 / evaluations, "compute/flops": 1e9 * step,
        })  # fmt: skip
        lines.append({"step": step, "set": "", "pass": worth, "maj": worth})
        lines.append({"step": step, "set": "far", "pass": {1: [0.5], 2: [1.0]}})
    # A resumed run evaluated these again; another step was never reached again.
    write_jsonl(folder / "metrics.jsonl", rows)
    stale = {"step": 3, "set": "", "pass": counted(np.zeros(100, int))}
    write_jsonl(folder / "held_out.jsonl", [stale | {"step": 999}, stale, *lines])
    roles = {"engine": {"states": {"generate": 3600, "idle": 99}}, "learner": {"states": {"generate": 9}}}
    (folder / "ledger.json").write_text(json.dumps({"unit": "core-hours", "roles": roles}))


def test_the_command_says_what_doubling_is_worth_and_for_how_many_questions_training_is_cheaper(
    command: Command, tmp_path: Path
) -> None:
    write_run(tmp_path / "run")
    printed = command("inference run --at 0.2 0.4 --json x.json --plot x.png")
    content = printed.json["run"]
    # 3600 s / 3600 / 1e6 tokens · 50 tokens
    assert content["completion_cost"] == pytest.approx(5e-5) and set(content) > {"pass@N", "maj@N"}
    (change,) = [d for d in content["pass@N"]["doublings"] if (d["n"], d["compute"]) == (4, 0.4)]
    value, questions = change["worth"]["value"], change["worth"]["value"] / (4 * 5e-5)
    said = f"At 0.4 core-hours, doubling N of pass@N from 4 to 8 is worth {value:.3g} ("
    assert said in printed.words
    assert f"training is the cheaper for more than {questions:,.0f}"[:-3] in printed.words
    first = content["pass@N"]["rewards"]["8"][0]
    assert first["compute"] == 0 and f"{first['value']:.3f}" in printed.words
    assert (tmp_path / "x.png").stat().st_size > 10_000
    by_flops = command("inference run --compute-column compute/flops --at 3e9").words
    assert "FLOPs of training." in by_flops and "questions" not in by_flops
    end = command("inference run --at 2").words
    assert "more than the 0 core-hours of training that were left in the run" in end


def test_a_later_evaluation_has_its_own_worth(command: Command, tmp_path: Path) -> None:
    """`python -m trainer.evaluate RUN --name many` and the run itself: the same numbers, the same tables."""
    write_run(tmp_path / "run")
    run, folder = tmp_path / "run", tmp_path / "run" / "evaluations" / "many"
    folder.mkdir(parents=True)
    before = command("inference run --at 0.4 --json x.json").json
    (run / "held_out.jsonl").rename(folder / "held_out.jsonl")
    text = (run / "metrics.jsonl").read_text().replace('"eval/', '"eval/many/')
    (folder / "results.jsonl").write_text(text)
    again = command("inference run --set many --at 0.4 --json x.json").json
    assert again["run"]["pass@N"] == before["run"]["pass@N"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("inference run --at 3", "--at 3: run was evaluated from 0 to 2"),
        ("inference run --set near", "has no held-out prompts of near; expected one of: far"),
        ("inference short", "short: 4 evaluations of 8 completions a prompt; expected 5 or more"),
        ("inference none", "none has no held_out.jsonl; expected a run folder of a run that records it"),
    ],
)
def test_what_has_no_worth_is_refused(line: str, error: str, command: Command, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    write_run(tmp_path / "short", 4)
    write_run(tmp_path / "none")
    (tmp_path / "none" / "held_out.jsonl").unlink()
    assert error in command(line, exit_code=2)
