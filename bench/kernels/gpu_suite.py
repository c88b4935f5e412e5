"""The GPU suite's stages; started by gpu_suite.sh, which says what each argument is.

tests    the error of mm(out_dtype=float32) beside ours, then tests/gpu and tests/kernels
kernels  the same error, then time, memory and gradient error of every provider and variant at three shapes
trainer  our learner's step on Qwen3-0.6B and 4B: tokens/s, MFU, peak memory; the plain loop's after that

STAGE.json is written after every case, so whatever ends a stage, what was measured is there.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kernels import accuracy, cases
from bench.kernels.cases import Case, Gemms
from bench.kernels.problem import Answer, Problem, errors, make_problem, solve, subset
from bench.kernels.suite_table import kernels_text
from bench.learner.gpu_stage import trainer_stage
from bench.measure import ROOT, commit, cuda_peak_bytes, machine, milliseconds, reason, summary, write_json

SHAPES = ((16384, 4096, 151936), (16384, 2048, 151936), (8192, 4096, 128256))  # N, H, V
CHUNK = 8192  # rows, of ours and of every peer that has chunks
SWEEP = (1024, 2048, 4096, 8192, 16384)
ERROR_ROWS = 1024  # rows of the float64 comparison
BUDGET_S = 420.0  # of a stage; cases that no longer fit are recorded as skipped
ROUNDS_MS = 2500.0  # of each case, in 4 to 20 rounds
DRY_SHAPES = ((16, 16, 97), (8, 16, 64))
DRY_ROUNDS = 1


@dataclass(slots=True)
class Stage:
    """One stage's record and where it goes."""

    path: Path
    record: dict[str, Any]
    dry: bool
    began: float

    def save(self) -> None:
        """The JSON as it is now."""
        self.record["seconds"] = round(time.monotonic() - self.began, 1)
        write_json(self.path, self.record)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return BUDGET_S - (time.monotonic() - self.began)


def device() -> str:
    """Where the suite runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """Ours: Triton's kernels, on a CPU in its interpreter; torch where a dry run has neither."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton")
    return "triton" if device() == "cuda" or interpreted else "torch"


def accuracy_first(stage: Stage, checks: Sequence[str]) -> None:
    """What FP32 logits from one GEMM cost in digits, and ours beside it; the other checks after that."""
    stage.record["accuracy"] = []
    sizes = accuracy.QUICK if stage.dry else accuracy.Sizes()
    for found in accuracy.run(checks, [backend()], device(), sizes):
        stage.record["accuracy"].append(found)
        stage.save()
    print(accuracy.describe({"records": stage.record["accuracy"]}))


# ------------------------------------------------------------------------------------------------ tests


def tests_stage(stage: Stage) -> int:
    """Accuracy, then pytest; its exit status."""
    accuracy_first(stage, ["gradients"] if stage.dry else list(accuracy.CHECKS))
    folders = ["tests/kernels/test_aggregation.py"] if stage.dry else ["tests/gpu", "tests/kernels"]
    found = [folder for folder in folders if (ROOT / folder).exists()]
    report = stage.path.with_name("tests.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    result: dict[str, Any] = {"folders": found}
    stage.record["pytest"] = result
    try:
        result["exit"] = subprocess.run(
            [*command, "--continue-on-collection-errors", *found], cwd=ROOT, timeout=max(30, stage.left)
        ).returncode
    except subprocess.TimeoutExpired:
        result["error"] = f"not done after {stage.left:.0f} s of {BUDGET_S:.0f}; tests.log has the start"
    if report.exists():
        result |= junit(report)
        report.unlink()
    stage.save()
    print({key: value for key, value in result.items() if key != "failed"})
    return int(result.get("exit", 1))


def junit(report: Path) -> dict[str, Any]:
    """Counts and failures of a junit file."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failures = []
    for case in suite.iter("testcase"):
        for bad in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append({"test": name, "message": (bad.get("message") or "")[:300]})
    return counts | {"failed": failures}


# ------------------------------------------------------------------------------------------------ kernels


def timed(case: Case, p: Problem, limit: Case | None, rounds: int | None) -> dict[str, Any]:
    """Milliseconds of the case, taking turns with its limit, and peak memory; its caches are warm."""
    run = functools.partial(case.run, p)
    where = p.hidden.device.type
    warm = min(milliseconds(run, where) for _ in range(2))
    rounds = rounds or int(max(4, min(20, ROUNDS_MS / max(warm, 1e-3))))
    if limit is not None:
        limit.run(p)  # makes its buffers
    times: list[float] = []
    limits: list[float] = []
    for _ in range(rounds):
        times.append(milliseconds(run, where))
        if limit is not None:
            limits.append(milliseconds(functools.partial(limit.run, p), where))
    found: dict[str, Any] = {"ms": summary(times), "rounds_ms": times}
    n, h, v = p.shape
    found["effective_tflops"] = case.flops * n * h * v / found["ms"]["median"] / 1e9
    if limits:
        found["limit_ms"] = summary(limits)
        found["of_limit"] = statistics.median(b / a for a, b in zip(times, limits, strict=True))
    if where == "cuda":
        found["peak_bytes"] = cuda_peak_bytes(run)
    return found


def fitting(case: Case, p: Problem, limit: Case | None, rounds: int | None) -> dict[str, Any]:
    """`timed` with as many rows as memory holds: halved after each out-of-memory, which `rows` tells."""
    rows = len(p.targets)
    while True:
        part = p if rows == len(p.targets) else subset(p, rows)
        try:
            return timed(case, part, limit if part is p else None, rounds) | {"rows": rows}
        except torch.OutOfMemoryError:
            if rows <= 256:
                raise
            rows //= 2
            gc.collect()
            torch.cuda.empty_cache()


def ours(name: str, **mode: Any) -> Case:
    """Ours in one mode. TF/s count 6NHV for every training case, so that they compare times."""
    return Case(name, functools.partial(cases.ours, backend=backend(), **mode))


def score(p: Problem) -> Answer:
    """`kernels.linear_logprob`: 2NHV."""
    import kernels

    logp, entropy = kernels.linear_logprob(p.hidden, p.weight, p.targets, backend=backend())
    return Answer(None, logp, entropy, None, None)


class OneGemm:
    """The limit of scoring: X Wᵀ in FP32 alone, into a buffer."""

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self, p: Problem) -> Answer:
        x, w = p.hidden.detach(), p.weight.detach()
        if self.out is None or self.out.shape != (len(x), len(w)):
            self.out = torch.empty(len(x), len(w), device=x.device)
        if x.is_cuda:
            cases.wide_mm(x, w.t(), self.out)
        else:
            torch.mm(x.float(), w.t().float(), out=self.out)
        return Answer(None, None, None, None, None)


def plan(chunk: int, sweep: Sequence[int]) -> Iterator[list[tuple[Case, Case | None]]]:
    """Cases with their limits, in order of importance: ours and the limit, the peers, then the variants."""
    whole, one = Case("3 bare GEMMs", Gemms()), Case("1 bare GEMM", OneGemm(), flops=2)
    yield [
        (whole, None),
        (Case("3 bare GEMMs, chunked", Gemms(chunk)), None),
        (ours("ours, two-pass", row_kernel="two-pass", chunk_rows=chunk), whole),
        (one, None),
        (Case("ours, scoring", score, flops=2), one),
    ]
    unfiltered = functools.partial(cases.cut_cross_entropy, filter_eps=None)
    yield [
        (Case("Liger CISPO", cases.liger), None),
        (Case("Cut-Cross-Entropy", cases.cut_cross_entropy, "small gradients filtered"), None),
        (Case("Cut-Cross-Entropy, unfiltered", unfiltered), None),
        (Case("TRL chunked log-prob", cases.trl), None),
        (Case("torch linear_cross_entropy", cases.torch_linear_cross_entropy), None),
        (Case("naive bf16", functools.partial(cases.naive, dtype=torch.bfloat16)), None),
        (Case("naive FP32", functools.partial(cases.naive, dtype=torch.float32)), None),
    ]
    variants = [ours("ours, exact", exact=True, chunk_rows=chunk)]
    for kernel in ("two-pass", "spx", "lean"):
        variants += [
            ours(f"ours, {kernel}, chunk {rows}", row_kernel=kernel, chunk_rows=rows) for rows in sweep
        ]
    yield [(case, whole) for case in variants]


def run_case(stage: Stage, case: Case, limit: Case | None, p: Problem, few: Problem, truth: Answer) -> None:
    """Measure one case, or record why not; then write."""
    record: dict[str, Any] = {"shape": p.shape, "name": case.name, "note": case.note}
    stage.record["cases"].append(record)
    if stage.left < 10 and not stage.dry:
        record["error"] = f"skipped: the stage's {BUDGET_S:.0f} s were over"
    else:
        try:
            record |= fitting(case, p, limit, DRY_ROUNDS if stage.dry else None)
            if "bare" not in case.name:
                record["errors"] = errors(case.run(few), truth)
        except Exception as error:
            record["error"] = reason(error)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    took = record.get("ms", {}).get("median")
    print(f"{p.shape} {case.name}: " + (f"{took:.1f} ms" if took else record["error"]))
    stage.save()


def kernels_stage(stage: Stage) -> int:
    """Every case at every shape, the important ones first."""
    accuracy_first(stage, ["logprobs"])
    shapes, chunk, sweep = (DRY_SHAPES, 8, (4, 8)) if stage.dry else (SHAPES, CHUNK, SWEEP)
    stage.record |= {"chunk_rows": chunk, "error_rows": ERROR_ROWS, "cases": []}
    for phase in range(3):
        for shape in shapes:
            p = make_problem(*shape, torch.bfloat16, device(), chunk_rows=chunk)
            few = subset(p, min(ERROR_ROWS, len(p.targets) // 2))
            truth = solve(few)
            for case, limit in list(plan(chunk, [c for c in sweep if c <= shape[0]]))[phase]:
                run_case(stage, case, limit, p, few, truth)
            del p, few, truth
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    text = kernels_text(stage.record)
    stage.path.with_suffix(".txt").write_text(text + "\n")
    print(text)
    return 0


STAGES = {"tests": tests_stage, "kernels": kernels_stage, "trainer": trainer_stage}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage."""
    p = argparse.ArgumentParser(
        "python -m bench.kernels.gpu_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        "versions": cases.peer_versions(),
        "commit": commit(),
    }
    stage = Stage(args.out / f"{args.stage}.json", record, args.dry_run, time.monotonic())
    stage.save()
    return STAGES[args.stage](stage)


if __name__ == "__main__":
    sys.exit(main())
