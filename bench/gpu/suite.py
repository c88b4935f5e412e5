"""Stages to run on one GPU, important ones first: each is a process of its own, and its results are kept.

  python -m bench gpu --out OUT/gpu.jsonl                   goes on with what OUT lacks
  python -m bench gpu --out OUT/gpu.jsonl --only kernels    stages whose name contains one of these words

OUT gets STAGE.log of each stage, and STAGE.jsonl (of tests STAGE.xml), in which every case is saved once it
is measured: where a call is cut off, after the ten minutes of a lent card, the next one goes on. The first
ten stages take about ten minutes. A stage that fails or runs too long stops no other; the next call tries it
again, and the exit status is 1. Needs torch 2.11+, triton 3.6+, transformers and pytest; nothing is
downloaded. COMMIT: its name outside git.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import ROOT, Case, Row, chosen
from bench.measure import DEVICE
from bench.table import table
from trainer.config import ConfigError

OPTIONS: dict[str, Any] = {"only": ("", "comma-separated: stages whose name contains one of these")}


class Stage(NamedTuple):
    """The most seconds that a stage may take, the module that it runs, and its arguments."""

    seconds: float
    module: str
    arguments: tuple[str, ...]


def _tests(seconds: float, *options: str) -> Stage:
    return Stage(seconds, "pytest", ("-q", "-p", "no:cacheprovider", *options))


def _bench(seconds: float, *arguments: str) -> Stage:
    return Stage(seconds, "bench", arguments)


def _loss(seconds: float, n: int, h: int, v: int) -> Stage:
    shape = (f"--rows={n}", f"--hidden={h}", f"--vocab={v}", "--chunk=8192", "--max-seconds=10")
    return _bench(seconds, "kernels.compare", "--dtype=bfloat16", *shape)


def _step(seconds: float, model: str, batch: str, *more: str) -> Stage:
    return _bench(seconds, "learner", f"--model={model}", f"--batch={batch}", "--rounds=1", *more)


LARGE = ("--steps=3", "--checkpoint")  # 4B recomputes its activations, to fit
STAGES = {
    "machine": _bench(60, "gpu.stages", "--only=machine"),
    "flash": _tests(120, "tests/gpu/test_attention.py", "tests/trainer/learner/test_learner_cuda.py"),
    "kernel-tests": _tests(150, "tests/gpu/test_gpu.py", "tests/gpu/test_gpu_body.py"),
    "engine-tests": _tests(90, "tests/gpu/test_torch_engine_cuda.py"),
    "learner-0.6b": _bench(90, "gpu.stages", "--only=qwen3-0.6b"),
    "learner-4b": _bench(120, "gpu.stages", "--only=qwen3-4b"),
    "engine": _bench(90, "engine", "--model=qwen3-0.6b", "--rounds=3"),
    "body": _bench(60, "kernels.parts", "--only=body", "--rows=8192", "--hidden=2560"),
    "ipc": _bench(60, "gpu.stages", "--only=ipc"),
    "launcher": _bench(240, "gpu.stages", "--only=launcher"),
    "parts": _bench(180, "kernels.parts", "--only=limit,kernel,op,epilogue,objective,profile"),
    "kernels": _loss(150, 16384, 4096, 151936),
    "kernels-trl": _loss(90, 8192, 4096, 151936),  # the shape of TRL's issue 7244
    "kernels-h2048": _loss(90, 16384, 2048, 151936),
    "kernels-llama": _loss(90, 8192, 4096, 128256),
    "step-0.6b": _step(100, "qwen3-0.6b", "packs", "--steps=8"),
    "step-4b": _step(180, "qwen3-4b", "packs", *LARGE),
    "long-0.6b": _step(80, "qwen3-0.6b", "long", "--only=ours", "--steps=8"),
    "long-4b": _step(105, "qwen3-4b", "long", "--only=ours", *LARGE),
    "accuracy": _bench(120, "kernels.accuracy", "--backends=triton"),
    "all-tests": _tests(345, "--continue-on-collection-errors", "tests/gpu", "tests/kernels"),
}


def run(name: str, folder: Path) -> Row:
    """Run a stage in a process of its own, and say how it ended."""
    stage, start = STAGES[name], time.monotonic()
    result = f"--junitxml={folder / name}.xml" if stage.module == "pytest" else f"--out={folder / name}.jsonl"
    command = [sys.executable, "-m", stage.module, *stage.arguments, result]
    with (folder / f"{name}.log").open("a") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=log,
                stderr=subprocess.STDOUT, timeout=stage.seconds,
            ).returncode  # fmt: skip
            ended = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            ended = f"failed: over its {stage.seconds:g} s"
    return {"ended": ended, "seconds": time.monotonic() - start, "failed": ended != "passed"}


def cases(options: Namespace) -> Iterator[Case]:
    """Every stage."""
    if DEVICE == "cpu":
        raise ConfigError("torch sees no GPU; each stage needs one")
    if not options.out:
        raise ConfigError("expected --out FILE, whose folder gets the results")
    for name in chosen(options.only, STAGES):
        yield name, partial(run, name, options.out.parent.resolve())


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each stage."""
    return table(("stage", "s", "note"), [[r["case"], f"{r['seconds']:.0f}", r["ended"]] for r in rows])
