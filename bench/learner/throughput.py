"""The learner alone: useful tokens/s, MFU and peak memory of one optimizer step, beside a plain loop's.

  python -m bench.learner                      SmolLM2-135M's shape, FP32, on the CPU (6 minutes a round on
                                               two cores; the plain loop takes 17 GB)
  python -m bench.learner --model qwen3-0.6b   bf16 on a GPU, packs of 16K tokens
  python -m bench.learner --quick              a tiny model, to see that it runs (seconds)
  python -m bench.learner --rounds 1 --record  over bench/results/trainer-cpu.json

ours    the Learner as in a run: completions packed as a tree under their prompt, no padding,
        fused loss, clipping, fused AdamW
plain   transformers' model on padded micro-batches of a few completions, each with its prompt, in the
        batch's order; whole logits, log_softmax, CISPO, clipping, fused AdamW; dtype, weights,
        batch, SDPA and allocator settings are the same

Weights are random, in the shape of the named model. The batch is groups of completions with log-normal
lengths. Each measurement is a fresh process: build, warm up, time --steps steps; providers
take turns. Columns:
  s, low–high   of one step: median and range over rounds and steps
  useful tok/s  prompt tokens, counted once per group, and completion tokens, over the median. Padding, and
                prompts computed again, do not count
  fed           tokens that went through the model
  of bound      ours: (6 · P · tokens fed / the best GEMM's FLOP/s) / s. P: parameters in matrix products, the
                head's counted on loss tokens only. Attention is left out; "with attention" counts it:
                12 · width · layers per (query, key) pair. The best GEMM is the fastest product of the model's
                own shapes, forward or backward, by torch or by our kernels, in the same run. On a GPU of
                known peak: MFU
  peak GB       of the whole process on the CPU (VmHWM: interpreter, weights, AdamW, step); of torch's
                allocator on CUDA
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
import transformers
from transformers.utils import logging as transformers_logging

from bench import records
from bench.learner import step as learner_step
from bench.learner.step import BATCHES, MODELS, PACKS, PROVIDERS, SMALL, TINY, StepProblem
from bench.measure import machine, process_peak_bytes, rounds_of, synchronize
from bench.records import ROOT, Record
from bench.table import bar, number, spread, table
from trainer.launcher.supervisor import CPU_ENVIRONMENT
from trainer.learner.process import keep_freed_memory
from trainer.types import TrainSequence

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, from the makers' data sheets
HEAD = ("", "s", "low–high", "useful tok/s", "fed", "of bound", "with attention", "peak GB", "note")
TRACKED = "trainer-{}.json"


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    p = records.parser("learner", __doc__, TRACKED.format("DEVICE"), rounds=3, threads=records.cores())
    cuda = torch.cuda.is_available()
    text = "shape of the model (smollm2-135m)"
    p.add_argument("--model", choices=MODELS, default="smollm2-135m", help=text)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32, on CUDA bfloat16")
    text = "lengths: 32 completions of median 256 tokens, of 1,400 (packs), or one of 16K (small)"
    p.add_argument("--batch", choices=BATCHES, default="small", help=text)
    p.add_argument("--checkpoint", action="store_true", help="recompute activations, in both")
    p.add_argument("--steps", type=int, metavar="N", help="timed steps of a process (1; on CUDA 5)")
    p.add_argument("--only", choices=PROVIDERS, help="measure this provider alone")
    p.add_argument("--quick", action="store_true", help="a tiny model and batch, to see that it runs")
    p.add_argument("--measure", help=argparse.SUPPRESS)  # in the child: provider or "gemm", then the problem
    p.add_argument("--problem", help=argparse.SUPPRESS)
    p.add_argument("--folder", help=argparse.SUPPRESS)
    return p


def problem_of(args: argparse.Namespace) -> StepProblem:
    """The problem asked for."""
    cuda = args.device == "cuda"
    dtype = args.dtype or ("bfloat16" if cuda and not args.quick else "float32")
    p = dataclasses.replace(TINY if args.quick else BATCHES[args.batch], device=args.device, dtype=dtype)
    if args.quick:
        return p
    tokens = PACKS.micro_batch_tokens if cuda else SMALL.micro_batch_tokens
    return dataclasses.replace(p, model=args.model, micro_batch_tokens=tokens, checkpoint=args.checkpoint)


# ------------------------------------------------------------------------------------------------ measuring


def run(
    p: StepProblem, providers: Sequence[str], rounds: int, steps: int, threads: int, folder: str
) -> Record:
    """Every measurement of a problem, in rounds: the GEMMs, then the providers in turns.

    `folder` holds the model.
    """
    counted = learner_step.lengths(learner_step.make_batch(p), p)
    record: Record = {
        "problem": dataclasses.asdict(p), "tokens": counted, "flops": learner_step.flops(p, counted),
        "gemm": {"flops_per_s": 0.0}, "providers": {name: {"rounds": []} for name in providers},
    }  # fmt: skip
    for i, order in enumerate(rounds_of(providers, rounds), 1):
        best = measure("gemm", p, folder, steps, threads)
        if best.get("flops_per_s", 0.0) > record["gemm"]["flops_per_s"]:
            record["gemm"] = best
        rate = f"{best.get('flops_per_s', 0) / 1e9:.4g} GFLOP/s"
        records.say(f"round {i}/{rounds}: " + (best.get("error") or f"best GEMM {rate}"))
        for name in order:
            result = measure(name, p, folder, steps, threads)
            record["providers"][name]["rounds"].append(result)
            records.say(f"round {i}/{rounds}: {name} " + (result.get("error") or _line(result)))
    for result in record["providers"].values():
        _summarise(result, record)
    return record


def _line(result: Record) -> str:
    return f"{statistics.median(result['seconds']):.4g} s, {result['peak_bytes'] / 1e9:.2f} GB"


def _summarise(result: Record, record: Record) -> None:
    """Add the medians over the rounds, or the first error if every round failed."""
    good = [r for r in result["rounds"] if "error" not in r]
    if not good:
        result["error"] = result["rounds"][0]["error"]
        return
    seconds = [s for r in good for s in r["seconds"]]
    median = statistics.median(seconds)
    result["s"] = {"median": median, "low": min(seconds), "high": max(seconds)}
    result["useful_tokens_per_s"] = record["tokens"]["useful"] / median
    result["peak_bytes"] = int(statistics.median(r["peak_bytes"] for r in good))


def measure(what: str, p: StepProblem, folder: str, steps: int, threads: int) -> Record:
    """One measurement in a process of its own; {"error": one line} if it failed."""
    command = [
        sys.executable, "-m", "bench.learner", f"--measure={what}", f"--folder={folder}",
        f"--steps={steps}",
        f"--threads={threads}", f"--problem={json.dumps(dataclasses.asdict(p))}",
    ]  # fmt: skip
    environment = CPU_ENVIRONMENT | os.environ  # as the launcher sets them for a learner, for both providers
    if p.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a learner takes a GPU where it sees one
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"ended with {child.returncode}: {last}"[:300]}
    result: Record = json.loads(child.stdout.splitlines()[-1])
    return result


def measure_here(what: str, p: StepProblem, folder: str, steps: int) -> Record:
    """In the child: the best GEMM, or the steps of a provider."""
    if p.device == "cpu":
        keep_freed_memory()  # as a learner does, for both providers
    if what == "gemm":
        return learner_step.best_gemm(p)
    step = PROVIDERS[what](p, folder)
    batch = learner_step.make_batch(p)
    warm = batch if p.device == "cuda" else [_short(s) for s in batch[: p.group]]
    step(warm)  # makes AdamW's moments
    seconds, cpu_seconds = [], []
    for _ in range(steps):
        synchronize(p.device)
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(batch)
        synchronize(p.device)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)  # of all threads; less affected by other load
    peak = torch.cuda.max_memory_allocated() if p.device == "cuda" else process_peak_bytes()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak, "loss": loss}


def _short(s: TrainSequence) -> TrainSequence:
    """The completion's first 64 tokens."""
    per_token = {f.name: getattr(s, f.name) for f in dataclasses.fields(s) if f.name != "prompt_ids"}
    return dataclasses.replace(s, **{name: x[:64] for name, x in per_token.items() if x is not None})


# ------------------------------------------------------------------------------------------------ table


def bound(record: Record) -> tuple[float, str]:
    """The FLOP/s that ours is compared with, and a description."""
    peak = next((peak for name, peak in PEAKS.items() if name in record.get("card", "")), None)
    if peak is not None:
        return peak, f"{peak / 1e12:.0f} TFLOP/s, dense bf16 of this card"
    gemm = record["gemm"]
    rate = gemm["flops_per_s"]
    return rate, f"{rate / 1e9:.4g} GFLOP/s, best GEMM: {gemm.get('product', '–')}"


def shares(record: Record) -> tuple[float, float] | None:
    """Ours over the bound: of the matrix products, and of these with attention. None if not measured."""
    ours, (rate, _) = record["providers"].get("ours", {}), bound(record)
    if "s" not in ours or not rate:
        return None
    work, seconds = record["flops"], ours["s"]["median"]
    return work["matmul"] / rate / seconds, (work["matmul"] + work["attention"]) / rate / seconds


def describe(record: Record) -> str:
    """The table of a record of `run`, and the bars."""
    p, tokens, share = record["problem"], record["tokens"], shares(record)
    recomputed = ", activations recomputed" if p["checkpoint"] else ""
    lines = [
        f"{p['model']}, {p['dtype']} on {p['device']}: {tokens['completions']} completions of {p['prompts']} "
        f"prompts, {tokens['useful']} useful tokens, longest {tokens['longest']} with its prompt",
        f"ours: {tokens['micro_batches']} packs of ≤ {p['micro_batch_tokens']} tokens; plain: "
        f"{p['micro_batch_sequences']} sequences a micro-batch{recomputed}",
        f"bound: {bound(record)[1]}",
    ]
    rows = []
    for name, result in record["providers"].items():
        rows.append([
            name, *spread(result.get("s"), ".4g"), number(result.get("useful_tokens_per_s"), ".4g"),
            str(tokens[f"fed_{name}"]),
            *(number(x, ".3f") for x in (share if name == "ours" else None) or (None, None)),
            number(result["peak_bytes"] / 1e9 if "peak_bytes" in result else None, ".2f"),
            result.get("error", ""),
        ])  # fmt: skip
    return "\n".join((*lines, table(HEAD, rows), *bars(record)))


def bars(record: Record) -> list[str]:
    """A line per bar, on a CPU only; nothing about what was not measured."""
    if record["problem"]["device"] != "cpu" or record["problem"]["model"] == "tiny":
        return []
    ours, plain = (record["providers"].get(name, {}) for name in PROVIDERS)
    share, lines = shares(record), []
    if "s" in ours and "s" in plain:
        speed = plain["s"]["median"] / ours["s"]["median"]
        memory = ours["peak_bytes"] / plain["peak_bytes"]
        lines += [
            bar("useful tokens/s over plain", speed, 1.5),
            bar("peak memory over plain", memory, 0.6, most=True),
        ]
    return [*lines, bar("of the bound", share[0], 0.6)] if share else lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the record where asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    records.at_least(1, args, "rounds", "threads")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU; leave --device out to measure on the CPU")
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if args.measure:
        p = StepProblem(**json.loads(args.problem))
        print(json.dumps(measure_here(args.measure, p, args.folder, args.steps)))
        return 0
    p = problem_of(args)
    where = machine(args.device)
    steps = args.steps or (5 if args.device == "cuda" else 1)
    providers = [args.only] if args.only else list(PROVIDERS)
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as folder:
        records.say(f"making {p.model} with random weights")
        learner_step.save_model(p, folder)
        measured = run(p, providers, 1 if args.quick else args.rounds, steps, args.threads, folder)
    record = {
        "command": records.command("learner", arguments),
        "machine": where,
        "card": where.get("card", ""),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": records.commit("kernels", "trainer", "bench/*.py"),
        "rounds": args.rounds,
        "steps": steps,
        **measured,
    }
    timed = len(next(iter(record["providers"].values()))["rounds"])
    head = f"{where.get('card') or where['cpu']}, {where['threads']} threads, torch {torch.__version__}, "
    head += f"commit {record['commit']}; medians of {timed} interleaved rounds"
    return records.finish(args, TRACKED.format(args.device), record, f"{head}\n{describe(record)}")
