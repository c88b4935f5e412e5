"""The GPU suite's stages; bench/gpu_suite.sh starts it and explains each argument.

tests    the error of mm(out_dtype=float32) beside ours, then tests/gpu and tests/kernels
kernels  the same error, then time, memory and gradient error of every provider and variant at three shapes,
         and the time of every part of ours (bench.kernels.probe)
trainer  our learner's step on Qwen3-0.6B and 4B: tokens/s, MFU, peak memory; the plain loop's after that

OUT/STAGE.json is written after every case, so that a stage that is cut short keeps what it measured.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import records
from bench.kernels import accuracy
from bench.kernels.gpu_stage import accuracy_first, device, kernels_stage
from bench.kernels.providers import peer_versions
from bench.learner.gpu_stage import trainer_stage
from bench.measure import machine
from bench.records import ROOT, Record
from bench.stage import BUDGET_S, Stage


def tests_stage(stage: Stage) -> int:
    """Accuracy, then pytest; its exit status."""
    accuracy_first(stage, ["gradients"] if stage.dry else list(accuracy.CHECKS))
    folders = ["tests/kernels/test_aggregation.py"] if stage.dry else ["tests/gpu", "tests/kernels"]
    report = stage.path.with_name("tests.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    result: Record = {"folders": folders}
    stage.record["pytest"] = result
    try:
        result["exit"] = subprocess.run(
            [*command, "--continue-on-collection-errors", *folders], cwd=ROOT, timeout=max(30, stage.left)
        ).returncode
    except subprocess.TimeoutExpired:
        result["error"] = f"stopped when the stage's {BUDGET_S:.0f} s were over; tests.log has the start"
    if report.exists():
        result |= junit(report)
        report.unlink()
    stage.save()
    print({key: value for key, value in result.items() if key != "failed"})
    return int(result.get("exit", 1))


def junit(report: Path) -> Record:
    """Counts and failures of a junit file."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failures = []
    for case in suite.iter("testcase"):
        for failure in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append({"test": name, "message": (failure.get("message") or "")[:300]})
    return counts | {"failed": failures}


STAGES = {"tests": tests_stage, "kernels": kernels_stage, "trainer": trainer_stage}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage."""
    p = records.parser("kernels.gpu_suite", __doc__)
    p.add_argument("out", type=Path, help="folder for the results")
    p.add_argument("stage", choices=STAGES)
    p.add_argument("--dry-run", action="store_true", help="tiny shapes, on the CPU too")
    args = p.parse_args(argv)
    if not torch.cuda.is_available() and not args.dry_run:
        raise SystemExit(
            f"stage {args.stage} needs a GPU, torch sees none; DRY_RUN=1 tries it at tiny shapes"
        )
    record = {
        "stage": args.stage,
        "dry_run": args.dry_run,
        "machine": machine(device()),
        "versions": peer_versions(),
        "commit": records.commit(),
    }
    stage = Stage(args.out / f"{args.stage}.json", record, args.dry_run)
    stage.save()
    return STAGES[args.stage](stage)


if __name__ == "__main__":
    sys.exit(main())
