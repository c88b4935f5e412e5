"""bench.gpu: its stages are commands that exist, one that fails stops no other, and its own run on a CPU."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from bench import harness
from bench.__main__ import benchmarks
from bench.gpu import stages, suite
from bench.harness import ROOT, read, run
from bench.learner.step import BATCHES, lengths, make_batch

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="promises of a machine without a GPU")


@pytest.mark.parametrize("name", suite.STAGES)
def test_every_stage_is_a_command_that_exists(name: str) -> None:
    program, *words = suite.STAGES[name][1].split()
    if program == "pytest":
        paths = [word for word in words if "/" in word]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    benchmark, *options = words
    module = import_module(f"bench.{benchmarks()[benchmark]}")
    values = harness.parser(benchmark, module).parse_args([*options, "--out=x.jsonl"])
    if benchmark == "gpu.stages":
        assert harness.chosen(values.only, stages.STAGES)
    if benchmark == "kernels.parts":
        parts = [part.__name__ for part in module.PARTS]
        assert set(values.only.split(",")) <= {*parts, "profile"}


def test_what_matters_first_takes_ten_minutes() -> None:
    """The limits of stages are about twice what they take."""
    assert sum(seconds for seconds, _ in list(suite.STAGES.values())[:10]) <= 1200


@pytest.mark.parametrize("name", ["packs", "long"])
def test_the_learners_batches_fill_packs_of_16k_tokens(name: str) -> None:
    p = BATCHES[name]
    counted = lengths(make_batch(p), p)
    if name == "long":
        assert counted["completions"] == 1 and 16_000 < counted["fed_ours"] <= 16_384
    else:
        assert counted["longest"] <= 4_224 and counted["fed_ours"] / counted["micro_batches"] > 12_000


def test_a_failing_stage_stops_no_other_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "DEVICE", "cuda")
    stages = {"machine": (60, "platform"), "ipc": (0.01, "this"), "body": (60, "absent")}
    monkeypatch.setattr(suite, "STAGES", stages)
    out = tmp_path / "gpu.jsonl"
    for calls in (1, 2):
        assert run("gpu", suite, [f"--out={out}"]) == 1
        ends = [row["ended"] for row in read(out)[1]]
        assert ends == ["passed", "failed: over its 0.01 s", "failed (1)"]
        assert len(out.read_text().splitlines()) == 2 + 2 * calls  # what has passed is not run again
    assert "No module named absent" in (tmp_path / "body.log").read_text()
    assert "failed: over its" in capsys.readouterr().out


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("stage", ["machine", "qwen3-0.6b", "ipc", "launcher"])
def test_the_stages_run_on_a_cpu(stage: str, tmp_path: Path) -> None:
    out = tmp_path / "record.jsonl"
    assert run("gpu.stages", stages, [f"--only={stage}", f"--out={out}"]) == 0
    head, (row,) = read(out)
    if stage == "launcher":
        assert row["unit"] == "core-hours" and row["killed_after"] >= stages.LAUNCHED_STEPS
    if stage == "qwen3-0.6b":
        assert row["kernels"] > 100 and row["step_s"] > 0 and row["estimated_gib"] > 0
    if stage == "machine":
        assert row["gb_per_s"]["within the card"] > 0 and head["versions"]["torch"] == torch.__version__
