"""The probe times every part, and a part that fails stops no other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.kernels import probe
from bench.kernels.problem import LossProblem, make_problem
from bench.records import ROOT


def test_every_line_runs_in_tritons_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = ["-m", "bench.kernels.probe", "--shape", "4", "16", "40", "--chunk", "4"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path / "p.json")],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    cases = json.loads((tmp_path / "p.json").read_text())["cases"]
    assert [case for case in cases if "error" in case] == []
    names = {case["name"] for case in cases}
    assert {"copy", "row_stats", "single_pass", "score", "fused_epilogue", "two-pass, chunks of 4"} <= names


def test_a_part_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: LossProblem, chunk: int) -> Iterator[probe.Line]:
        raise torch.OutOfMemoryError("no room for the logits")

    def never(p: LossProblem, chunk: int) -> Iterator[probe.Line]:
        yield from ()

    monkeypatch.setattr(probe, "limits", broken)
    for name in ("row_kernels", "epilogues"):
        monkeypatch.setattr(probe, name, never)
    p = make_problem(4, 8, 20, torch.bfloat16)
    records = [probe.measure(line, "cpu", 1) for line in probe.lines(p, 4)]
    assert "no room for the logits" in records[0]["error"]
    assert [r["name"] for r in records[1:]][:2] == ["scoring", "two-pass, chunks of 2"]


def test_rates_are_work_over_time() -> None:
    line = probe.Line("limit", "sleep", lambda: sum(range(20000)), flop=2e9, moved=3e9)
    record = probe.measure(line, "cpu", 3)
    seconds = record["ms"]["median"] / 1e3
    assert record["tflop_per_s"] == pytest.approx(0.002 / seconds)
    assert record["tb_per_s"] == pytest.approx(0.003 / seconds)


def test_what_a_call_overwrites_is_restored_before_each_of_them() -> None:
    z = torch.zeros(3)
    seen: list[float] = []

    def overwrite() -> None:
        seen.append(float(z.sum()))
        z.fill_(7)

    probe.measure(probe.Line("rows", "in place", overwrite, before=z.zero_), "cpu", 3)
    assert seen == [0, 0, 0, 0]  # one call is not timed


def test_the_row_kernels_that_write_in_place_get_their_logits_back() -> None:
    pytest.importorskip("triton")
    lines = {line.name: line for line in probe.row_kernels(make_problem(4, 16, 40, torch.bfloat16), 4)}
    assert lines["row_grads"].before and lines["single_pass"].before


def test_without_a_gpu_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.main([]) == 1
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
