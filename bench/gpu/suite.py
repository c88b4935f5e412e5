"""Stages to run on one GPU, important ones first: each in a process of its own. [10 min a call]

  python -m bench gpu --out OUT/gpu.jsonl                   goes on with what OUT lacks
  python -m bench gpu --out OUT/gpu.jsonl --only kernels    stages whose name contains one of these words

OUT gets STAGE.log of each stage, and STAGE.jsonl (of tests STAGE.xml), in which every case is saved once it
is measured: where a call is cut off, after the ten minutes of a lent card, the next one goes on. The first
ten stages take about ten minutes. A stage that fails or runs too long stops no other; the next call tries it
again, and the exit status is 1. Needs torch 2.11+, triton 3.6+, transformers and pytest; nothing is
downloaded. COMMIT: its name outside git.
"""

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Case, Row, chosen
from bench.measure import DEVICE
from bench.table import table
from trainer.config import ConfigError

OPTIONS: dict[str, Any] = {"only": ("", "comma-separated: stages whose name contains one of these")}


TESTS = "pytest -q -p no:cacheprovider"
LOSS = "bench kernels.compare --dtype=bfloat16 --chunk=8192 --max-seconds=10"
STEP = "bench learner --rounds=1"
LARGE = "--steps=3 --checkpoint"  # 4B recomputes its activations, to fit
STAGES = {  # the most seconds that a stage may take, and the module that it runs with its arguments
    "machine": (60, "bench gpu.stages --only=machine"),
    "flash": (120, f"{TESTS} tests/gpu/test_attention.py tests/trainer/learner/test_learner_cuda.py"),
    "kernel-tests": (150, f"{TESTS} tests/gpu/test_gpu.py tests/gpu/test_gpu_body.py"),
    "engine-tests": (90, f"{TESTS} tests/gpu/test_torch_engine_cuda.py"),
    "learner-0.6b": (90, "bench gpu.stages --only=qwen3-0.6b"),
    "learner-4b": (120, "bench gpu.stages --only=qwen3-4b"),
    "engine": (90, "bench engine --model=qwen3-0.6b --rounds=3"),
    "body": (60, "bench kernels.parts --only=body --rows=8192 --hidden=2560"),
    "ipc": (60, "bench gpu.stages --only=ipc"),
    "launcher": (240, "bench gpu.stages --only=launcher"),
    "parts": (180, "bench kernels.parts --only=limit,kernel,op,epilogue,profile"),
    "kernels": (150, f"{LOSS} --rows=16384 --hidden=4096 --vocab=151936"),
    "kernels-trl": (90, f"{LOSS} --rows=8192 --hidden=4096 --vocab=151936"),  # of TRL's issue 7244
    "kernels-h2048": (90, f"{LOSS} --rows=16384 --hidden=2048 --vocab=151936"),
    "kernels-llama": (90, f"{LOSS} --rows=8192 --hidden=4096 --vocab=128256"),
    "step-0.6b": (100, f"{STEP} --model=qwen3-0.6b --batch=packs --steps=8"),
    "step-4b": (180, f"{STEP} --model=qwen3-4b --batch=packs {LARGE}"),
    "long-0.6b": (80, f"{STEP} --model=qwen3-0.6b --batch=long --only=ours --steps=8"),
    "long-4b": (105, f"{STEP} --model=qwen3-4b --batch=long --only=ours {LARGE}"),
    "accuracy": (120, "bench kernels.accuracy --backends=triton"),
    "all-tests": (345, f"{TESTS} --continue-on-collection-errors tests/gpu tests/kernels"),
}


def run(name: str, folder: Path) -> Row:
    """Run a stage in a process of its own, and say how it ended."""
    (limit, command), start = STAGES[name], time.monotonic()
    result = f"--junitxml={folder / name}.xml" if "pytest" in command else f"--out={folder / name}.jsonl"
    with (folder / f"{name}.log").open("a") as log:
        try:
            code = subprocess.run(
                [sys.executable, "-m", *command.split(), result], cwd=ROOT, stdout=log,
                stderr=subprocess.STDOUT, timeout=limit, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            ).returncode  # fmt: skip
            ended = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            ended = f"failed: over its {limit:g} s"
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
