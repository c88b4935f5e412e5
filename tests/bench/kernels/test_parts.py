"""parts.py times every part, and a line or a part that fails stops no other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.harness import ROOT, run
from bench.kernels import parts
from bench.kernels.parts import Line, measure, measured
from bench.kernels.problem import LossProblem, make_problem

TINY = ["--rows=4", "--hidden=16", "--vocab=40", "--chunk=4"]


@pytest.mark.slow
def test_every_line_runs_in_tritons_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = ["-m", "bench", "kernels.parts", *TINY, "--only=limit,kernel,op,epilogue"]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path / "p.jsonl")],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()[1:]]
    lines = [line for row in rows for line in row["lines"]]
    assert [line for line in lines if "error" in line] == []
    names = {line["name"] for line in lines}
    assert {"copy", "row_stats", "single_pass", "score", "fused_epilogue", "two-pass, chunks of 4"} <= names


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_old_times_stand_beside_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.jsonl"
    assert run("kernels.parts", parts, [*TINY, f"--out={out}"]) == 0
    assert run("kernels.parts", parts, [*TINY, "--only=body", f"--against={out}"]) == 0
    first, second = capsys.readouterr().out.split("| part ")[1:]
    assert "rror" not in first + second
    timed = {line.split()[1] for line in first.splitlines()[2:]}
    assert timed - {"epilogue"} == {"limit", "kernel", "op", "body"}
    old, new = (next(x for x in text.splitlines() if "swiglu, ours" in x) for text in (first, second))
    assert "ms before" in second and old.split("|")[3].strip() == new.split("|")[5].strip()


def test_a_part_that_fails_keeps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: LossProblem, chunk: int) -> Iterator[Line]:
        yield Line("good", lambda: None)
        yield Line("bad", lambda: 1 / 0)
        raise torch.OutOfMemoryError("no room for the logits")

    good, bad, end = measured(broken, make_problem(4, 8, 20, torch.bfloat16), 4)["lines"]
    assert (
        good["ms"] >= 0 and "ZeroDivisionError" in bad["error"] and "no room for the logits" in end["error"]
    )


def test_rates_are_work_over_time() -> None:
    row = measure(Line("sleep", lambda: sum(range(20000)), flop=2e9, moved=3e9))
    assert row["tflop_per_s"] == pytest.approx(2 / row["ms"])
    assert row["tb_per_s"] == pytest.approx(3 / row["ms"])


def test_what_a_call_overwrites_is_restored_before_each_of_them() -> None:
    z, seen = torch.zeros(3), list[float]()

    def overwrite() -> None:
        seen.append(float(z.sum()))
        z.fill_(7)

    measure(Line("in place", overwrite, before=z.zero_))
    assert seen == [0] * (1 + parts.ROUNDS)  # one call is not timed
    lines = {line.name: line for line in parts.kernel(make_problem(4, 16, 40, torch.bfloat16), 4)}
    assert lines["row_grads"].before
