"""The policy loss, forward and backward: ours beside its peers and its limit, in one run.

  python -m bench kernels.compare                              FP32, N=2048 H=576 V=49152 (SmolLM2's head)
  python -m bench kernels.compare --dtype bfloat16 --rounds 20
  python -m bench kernels.compare --only ours,naive --rows 256 --vocab 8192 --out quick.jsonl
  python -m bench kernels.compare --rounds 6 --record          over bench/results/compare-cpu-float32.jsonl

The providers take turns, so that a slow moment of the machine affects all of them. Columns:
  ms, quartiles   of one forward + backward over the rounds
  TF/s            6NHV over the median, whatever the provider computes
  × limit         that median over the bare GEMMs'
  peak MB         growth of memory during one call, dX and dW included: of the process's resident peak on the
                  CPU (each provider in a process of its own), of torch's allocator on CUDA
  |Δlogp|         largest distance of a log-prob from float64, in nats
  dX rel, dW rel  ‖gradient − float64's‖ / ‖float64's‖
  per token       yes: log-probs that any loss can be differentiated through; their limit is 4 bare GEMMs
A provider that would take more than --max-seconds a call gets a line that says so, as does one that fails.
The peers: pip install --no-deps -r requirements/peers.txt
"""

from __future__ import annotations

import gc
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from bench.harness import Case, Row, chosen, cores
from bench.kernels.problem import LossAnswer, errors_of, make_problem, solve, subset
from bench.kernels.providers import LIMIT, Provider, all_providers
from bench.measure import (
    DEVICE,
    alone,
    cuda_peak_bytes,
    milliseconds,
    resident_peak_bytes,
    rounds_of,
    summary,
)
from bench.table import number, table

PROBE = 16  # a first call on N/16 rows shows what a whole one will take
OPTIONS: dict[str, Any] = {
    "rows": (2048, "tokens N"),
    "hidden": (576, "width H of the hidden states"),
    "vocab": (49152, "vocabulary V"),
    "chunk": (512, "rows per chunk, where chunked"),
    "dtype": ("float32", "of both operands", ("float32", "bfloat16")),
    "rounds": (10, "timed calls of each"),
    "threads": (cores(), "CPU threads"),
    "max_seconds": (60.0, "a provider whose call takes longer, by an estimate on N/16 rows, is not timed"),
    "only": ("", "comma-separated: providers whose name contains one of these"),
    "no_errors": (False, "skip the float64 oracle"),
    "no_memory": (False, "skip the memory measurement"),
}
RECORD = f"compare-{DEVICE}-{{dtype}}.jsonl"
HEAD = (
    "",
    "ms",
    "quartiles",
    "TF/s",
    "× limit",
    "peak MB",
    "|Δlogp|",
    "dX rel",
    "dW rel",
    "per token",
    "note",
)


class Comparison:
    """The problem, its solution where it is asked for, and which providers can be timed."""

    def __init__(self, options: Namespace) -> None:
        torch.set_num_threads(options.threads)
        warnings.filterwarnings("ignore", module="(liger_kernel|trl|cut_cross_entropy|torch)")
        shape = options.rows, options.hidden, options.vocab
        dtype = getattr(torch, options.dtype)
        self.options = options
        self.problem = make_problem(*shape, dtype, DEVICE, chunk_rows=min(options.chunk, options.rows))
        self.few = subset(self.problem, max(1, options.rows // PROBE))
        providers = {x.name: x for x in all_providers(self.problem)}
        self.providers = {name: providers[name] for name in chosen(options.only, providers)}
        self._ready: dict[str, bool] = {}

    @cached_property
    def truth(self) -> LossAnswer:
        """The float64 solution."""
        return solve(self.problem)

    @cached_property
    def few_truth(self) -> LossAnswer:
        """That of the first rows."""
        return solve(self.few)

    def seconds(self, provider: Provider) -> float:
        """Estimated duration of a call, by one on a few rows, after a first one."""
        provider.run(self.few)
        few = milliseconds(lambda: provider.run(self.few), DEVICE) / 1e3
        return few * self.options.rows / len(self.few.targets)

    def check(self, name: str) -> Row:
        """The provider's errors, on CUDA its memory; of a few rows if a whole call takes too long."""
        provider = self.providers[name]
        row: Row = {"provider": name, "note": provider.note, "per_token": provider.per_token}
        self._ready[name] = False
        seconds = self.seconds(provider)
        problem, truth = self.problem, None if self.options.no_errors else self.truth
        if seconds > self.options.max_seconds:
            problem, truth = self.few, None if self.options.no_errors else self.few_truth
            row["note"] = (
                f"not timed: about {seconds:.0f} s a call, more than --max-seconds "
                f"{self.options.max_seconds:g}; its errors are of {len(problem.targets)} rows"
            )
        row["errors"] = errors_of(provider.run(problem), truth) if truth else {}
        if DEVICE == "cuda" and problem is self.problem:
            row["peak_bytes"] = cuda_peak_bytes(partial(provider.run, problem))
        self._ready[name] = problem is self.problem
        free_memory()
        return row

    def time(self, name: str) -> Row | None:
        """One call, timed; None if the provider cannot be."""
        if name not in self._ready:  # the call goes on from a record
            try:
                self._ready[name] = self.seconds(self.providers[name]) <= self.options.max_seconds
            except Exception:
                self._ready[name] = False
        if not self._ready[name]:
            return None
        row = {"provider": name, "ms": milliseconds(partial(self.providers[name].run, self.problem), DEVICE)}
        gc.collect()
        return row

    def memory(self, name: str) -> Row | None:
        """Peak bytes of one call on a CPU, in a process of its own."""
        if not self._ready.get(name):
            return None
        return {"provider": name, "peak_bytes": alone(_memory, name, self.options)}


def _memory(name: str, options: Namespace) -> int:
    comparison = Comparison(options)
    call = partial(comparison.providers[name].run, comparison.problem)
    call()
    return resident_peak_bytes(call)


def free_memory() -> None:
    """Drop what the last provider left behind."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def cases(options: Namespace) -> Iterator[Case]:
    """Every provider's errors, its time in each round, and on a CPU its memory."""
    comparison = Comparison(options)
    names = list(comparison.providers)
    for name in names:
        yield f"{name}: errors", partial(comparison.check, name)
    for i, order in enumerate(rounds_of(names, options.rounds), 1):
        for name in order:
            yield f"{name}: round {i}", partial(comparison.time, name)
    if DEVICE == "cpu" and not options.no_memory:
        for name in names:
            if "bare" not in name:
                yield f"{name}: memory", partial(comparison.memory, name)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each provider."""
    o, machine = head["options"], head["machine"]
    n, h, v = o["rows"], o["hidden"], o["vocab"]
    merged: dict[str, Row] = {}
    times: dict[str, list[float]] = {}
    for row in rows:
        merged[row["provider"]] = merged.get(row["provider"], {}) | row
        if "ms" in row:
            times.setdefault(row["provider"], []).append(row["ms"])
    limit, lines = summary(times.get(LIMIT, [])), []
    for name, case in merged.items():
        ms, peak, errors = summary(times.get(name, [])), case.get("peak_bytes"), case.get("errors", {})
        ratio = ms["median"] / limit["median"] if ms and limit and name != LIMIT else None
        lines.append([
            name,
            number(ms.get("median"), ".2f"),
            f"{ms['low']:.2f}–{ms['high']:.2f}" if ms else "–",
            number(6 * n * h * v / ms["median"] / 1e9 if ms else None),
            number(ratio, ".2f"),
            number(None if peak is None else peak / 2**20, ".0f"),
            *(number(errors.get(k), ".1e") for k in ("logp_max_abs", "d_hidden_rel", "d_weight_rel")),
            "yes" if case.get("per_token") else "",
            case.get("note", ""),
        ])  # fmt: skip
    parts = (
        f"N={n} H={h} V={v} {o['dtype']}, chunks of {o['chunk']} rows",
        f"{machine.get('card') or machine['cpu']}, {machine['isa']}, {o['threads']} threads",
        f"torch {head['versions']['torch']}, commit {head['commit']}",
        f"medians of {o['rounds']} interleaved rounds",
    )
    return " · ".join(parts) + "\n" + table(HEAD, lines)
