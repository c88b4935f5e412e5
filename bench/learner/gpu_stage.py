"""The GPU suite's stage `trainer`: our learner on Qwen3-0.6B and 4B, packs of 16K tokens, and the plain loop.

Each case is a process of its own, started by throughput.py, which says what is counted. The bars are MFU:
.40 on packs of sequences of at most 4K tokens, .30 on one sequence of 16K with attention counted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bench.learner import step as learner_step
from bench.learner import throughput as trainer
from bench.learner.step import Problem
from bench.table import number, table

if TYPE_CHECKING:
    from bench.kernels.gpu_suite import Stage

PACKS = Problem(
    model="", device="cuda", dtype="bfloat16", prompts=4, group=8, prompt_tokens=256, median=1400, sigma=0.7,
    longest=3840, micro_batch_tokens=16_384, micro_batch_sequences=2, checkpoint=False,
)  # fmt: skip
ONE = replace(PACKS, prompts=1, group=1, median=15_872, sigma=0.0, longest=15_872)
DRY = Problem("tiny", "cpu", "float32", 1, 2, 8, 12, 0.8, 40, 64, 2, False)
STEPS = {"qwen3-0.6b": 8, "qwen3-4b": 3}
PACKS_BAR, ONE_BAR = 0.40, 0.30
HEAD = ("", "s", "low-high", "useful tok/s", "MFU", "with attention", "peak GB", "note")


def plan(dry: bool) -> list[tuple[str, Problem, str]]:
    """(name, problem, provider), the important ones first. 4B keeps no activations: they would not fit."""
    if dry:
        return [("tiny, packs", DRY, "ours"), ("tiny, packs", DRY, "plain")]
    small, large = replace(PACKS, model="qwen3-0.6b"), replace(PACKS, model="qwen3-4b", checkpoint=True)
    one = {p: replace(ONE, model=p.model, checkpoint=p.checkpoint) for p in (small, large)}
    return [
        (f"{p.model}, {what}", p, provider)
        for what, provider, problems in (
            ("packs", "ours", (small, large)),
            ("one of 16K", "ours", (one[small], one[large])),
            ("packs", "plain", (small, large)),
        )
        for p in problems
    ]


def trainer_stage(stage: Stage) -> int:
    """Every case; the record is written after each."""
    stage.record["cases"] = []
    card = stage.record["machine"].get("card", "")
    with tempfile.TemporaryDirectory(prefix="trainer-stage-") as root:
        made: dict[str, str] = {}
        for name, p, provider in plan(stage.dry):
            case: dict[str, Any] = {"name": name, "provider": provider, "card": card}
            stage.record["cases"].append(case)
            if stage.left < 30 and not stage.dry:
                case["error"] = "skipped: the stage's time was over"
            else:
                case |= _case(p, provider, f"{root}/{p.model}", made, stage.left, card)
            stage.save()
            print(f"{name}, {provider}: {case.get('error') or _line(case)}")
    text = describe(stage.record)
    stage.path.with_suffix(".txt").write_text(text + "\n")
    print(text)
    return 0


def _case(
    p: Problem, provider: str, folder: str, made: dict[str, str], seconds: float, card: str
) -> dict[str, Any]:
    """One case's record, or {"error": why there is none}."""
    start = time.monotonic()
    try:
        if p.model not in made:
            learner_step.save_model(p, folder)
            made[p.model] = folder
        left = max(30.0, seconds - (time.monotonic() - start))
        threads, steps = torch.get_num_threads(), STEPS.get(p.model, 1)
        gemm = trainer.peak_of(card) is None
        record = trainer.run(p, [provider], 1, steps, threads, folder, gemm, left)
    except Exception as error:  # one case's failure must not cost the others
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    found = record["providers"][provider]
    return record | ({"error": found["error"]} if "error" in found else {})


def _line(case: dict[str, Any]) -> str:
    found = case["providers"][case["provider"]]
    return f"{found['s']['median']:.4g} s, {found['peak_bytes'] / 1e9:.2f} GB"


def describe(record: dict[str, Any]) -> str:
    """The stage's table and bars, from its record alone."""
    where = record["machine"].get("card") or record["machine"]["cpu"]
    rows = []
    for case in record["cases"]:
        found = case.get("providers", {}).get(case["provider"], {})
        s, share = found.get("s"), trainer.shares(case) if "providers" in case else None
        rows.append([
            f"{case['name']}, {case['provider']}",
            number(s and s["median"], ".4g"),
            f"{s['low']:.4g}-{s['high']:.4g}" if s else "–",
            number(found.get("useful_tokens_per_s"), ".4g"),
            number(share[0] if share else None, ".3f"),
            number(share[1] if share else None, ".3f"),
            number(found["peak_bytes"] / 1e9 if "peak_bytes" in found else None, ".2f"),
            case.get("error", ""),
        ])  # fmt: skip
    head = f"{where} · torch {record['versions']['torch']} · commit {record['commit']}"
    return "\n".join((head, table(HEAD, rows), *([] if record["dry_run"] else bars(record["cases"]))))


def bars(cases: Sequence[dict[str, Any]]) -> list[str]:
    """A line per measured case that has a bar."""
    lines = []
    for case in cases:
        share = trainer.shares(case) if "providers" in case else None
        if share is None:
            continue
        packs = "packs" in case["name"]
        value, bar = (share[0], PACKS_BAR) if packs else (share[1], ONE_BAR)
        what = "MFU" if packs else "MFU with attention"
        lines.append(
            f"{case['name']}: {what} {value:.3f}, bar {bar:g}: {'met' if value >= bar else 'NOT MET'}"
        )
    return lines
