"""bench.gpu: its stages are commands that exist, one that fails stops no other, and its own run on a CPU."""

import argparse
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import stages
from bench.learner.step import BATCHES, lengths, make_batch
from bench.records import ROOT

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="promises of a machine without a GPU")


@pytest.mark.parametrize("name", gpu.STAGES)
def test_every_stage_is_a_command_that_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = gpu.STAGES[name]
    if stage.module == "pytest":
        paths = [option for option in stage.options if "/" in option]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    parse = argparse.ArgumentParser.parse_args

    def end(parser: argparse.ArgumentParser, argv: list[str]) -> None:
        parse(parser, argv)
        raise EndedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", end)
    module = import_module("bench.learner.throughput" if stage.module == "bench.learner" else stage.module)
    with pytest.raises(EndedError):  # SystemExit if it lacks an option
        module.main([*stage.options, "--out=x.json"])


class EndedError(Exception):
    """Raised where a command has parsed its options."""


def test_the_groups_have_every_stage_once_and_end_in_time() -> None:
    assert sorted(name for group in gpu.GROUPS.values() for name in group) == sorted(gpu.STAGES)
    for group in ("kernels", "tests", "trainer"):
        assert sum(gpu.STAGES[name].seconds for name in gpu.GROUPS[group]) <= 480


@pytest.mark.parametrize("name", ["packs", "long"])
def test_the_learners_batches_fill_packs_of_16k_tokens(name: str) -> None:
    p = BATCHES[name]
    counted = lengths(make_batch(p), p)
    if name == "long":
        assert counted["completions"] == 1 and 16_000 < counted["fed_ours"] <= 16_384
    else:
        assert counted["longest"] <= 4_224 and counted["fed_ours"] / counted["micro_batches"] > 12_000


@on_cpu
def test_without_a_gpu_every_stage_is_skipped_in_one_line(tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 0
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == list(gpu.GROUPS["first"])
    assert all("skipped: no GPU" in line for line in lines)


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="stage nonsense: expected some of first, kernels"):
        gpu.main(["--out", str(tmp_path), "nonsense"])


def test_a_failing_stage_stops_no_other_and_is_in_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, seconds, module in (("machine", 60, "platform"), ("ipc", 0.01, "this"), ("body", 60, "absent")):
        monkeypatch.setitem(gpu.STAGES, name, gpu.Stage(seconds, module, ()))
    assert gpu.main(["--out", str(tmp_path), "machine", "ipc", "body"]) == 1
    ends = [re.split(r"\s{2,}", line)[:2] for line in capsys.readouterr().out.splitlines()]
    assert ends == [["machine", "passed"], ["ipc", "failed: over its 0.01 s"], ["body", "failed (1)"]]
    assert "No module named absent" in (tmp_path / "body.log").read_text()


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("stage", ["machine", "profile", "ipc", "launcher"])
def test_the_stages_run_on_a_cpu(stage: str, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    assert stages.main([stage, f"--out={out}"]) == 0
    record = json.loads(out.read_text())
    if stage == "launcher":
        assert record["unit"] == "core-hours" and record["killed_after"] >= stages.LAUNCHED_STEPS
    if stage == "profile":
        assert record["kernels"] > 100 and record["step_s"] > 0 and record["estimated_gib"] > 0
    if stage == "machine":
        assert record["versions"]["torch"] == torch.__version__
