"""Useful tokens/s, MFU and peak memory of a learner's step beside a plain loop's. [7 min a round]

  python -m bench learner                      SmolLM2-135M's shape, FP32, on the CPU (6 minutes a round on
                                               two cores; the plain loop takes 17 GB)
  python -m bench learner --model qwen3-0.6b   bf16 on a GPU, packs of 16K tokens
  python -m bench learner --batch tiny         a tiny model, to see that it runs (seconds)
  python -m bench learner --rounds 1 --record  over bench/results/trainer-cpu.jsonl

ours    the Learner as in a run: completions packed as a tree under their prompt, no padding,
        fused loss, clipping, fused AdamW
lora    the same with model.lora.rank 16: a frozen base, and no gradient of the head
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
                known peak: MFU. The bar is .6
  peak GB       of the whole process on the CPU (VmHWM: interpreter, weights, AdamW, step); of torch's
                allocator on CUDA
"""

import dataclasses
import os
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import Case, Row, cores, grouped, in_turns, machine_of
from bench.learner import step as learner_step
from bench.learner.step import BATCHES, MODELS, PACKS, PROVIDERS, SMALL, StepProblem
from bench.measure import DEVICE, alone, milliseconds, process_peak_bytes
from bench.table import number, table
from trainer.accounting.throughput import PEAK_TFLOPS
from trainer.config import ConfigError
from trainer.launcher.supervisor import CPU_ENVIRONMENT
from trainer.learner.process import keep_freed_memory
from trainer.types import TrainSequence

OPTIONS: dict[str, Any] = {
    "model": ("smollm2-135m", "shape of the model", MODELS),
    "batch": ("small", "32 completions of median 256 tokens, of 1,400 (packs), one of 16K (long)", BATCHES),
    "dtype": ("bfloat16" if DEVICE == "cuda" else "float32", "of the body", ("float32", "bfloat16")),
    "checkpoint": (False, "recompute activations, in both"),
    "rounds": (3, "processes of each"),
    "steps": (5 if DEVICE == "cuda" else 1, "timed steps of a process"),
    "threads": (cores(), "CPU threads"),
    "only": ("", "measure this provider alone"),
}
RECORD = f"trainer-{DEVICE}.jsonl"
HEAD = ("", "s", "low–high", "useful tok/s", "fed", "of bound", "with attention", "peak GB")


def problem_of(options: Row) -> StepProblem:
    """The problem asked for."""
    p = dataclasses.replace(BATCHES[options["batch"]], device=DEVICE, dtype=options["dtype"])
    if options["batch"] == "tiny":
        return p
    tokens = (PACKS if DEVICE == "cuda" else SMALL).micro_batch_tokens
    checkpoint = options["checkpoint"]
    return dataclasses.replace(p, model=options["model"], micro_batch_tokens=tokens, checkpoint=checkpoint)


def cases(options: Namespace) -> Iterator[Case]:
    """The best matrix product and each provider's steps, in rounds, in a process each."""
    if options.only and options.only not in PROVIDERS:
        raise ConfigError(f"--only {options.only}: expected one of {', '.join(PROVIDERS)}")
    providers = [options.only] if options.only else list(PROVIDERS)
    p, environment = problem_of(vars(options)), dict(CPU_ENVIRONMENT)
    environment |= {k: v for k, v in os.environ.items() if k in CPU_ENVIRONMENT}  # as the launcher has it

    @cache
    def saved() -> tempfile.TemporaryDirectory[str]:
        folder = tempfile.TemporaryDirectory(prefix="bench-learner-")
        learner_step.save_model(p, folder.name)
        return folder

    def measure(what: str) -> Row:
        arguments = what, p, saved().name, options.steps, options.threads
        return {"what": what} | alone(measure_here, *arguments, environment=environment)

    return in_turns(["gemm", *providers], options.rounds, measure)


def measure_here(what: str, p: StepProblem, folder: str, steps: int, threads: int) -> Row:
    """Measure in this process: the best matrix product, or the steps of a provider."""
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if p.device == "cpu":
        keep_freed_memory()  # as a learner does, for both providers
    if what == "gemm":
        return learner_step.best_gemm(p)
    step = PROVIDERS[what](p, folder)
    batch = learner_step.make_batch(p)
    step(batch if p.device == "cuda" else [_short(s) for s in batch[: p.group]])  # makes AdamW's moments
    seconds = [milliseconds(partial(step, batch), p.device) / 1e3 for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if p.device == "cuda" else process_peak_bytes()
    return {"seconds": seconds, "peak_bytes": peak}


def _short(s: TrainSequence) -> TrainSequence:
    """The completion's first 64 tokens."""
    per_token = {f.name: getattr(s, f.name) for f in dataclasses.fields(s) if f.name != "prompt_ids"}
    return dataclasses.replace(s, **{name: x[:64] for name, x in per_token.items() if x is not None})


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The table, and on a CPU the bars."""
    p, card = problem_of(head["options"]), head["machine"].get("card", "")
    tokens = learner_step.lengths(learner_step.make_batch(p), p)
    work = learner_step.flops(p, tokens)
    measured = grouped(rows, "what")
    best = max(measured.pop("gemm", []), key=lambda row: row["flops_per_s"], default={})
    rate, bound = best.get("flops_per_s"), f"best GEMM: {best.get('product', '–')}"
    if peak := next((tflops for name, tflops in PEAK_TFLOPS.items() if name in card), None):
        rate, bound = peak * 1e12, "dense bf16 of this card"
    lines, medians, memory = [], dict[str, float](), dict[str, float]()
    for name, runs in measured.items():
        seconds = [s for row in runs for s in row["seconds"]]
        medians[name] = s = statistics.median(seconds)
        memory[name] = statistics.median(row["peak_bytes"] for row in runs)
        shares = [None, None]
        if name == "ours" and rate:
            shares = [work["matmul"] / rate / s, (work["matmul"] + work["attention"]) / rate / s]
        fed = tokens["fed_plain" if name == "plain" else "fed_ours"]
        lines.append([
            name, f"{s:.4g}", f"{min(seconds):.4g}–{max(seconds):.4g}", f"{tokens['useful'] / s:.4g}",
            str(fed), *(number(x, ".3f") for x in shares), f"{memory[name] / 1e9:.2f}",
        ])  # fmt: skip
    text = [
        f"{p.model}, {p.dtype}, {machine_of(head)}",
        f"{tokens['completions']} completions of {p.prompts} prompts, {tokens['useful']} useful tokens, the "
        f"longest {tokens['longest']} with its prompt",
        f"ours: {tokens['micro_batches']} packs of ≤ {p.micro_batch_tokens} tokens; plain: "
        f"{p.micro_batch_sequences} sequences a micro-batch{', activations recomputed' * p.checkpoint}",
        f"bound: {number(rate and rate / 1e9, '.4g')} GFLOP/s, {bound}",
        table(HEAD, lines),
    ]
    if {"ours", "plain"} <= medians.keys():
        speed, share = medians["plain"] / medians["ours"], memory["ours"] / memory["plain"]
        text.append(
            f"ours: {speed:.2f} × the useful tokens/s of plain (bar 1.5), {share:.2f} × its memory (.6)"
        )
    return "\n".join(text)
