"""The GPU suite's stage `trainer`: our learner on Qwen3-0.6B and 4B, packs of 16K tokens, and the plain loop.

Each case is a process of its own, started by throughput.py, which explains what is counted. The bars are MFU:
.40 on packs of sequences of at most 4K tokens, .30 on one sequence of 16K with attention counted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.gpu.stage import Stage
from bench.learner import step as learner_step
from bench.learner import throughput
from bench.learner.step import StepProblem
from bench.records import Record, reason
from bench.table import bar, table

PACKS = StepProblem(
    model="", device="cuda", dtype="bfloat16", prompts=4, group=8, prompt_tokens=256, median=1400, sigma=0.7,
    longest=3840, micro_batch_tokens=16_384, micro_batch_sequences=2, checkpoint=False,
)  # fmt: skip
ONE = replace(PACKS, prompts=1, group=1, median=15_872, sigma=0.0, longest=15_872)
STEPS = {"qwen3-0.6b": 8, "qwen3-4b": 3}
PACKS_BAR, ONE_BAR = 0.40, 0.30
HEAD = ("", "s", "low–high", "useful tok/s", "MFU", "with attention", "peak GB", "note")


def plan(dry: bool) -> list[tuple[str, StepProblem, str]]:
    """(name, problem, provider), the important ones first. 4B recomputes its activations, to fit."""
    if dry:
        return [("tiny, packs", throughput.TINY, "ours"), ("tiny, packs", throughput.TINY, "plain")]
    small = {"model": "qwen3-0.6b"}
    large = {"model": "qwen3-4b", "checkpoint": True}
    return [
        (f"{model['model']}, {name}", replace(problem, **model), provider)
        for name, provider, problem in (
            ("packs", "ours", PACKS),
            ("one of 16K", "ours", ONE),
            ("packs", "plain", PACKS),
        )
        for model in (small, large)
    ]


def trainer_stage(stage: Stage) -> int:
    """Every case; the record is written after each."""
    card = stage.record["machine"].get("card", "")
    with tempfile.TemporaryDirectory(prefix="trainer-stage-") as root:
        saved: dict[str, str] = {}
        for name, p, provider in plan(stage.dry):
            case = stage.add_case(30, name=name, provider=provider, card=card)
            if "error" not in case:
                case |= _measure(p, provider, f"{root}/{p.model}", saved, stage.left, card)
            stage.save()
            print(f"{name}, {provider}: {case.get('error') or _line(case)}")
    return stage.finish(describe(stage.record))


def _measure(
    p: StepProblem, provider: str, folder: str, saved: dict[str, str], seconds: float, card: str
) -> Record:
    """One case's record, or {"error": why there is none}; `saved` holds the models that are on disk."""
    start = time.monotonic()
    try:
        if p.model not in saved:
            learner_step.save_model(p, folder)
            saved[p.model] = folder
        left = max(30.0, seconds - (time.monotonic() - start))
        threads, steps = torch.get_num_threads(), STEPS.get(p.model, 1)
        gemm = throughput.peak_of(card) is None
        record = throughput.run(p, [provider], 1, steps, threads, folder, gemm, left)
    except Exception as error:  # one case's failure must not cost the others
        return {"error": reason(error)}
    result = record["providers"][provider]
    return record | ({"error": result["error"]} if "error" in result else {})


def _line(case: Record) -> str:
    result = case["providers"][case["provider"]]
    return f"{result['s']['median']:.4g} s, {result['peak_bytes'] / 1e9:.2f} GB"


def describe(record: Record) -> str:
    """The stage's table and bars, from its record alone."""
    where = record["machine"].get("card") or record["machine"]["cpu"]
    rows = []
    for case in record["cases"]:
        result = case.get("providers", {}).get(case["provider"], {})
        share = throughput.shares(case) if "providers" in case else None
        speed, memory = throughput.cells(result)
        rows.append([
            f"{case['name']}, {case['provider']}", *speed, *throughput.share_cells(share), memory,
            case.get("error", ""),
        ])  # fmt: skip
    head = f"{where} · torch {record['versions']['torch']} · commit {record['commit']}"
    return "\n".join((head, table(HEAD, rows), *([] if record["dry_run"] else bars(record["cases"]))))


def bars(cases: Sequence[Record]) -> list[str]:
    """A line per measured case of ours."""
    lines = []
    for case in cases:
        share = throughput.shares(case) if "providers" in case else None
        if share is not None:
            matmul, with_attention = share
            packs = "packs" in case["name"]
            name, value = ("MFU", matmul) if packs else ("MFU with attention", with_attention)
            lines.append(bar(f"{case['name']}: {name}", value, PACKS_BAR if packs else ONE_BAR))
    return lines
