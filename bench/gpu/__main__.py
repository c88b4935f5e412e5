"""What one GPU can show: without a STAGE its first ten minutes, each stage saved when it ends.

  python -m bench gpu --out OUT                  machine, tests, engine, learner, a run: ten minutes
  python -m bench gpu --out OUT kernels          the loss: providers and variants at three shapes, its parts
  python -m bench gpu --out OUT tests            errors against float64, then tests/gpu and tests/kernels
  python -m bench gpu --out OUT trainer          the learner's step on Qwen3-0.6B and 4B, and the plain loop's
  python -m bench gpu --out OUT --dry-run        tiny sizes, on the CPU too

OUT gets STAGE.json and STAGE.log of each stage, and summary.txt; kernels and trainer write theirs after every
case, and STAGE.txt with the tables. Each of the three ends within 8 minutes. A stage that fails or runs too
long stops no other; the exit status is 1 if one failed. Without a GPU all are skipped, and it is 0. Needs
torch 2.11+, triton 3.6+, transformers and pytest; nothing is downloaded. COMMIT: its name outside git.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench import records
from bench.gpu import first
from bench.gpu.kernels import kernels_stage, tests_stage
from bench.gpu.stage import Stage
from bench.gpu.trainer import trainer_stage
from bench.kernels.providers import peer_versions
from bench.measure import machine
from bench.records import ROOT, Record

SUITE = {"kernels": kernels_stage, "tests": tests_stage, "trainer": trainer_stage}
SUITE_S = 465.0


@dataclass(frozen=True, slots=True)
class FirstStage:
    """A stage of the first ten minutes: the most seconds it may take, and what it does."""

    seconds: float
    call: Callable[[], Record]


def _tests(*paths: str) -> Callable[[], Record]:
    return partial(first.tests_stage, paths)


FIRST = {
    "machine": FirstStage(60, first.machine_stage),
    "flash": FirstStage(
        120, _tests("tests/gpu/test_attention.py", "tests/trainer/learner/test_learner_cuda.py")
    ),
    "kernel-tests": FirstStage(150, _tests("tests/gpu/test_gpu.py", "tests/gpu/test_gpu_body.py")),
    "engine-tests": FirstStage(90, _tests("tests/gpu/test_torch_engine_cuda.py")),
    "engine": FirstStage(60, first.engine_stage),
    "learner-0.6b": FirstStage(90, partial(first.profile_stage, "qwen3-0.6b")),
    "learner-4b": FirstStage(120, partial(first.profile_stage, "qwen3-4b")),
    "body": FirstStage(90, _tests("bench/kernels/bench_body.py", "--benchmark-only")),
    "syncs": FirstStage(60, partial(first.syncs_stage, "qwen3-0.6b")),
    "nccl": FirstStage(60, first.nccl_stage),
    "ipc": FirstStage(60, first.ipc_stage),
    "launcher": FirstStage(240, first.launcher_stage),
}


def run_stage(name: str, out: Path, dry: bool) -> int:
    """Run a stage in this process; write and print its record. 1 if it has failed."""
    if name in SUITE:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        head: Record = {"stage": name, "dry_run": dry, "machine": machine(device)}
        head |= {"versions": peer_versions(), "commit": records.commit()}
        stage = Stage(out / f"{name}.json", head, dry)
        stage.save()
        return SUITE[name](stage)
    start = time.monotonic()
    try:
        record = FIRST[name].call()
    except Exception as error:
        traceback.print_exc()
        record = {"error": records.reason(error), "failed": True}
    seconds = round(time.monotonic() - start, 1)
    record |= {"stage": name, "seconds": seconds, "commit": records.commit()}
    records.write(out / f"{name}.json", record)
    print(json.dumps(record, indent=1))
    return int(bool(record.get("failed") or record.get("exit")))


def started(name: str, out: Path, dry: bool, environment: dict[str, str]) -> str:
    """Run a stage in a process of its own, and say how it ended."""
    limit = SUITE_S if name in SUITE else FIRST[name].seconds
    command = [sys.executable, "-m", "bench.gpu", "--here", "--out", str(out), name, *["--dry-run"] * dry]
    with (out / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            return f"failed: over its {limit:g} s"
    return "passed" if code == 0 else f"failed ({code})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; the exit status."""
    p = records.parser("gpu", __doc__)
    names = [*FIRST, *SUITE]
    p.add_argument(
        "stage", nargs="*", metavar="STAGE", help=f"of: {', '.join(names)} (the first ten minutes)"
    )
    p.add_argument("--out", type=Path, required=True, help="folder for the results")
    p.add_argument("--dry-run", action="store_true", help="tiny sizes, on the CPU too")
    text = "folder of wheels of the peers: liger_kernel, cut_cross_entropy, trl ..."
    p.add_argument("--wheels", type=Path, metavar="FOLDER", help=text)
    p.add_argument("--here", action="store_true", help="run the stage in this process, without a limit")
    args = p.parse_args(argv)
    if unknown := [name for name in args.stage if name not in names]:
        raise SystemExit(f"stage {', '.join(unknown)}: expected some of {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    if args.here:
        return max(run_stage(name, args.out, args.dry_run) for name in args.stage)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if args.dry_run and not gpu:
        environment["TRITON_INTERPRET"] = "1"  # no GPU: Triton's kernels run in its interpreter
    ends = []
    with tempfile.TemporaryDirectory() as site:
        if args.wheels:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            subprocess.run([*pip, "--target", site, *args.wheels.glob("*.whl")], check=True)
            environment["PYTHONPATH"] = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])
        with (args.out / "summary.txt").open("w") as summary:
            for name in args.stage or FIRST:
                start, ended = time.monotonic(), "skipped: no GPU"
                if gpu or args.dry_run:
                    ended = started(name, args.out.resolve(), args.dry_run, environment)
                line = f"{name:16} {ended:24} {time.monotonic() - start:4.0f} s"
                print(line, flush=True)
                print(line, file=summary, flush=True)
                ends.append(ended)
                if (tables := args.out / f"{name}.txt").exists():
                    print(tables.read_text())
    return int(any(ended.startswith("failed") for ended in ends))


if __name__ == "__main__":
    sys.exit(main())
