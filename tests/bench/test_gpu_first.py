"""Promises of bench/gpu_first.sh: a line for each stage, none stops another, a failure is in the status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import first

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu_first.sh"
NAMES = re.findall(r"^stage (\S+)", SCRIPT.read_text(), re.M)


def script(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), str(out)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment,
    )  # fmt: skip


def test_without_a_gpu_every_stage_is_skipped_in_one_line(tmp_path: Path) -> None:
    done = script(tmp_path)
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines] == NAMES and len(NAMES) == 12
    assert all("skipped: no GPU" in line for line in lines)


def test_every_stages_command_exists() -> None:
    calls = re.findall(r"^stage \S+ \d+ (\S+)(.*)", SCRIPT.read_text(), re.M)
    assert {kind for kind, _ in calls} == first.STAGES.keys()
    for kind, arguments in calls:
        for path in arguments.split() if kind == "tests" else ():
            assert path.strip('"').startswith("--") or (ROOT / path).is_file(), path


@pytest.mark.slow
def test_a_failing_stage_stops_no_other_and_is_in_the_status(tmp_path: Path) -> None:
    broken = tmp_path / "python"  # its second stage fails
    broken.write_text(f'#!/bin/sh\n[ "$4" != "{tmp_path}/ipc.json" ] || exit 3\nexec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    done = script(tmp_path, PYTHON=str(broken), DRY_RUN="1", ONLY="machine ipc engine")
    ended = [re.split(r"\s{2,}|\s(?=passed|failed)", line)[:2] for line in done.stdout.splitlines()[-3:]]
    assert ended == [["machine", "passed"], ["engine", "passed"], ["ipc", "failed (3)"]]
    assert done.returncode == 1
    record = json.loads((tmp_path / "engine.json").read_text())
    assert record["same_tokens"] and (tmp_path / "engine.log").read_text()
    assert json.loads((tmp_path / "machine.json").read_text())["versions"]["torch"] == torch.__version__


def test_a_stage_that_fails_leaves_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(first.STAGES, "ipc", lambda arguments: [][0])
    assert first.main(["ipc", str(tmp_path / "ipc.json")]) == 1
    assert json.loads((tmp_path / "ipc.json").read_text())["error"].startswith("IndexError")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["profile", "syncs", "nccl", "ipc", "launcher"])
def test_the_stages_run_on_a_cpu(stage: str, tmp_path: Path) -> None:
    assert first.main([stage, str(tmp_path / "record.json"), "tiny"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    if stage == "launcher":
        assert record["unit"] == "core-hours" and record["steps"][-1] >= 2 * first.LAUNCHED_STEPS
    if stage == "profile":
        assert record["kernels"] > 100 and record["seconds"] > 0 and record["estimated_gib"] > 0
