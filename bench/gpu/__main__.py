"""What one GPU can show: without a STAGE its first ten minutes, each stage in a process of its own.

  python -m bench gpu --out OUT                  machine, tests, learner, a run: ten minutes
  python -m bench gpu --out OUT kernels          the loss beside its peers at three shapes, and its parts
  python -m bench gpu --out OUT tests            errors against float64, then tests/gpu and tests/kernels
  python -m bench gpu --out OUT trainer          the learner's step on Qwen3-0.6B and 4B, and the plain loop's

OUT gets STAGE.log of each stage, STAGE.json (of tests STAGE.xml) and summary.txt. Each of the three ends
within 8 minutes. A stage that fails or runs too long stops no other; the exit status is 1 if one failed.
Without a GPU all are skipped, and it is 0. Needs torch 2.11+, triton 3.6+, transformers and pytest; nothing
is downloaded. COMMIT: its name outside git.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench import records
from bench.records import ROOT


class Stage(NamedTuple):
    """The most seconds that a stage may take, the module that it runs, and its options."""

    seconds: float
    module: str
    options: tuple[str, ...]


def _tests(seconds: float, *options: str) -> Stage:
    return Stage(seconds, "pytest", ("-q", "-p", "no:cacheprovider", *options))


def _loss(seconds: float, n: int, h: int, v: int) -> Stage:
    shape = (f"--rows={n}", f"--hidden={h}", f"--vocab={v}", "--chunk=8192", "--max-seconds=10")
    return Stage(seconds, "bench.kernels.compare", ("--device=cuda", "--dtype=bfloat16", *shape))


def _step(seconds: float, model: str, batch: str, *more: str) -> Stage:
    options = (f"--model={model}", f"--batch={batch}", "--device=cuda", "--rounds=1", *more)
    return Stage(seconds, "bench.learner", options)


def _own(seconds: float, *options: str) -> Stage:
    return Stage(seconds, "bench.gpu.stages", options)


LARGE = ("--steps=3", "--checkpoint")  # 4B recomputes its activations, to fit
STAGES = {
    "machine": _own(60, "machine"),
    "flash": _tests(120, "tests/gpu/test_attention.py", "tests/trainer/learner/test_learner_cuda.py"),
    "kernel-tests": _tests(150, "tests/gpu/test_gpu.py", "tests/gpu/test_gpu_body.py"),
    "engine-tests": _tests(90, "tests/gpu/test_torch_engine_cuda.py"),
    "learner-0.6b": _own(90, "profile", "--model=qwen3-0.6b"),
    "learner-4b": _own(120, "profile", "--model=qwen3-4b"),
    "body": _tests(90, "bench/kernels/bench_body.py", "--benchmark-only"),
    "ipc": _own(60, "ipc"),
    "launcher": _own(240, "launcher"),
    "kernels": _loss(150, 16384, 4096, 151936),
    "probe": Stage(150, "bench.kernels.probe", ()),
    "kernels-h2048": _loss(90, 16384, 2048, 151936),
    "kernels-llama": _loss(90, 8192, 4096, 128256),
    "accuracy": Stage(120, "bench.kernels.accuracy", ("--device=cuda", "--backends=triton")),
    "all-tests": _tests(345, "--continue-on-collection-errors", "tests/gpu", "tests/kernels"),
    "step-0.6b": _step(100, "qwen3-0.6b", "packs", "--steps=8"),
    "step-4b": _step(180, "qwen3-4b", "packs", *LARGE),
    "long-0.6b": _step(80, "qwen3-0.6b", "long", "--only=ours", "--steps=8"),
    "long-4b": _step(105, "qwen3-4b", "long", "--only=ours", *LARGE),
}
GROUPS = {
    "first": tuple(STAGES)[:9],
    "kernels": ("kernels", "probe", "kernels-h2048", "kernels-llama"),
    "tests": ("accuracy", "all-tests"),
    "trainer": ("step-0.6b", "step-4b", "long-0.6b", "long-4b"),
}


def run(name: str, out: Path) -> str:
    """Run a stage in a process of its own, and say how it ended."""
    stage = STAGES[name]
    result = f"--junitxml={out / name}.xml" if stage.module == "pytest" else f"--out={out / name}.json"
    command = [sys.executable, "-m", stage.module, *stage.options, result]
    with (out / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=log,
                stderr=subprocess.STDOUT, timeout=stage.seconds,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"failed: over its {stage.seconds:g} s"
    return "passed" if code == 0 else f"failed ({code})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; the exit status."""
    p = records.parser("gpu", __doc__)
    names = [*GROUPS, *(name for name in STAGES if name not in GROUPS)]
    p.add_argument("stage", nargs="*", metavar="STAGE", help=f"of: {', '.join(names)} (first)")
    p.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = p.parse_args(argv)
    if unknown := [name for name in args.stage if name not in names]:
        raise SystemExit(f"stage {', '.join(unknown)}: expected some of {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    ends = []
    with (args.out / "summary.txt").open("w") as summary:
        for name in (stage for asked in args.stage or ["first"] for stage in GROUPS.get(asked, (asked,))):
            start = time.monotonic()
            ended = run(name, args.out.resolve()) if torch.cuda.is_available() else "skipped: no GPU"
            line = f"{name:16} {ended:24} {time.monotonic() - start:4.0f} s"
            print(line, flush=True)
            print(line, file=summary, flush=True)
            ends.append(ended)
    return int(any(ended.startswith("failed") for ended in ends))


if __name__ == "__main__":
    sys.exit(main())
