"""The GPU suite's stage `kernels`: time, memory and errors of every provider and variant at three shapes.

In order of value: ours with each row kernel beside its limit at the first shape; where the time goes there
(bench.kernels.probe); the same at the other shapes; the peers; the variants.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import records
from bench.gpu.stage import BUDGET_S, Stage
from bench.kernels import accuracy, harness, probe, providers
from bench.kernels.problem import LossAnswer, LossProblem, make_problem, solve, subset
from bench.kernels.providers import LIMIT, Gemms, OneGemm, Provider
from bench.measure import milliseconds
from bench.records import ROOT, Record
from bench.table import bar

SHAPES = ((16384, 4096, 151936), (16384, 2048, 151936), (8192, 4096, 128256))  # N, H, V
CHUNK = 8192  # rows, of ours and of every peer that has chunks
SWEEP = (1024, 2048, 4096, 8192, 16384)
ERROR_ROWS = 1024  # rows of the float64 comparison
ROUNDS_MS = 2500.0  # of each case, in 4 to 20 rounds
DRY_SHAPES = ((8, 16, 97), (8, 16, 40))
PEERS_8NHV = ("Cut-Cross-Entropy", "Cut-Cross-Entropy, unfiltered", "TRL chunked log-prob")
Case = tuple[Provider, Provider | None]  # with its limit


def device() -> str:
    """Where the suite runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """Ours: Triton's kernels, on a CPU in its interpreter; torch where a dry run has neither."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton")
    return "triton" if device() == "cuda" or interpreted else "torch"


def accuracy_first(stage: Stage, checks: Sequence[str]) -> None:
    """The error of FP32 logits from one GEMM, and ours beside it; the other checks after that."""
    stage.record["accuracy"] = []
    sizes = accuracy.QUICK if stage.dry else accuracy.Sizes()
    for record in accuracy.run(checks, [backend()], device(), sizes):
        stage.record["accuracy"].append(record)
        stage.save()
    print(accuracy.describe({"records": stage.record["accuracy"]}))


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


def kernels_stage(stage: Stage) -> int:
    """Every case at every shape, the important ones first."""
    accuracy_first(stage, ["logprobs"])
    shapes, chunk, sweep = (DRY_SHAPES, 8, (4, 8)) if stage.dry else (SHAPES, CHUNK, SWEEP)
    stage.record |= {"chunk_rows": chunk, "error_rows": ERROR_ROWS, "cases": [], "probe": []}
    for phase in range(3):
        for shape in shapes:
            try:
                run_phase(stage, phase, shape, chunk, [rows for rows in sweep if rows <= shape[0]])
            except Exception as error:  # the problem itself does not fit; other shapes may
                stage.add_case(0, shape=shape, name=f"phase {phase}")["error"] = records.reason(error)
                stage.save()
            harness.free_memory()
    return stage.finish(describe(stage.record))


def run_phase(
    stage: Stage, phase: int, shape: tuple[int, int, int], chunk: int, sweep: Sequence[int]
) -> None:
    """The cases of a phase at one shape; the first shape's first phase ends with the probe."""
    p = make_problem(*shape, torch.bfloat16, device(), chunk_rows=chunk)
    few = subset(p, min(ERROR_ROWS, len(p.targets) // 2))
    truth = solve(few)
    for case in list(plan(chunk, sweep))[phase]:
        run_case(stage, case, p, few, truth)
    if phase == 0 and not stage.record["probe"] and backend() == "triton":
        few_rows = 4  # of a dry run, in Triton's interpreter
        probe_lines(stage, subset(p, few_rows) if stage.dry else p, few_rows if stage.dry else chunk)


def probe_lines(stage: Stage, p: LossProblem, chunk: int) -> None:
    """bench.kernels.probe's lines, while a third of the stage's time is left for the cases after them."""
    for line in probe.lines(p, chunk):
        if stage.left < BUDGET_S / 3 and not stage.dry:
            break
        stage.record["probe"].append(probe.measure(line, device(), 1 if stage.dry else probe.ROUNDS))
        print(probe.describe(stage.record["probe"][-1:]).splitlines()[-1])
        stage.save()
    if device() == "cuda":
        try:
            stage.record["longest_kernels"] = probe.longest_kernels(p, chunk)
        except Exception as error:
            stage.record["longest_kernels"] = records.reason(error)
        stage.save()


def plan(chunk: int, sweep: Sequence[int]) -> Iterator[list[Case]]:
    """The cases in order of importance: ours and the limit, the peers, then the variants."""
    whole = Provider(LIMIT, Gemms())
    one = Provider("1 bare GEMM", OneGemm(), flops=2)
    yield [
        (whole, None),
        (Provider(f"{LIMIT}, chunked", Gemms(chunk)), None),
        *((_ours(kernel, row_kernel=kernel, chunk_rows=chunk), whole) for kernel in probe.ROW_KERNELS),
        (one, None),
        (Provider("ours, scoring", partial(providers.scoring, backend=backend()), flops=2), one),
    ]
    yield [(peer, None) for peer in reversed(providers.peers("cuda"))]
    variants = [_ours("exact", exact=True, chunk_rows=chunk)]
    for kernel in probe.ROW_KERNELS:
        variants += [_ours(f"{kernel}, chunk {rows}", row_kernel=kernel, chunk_rows=rows) for rows in sweep]
    yield [(variant, whole) for variant in variants]


def _ours(variant: str, **mode: Any) -> Provider:
    return Provider(f"ours, {variant}", partial(providers.ours, backend=backend(), **mode))


def run_case(stage: Stage, case: Case, p: LossProblem, few: LossProblem, truth: LossAnswer) -> None:
    """Measure one case, or record why not; then write the record."""
    provider = case[0]
    record = stage.add_case(10, shape=p.shape, name=provider.name, note=provider.note)
    if "error" not in record:
        try:
            record |= fitting(case, p, 1 if stage.dry else None)
            record["errors"] = harness.errors(provider, few, truth)
        except Exception as error:
            record["error"] = records.reason(error)
    harness.free_memory()
    print(
        f"{p.shape} {provider.name}: {record.get('error') or format(record['ms']['median'], '.1f') + ' ms'}"
    )
    stage.save()


def fitting(case: Case, p: LossProblem, rounds: int | None) -> Record:
    """One case's times, beside its limit's, on as many rows as memory holds: halved after each
    out-of-memory error, and then without the limit. `rounds` None: as many as ROUNDS_MS allow."""
    (provider, limit), rows = case, len(p.targets)
    while True:
        part = p if rows == len(p.targets) else subset(p, rows)
        try:
            warm = min(milliseconds(partial(provider.run, part), p.hidden.device.type) for _ in range(2))
            both = [provider]
            if limit is not None and part is p:
                limit.run(p)  # makes its buffers
                both.append(limit)
            count = rounds or int(max(4, min(20, ROUNDS_MS / max(warm, 1e-3))))
            return harness.measure(both, part, count, limit.name if limit else None)[provider.name]
        except torch.OutOfMemoryError:
            if rows <= 256:
                raise
            rows //= 2
            harness.free_memory()


def describe(record: Record) -> str:
    """A table per shape and, last, the bars."""
    where = record["machine"].get("card") or record["machine"]["cpu"]
    parts = [
        f"{where} · torch {record['versions']['torch']}, triton {record['versions']['triton']} · "
        f"commit {record['commit']} · bf16, chunks of {record['chunk_rows']} rows unless named\n"
        f"{harness.COLUMNS}\n"
        f"Errors are of the first {record['error_rows']} rows, or of half of them where there are fewer."
    ]
    for shape in dict.fromkeys(tuple(case["shape"]) for case in record["cases"]):
        cases = [case for case in record["cases"] if tuple(case["shape"]) == shape]
        parts.append("N={} H={} V={}\n".format(*shape) + harness.providers_table(cases))
    if record.get("probe"):
        parts.append(f"Where the time goes at the first shape:\n{probe.describe(record['probe'])}")
    return "\n\n".join((*parts, *filter(None, ["\n".join(bars(record))])))


def bars(record: Record) -> Iterator[str]:
    """The bars for an H200 or H100 at the first shape, a line each; nothing about what was not measured."""
    if record.get("dry_run") or not record["cases"]:
        return
    first = tuple(record["cases"][0]["shape"])
    cases = {c["name"]: c for c in record["cases"] if tuple(c["shape"]) == first and c.get("ms")}
    rate = {name: case["effective_tflops"] for name, case in cases.items()}
    training = [n for n in cases if n.startswith("ours, ") and n not in ("ours, scoring", "ours, exact")]
    if training:
        fastest = max(training, key=lambda name: rate[name])
        yield f"fastest of ours at {first}: {fastest}"
        least = 0.93 if "H200" in str(record["machine"].get("card")) else 0.90
        yield bar("  share of the bare GEMMs' rate", cases[fastest]["of_limit"], least)
        yield bar("  TF/s", rate[fastest], 700)
        if "Liger CISPO" in rate:
            yield bar("  times Liger's CISPO", rate[fastest] / rate["Liger CISPO"], 8)
        if peers := [rate[name] for name in PEERS_8NHV if name in rate]:
            yield bar("  times the best 8NHV peer", rate[fastest] / max(peers), 1.25)
    if "ours, scoring" in cases:
        yield bar("  scoring, share of one bare GEMM's rate", cases["ours, scoring"]["of_limit"], 0.85)
