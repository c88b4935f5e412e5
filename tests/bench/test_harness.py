"""The harness of all benchmarks: nothing is lost or measured twice, errors are lines, wrong use is said."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench import harness
from bench.__main__ import benchmarks, main
from bench.harness import Row, read, run


def square(x: int) -> Row:
    return {"square": x * x, "ratio": float("nan")}


def fake(measure: Callable[[int], Row | None] = square, **more: Any) -> ModuleType:
    """A benchmark whose cases are the numbers below `runs`."""

    def cases(options: Namespace) -> Iterator[harness.Case]:
        for i in range(options.runs):
            yield f"case {i}", partial(measure, i)

    def describe(head: Row, rows: list[Row]) -> str:
        return f"{head['options']['scale']:g}: {[row['square'] for row in rows]}"

    options = {"runs": (3, "cases"), "scale": (1.0, "of nothing"), "quick": (False, "nothing")}
    module = ModuleType("fake")
    vars(module).update({"OPTIONS": options, "cases": cases, "describe": describe} | more)
    return module


def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, seen = tmp_path / "a" / "x.jsonl", list[int]()

    def measure(i: int) -> Row:
        seen.append(i)
        if len(seen) == 2:
            raise RuntimeError("cannot do\nthis")
        if len(seen) == 3:
            raise KeyboardInterrupt
        return square(i)

    with pytest.raises(KeyboardInterrupt):
        run("fake", fake(measure), [f"--out={out}"])
    assert [row["case"] for row in read(out)[1]] == ["case 0", "case 1"]
    with out.open("a") as file:
        file.write('{"case": "case 2", "squ')  # killed while it wrote
    assert run("fake", fake(measure), [f"--out={out}", "--runs=4"]) == 0
    assert seen == [0, 1, 2, 1, 2, 3]  # what failed is tried again
    head, rows = read(out)
    assert [row["square"] for row in rows] == [0, 1, 4, 9] and rows[0]["ratio"] is None  # JSON has no NaN
    assert head["command"] == f"python -m bench fake --out={out}" and {"machine", "versions", "commit"} < set(
        head
    )
    assert capsys.readouterr().out == "1: [0, 1, 4, 9]\n"
    assert run("fake", fake(), [f"--table={out}"]) == 0 and "[0, 1, 4, 9]" in capsys.readouterr().out
    assert run("fake", fake(), [f"--out={out}", "--scale=2"]) == 1
    assert "differs in {'scale'}; expected the same options" in capsys.readouterr().err


def test_errors_are_lines_and_what_is_not_installed_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def missing(i: int) -> Row | None:
        if i == 0:
            raise ModuleNotFoundError("No module named 'x'")
        return square(i) if i == 1 else None

    assert run("fake", fake(missing), []) == 0
    assert capsys.readouterr().out == "1: [1]\ncase 0: ModuleNotFoundError: No module named 'x'\n"

    def broken(i: int) -> Row:
        raise ValueError("wrong")

    assert run("fake", fake(broken), []) == 1
    assert run("fake", fake(lambda i: square(i) | {"failed": i == 1}), []) == 1


@pytest.mark.slow
def test_simulations_run_on_all_cores_and_stay_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake", fake(PARALLEL=True), ["--processes=2"]) == 0
    assert capsys.readouterr().out == "1: [0, 1, 4]\n"


def test_the_tracked_record_is_made_anew_and_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    published: list[int] = []
    module = fake(RECORD="x-{runs}.jsonl", publish=lambda head, rows: published.append(len(rows)))
    assert run("fake", module, []) == 0 and not list(tmp_path.iterdir()) and not published
    for _ in range(2):
        assert run("fake", module, ["--record", "--runs=2"]) == 0
    assert len((tmp_path / "x-2.jsonl").read_text().splitlines()) == 3 and published == [2, 2]


WRONG_USE = [  # benchmark, options, what the error says
    ("fake", "--runs=0", "--runs is 0; expected at least 1"),
    ("fake", "--scale=-1", "--scale is -1; expected at least 0"),
    ("fake", "--table=README.md", "README.md"),
    ("gpu_hours", "--models=9b", "expected some of"),
    ("gpu_hours", "--curve-head=nobody", "expected one of"),
    ("gpu_hours", "--length=10", "above --prompt"),
    ("pipeline", "--k=a", "whole numbers from 0 on"),
    ("pipeline", "--k=-1", "whole numbers from 0 on"),
    ("pipeline", "--devices=1", "expected 2 or more"),
    ("pipeline", "--mean=100 --p95=50", "--mean 100 --p95 50: no log-normal"),
    ("pipeline", "--engine-rate=1:x", "SEQUENCES:TOKENS/S"),
    ("pipeline", "--engine-rate=1:5", "two points or more"),
    ("learner", "--only=theirs", "expected one of ours, lora, plain"),
    ("kernels.parts", "--only=nothing", "no name contains that"),
]


@pytest.mark.parametrize(("name", "options", "problem"), WRONG_USE)
def test_wrong_options_say_what_was_expected(
    name: str, options: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = fake() if name == "fake" else import_module(f"bench.{benchmarks()[name]}")
    assert run(name, module, options.split()) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the promise of a machine without a GPU")
def test_without_a_gpu_its_suite_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", f"--out={tmp_path / 'gpu.jsonl'}"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(harness.ConfigError, match="expected the record of a benchmark"):
        read(path)


def test_calls_take_turns_and_each_round_begins_with_another() -> None:
    cases = list(harness.in_turns(["a", "b", "c"], 2, lambda name: {"value": ord(name)}))
    assert [name[0] for name, _ in cases] == list("abcbca") and cases[3][0] == "b: round 2"
    rows = [{"case": case, **(measure() or {})} for case, measure in cases]
    assert harness.by_round(rows[:1], "value") == {"1": 97}
    assert harness.median_and_range([3, 1, 8], ".1f") == "3.0 (1.0 to 8.0)"


def test_only_takes_a_whole_name_or_words() -> None:
    names = ["learner, training, killed", "engine, training, killed", "learner, ending, frozen"]
    assert harness.chosen("learner, training", names) == names[:1]
    assert harness.chosen("frozen,engine", names) == names[1:] and harness.chosen("", names) == names


def test_every_benchmark_is_listed_and_has_what_the_harness_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert {"learner", "gpu", "pipeline", "validation", "faults", "kernels.compare"} < set(benchmarks())
    for name, path in benchmarks().items():
        module = import_module(f"bench.{path}")
        assert (
            f"  {name} " in text
            and text.count("min]") > 10
            and callable(module.cases)
            and callable(module.describe)
        )
        assert f"python -m bench {name}" in harness.parser(name, module).format_help()
    assert main(["nonsense"]) == 2
    assert "expected one of: beside, " in capsys.readouterr().err


def test_outside_a_git_checkout_the_commit_is_that_of_the_environment_or_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.delenv("COMMIT", raising=False)
    assert harness.commit() == "unknown: not in a git checkout"
    monkeypatch.setenv("COMMIT", "abc1234")
    assert harness.commit() == "abc1234"
