"""The policy loss, forward and backward: ours beside its peers and its limit, in turns. [10 min]

  python -m bench kernels.compare                              FP32, N=2048 H=576 V=49152 (SmolLM2's head)
  python -m bench kernels.compare --dtype bfloat16 --rounds 20
  python -m bench kernels.compare --only ours,naive --rows 256 --vocab 8192 --out quick.jsonl
  python -m bench kernels.compare --rounds 6 --record          over bench/results/compare-cpu-float32.jsonl

The providers take turns, so that a slow moment of the machine affects all of them. Columns:
  ms              of one forward + backward: median and range over the rounds
  TF/s            6NHV over the median, whatever the provider computes
  × limit         that median over the bare GEMMs'
  peak MB         growth of memory during one call, dX and dW included: of the process's resident peak on the
                  CPU (each provider in a process of its own), of torch's allocator on CUDA
  Δ logp          largest distance of a log-prob from float64, in nats
  dX rel, dW rel  ‖gradient − float64's‖ / ‖float64's‖
  note            "per token": log-probs that any loss can be differentiated through; its limit is 4 GEMMs
A provider that takes more than --max-seconds a call gets a line that says so, as does one that fails.
The peers: pip install --no-deps -r requirements/peers.txt
"""

import gc
import statistics
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch

from bench.harness import Case, Row, chosen, cores, grouped, in_turns, machine_of, median_and_range
from bench.kernels.problem import LossAnswer, errors_of, make_problem, solve
from bench.kernels.providers import LIMIT, all_providers
from bench.measure import DEVICE, alone, cuda_peak_bytes, milliseconds, resident_peak_bytes
from bench.table import number, table

OPTIONS: dict[str, Any] = {
    "rows": (2048, "tokens N"),
    "hidden": (576, "width H of the hidden states"),
    "vocab": (49152, "vocabulary V"),
    "chunk": (512, "rows per chunk, where chunked; on CUDA not of ours, which follows the free memory"),
    "dtype": ("float32", "of both operands", ("float32", "bfloat16")),
    "rounds": (10, "timed calls of each"),
    "threads": (cores(), "CPU threads"),
    "max_seconds": (60.0, "a provider whose call takes longer is not timed"),
    "only": ("", "comma-separated: providers whose name contains one of these"),
    "no_errors": (False, "skip the float64 oracle"),
    "no_memory": (False, "skip the memory measurement"),
}
RECORD = f"compare-{DEVICE}-{{dtype}}.jsonl"
HEAD = ("", "ms", "TF/s", "× limit", "peak MB", "Δ logp", "dX rel", "dW rel", "note")


class Comparison:
    """The problem, its solution where it is asked for, and which providers are timed."""

    def __init__(self, options: Namespace) -> None:
        torch.set_num_threads(options.threads)
        warnings.filterwarnings("ignore", module="(liger_kernel|trl|cut_cross_entropy|torch)")
        shape, chunk = (options.rows, options.hidden, options.vocab), min(options.chunk, options.rows)
        self.options = options
        self.problem = make_problem(*shape, getattr(torch, options.dtype), DEVICE, chunk_rows=chunk)
        providers = {x.name: x for x in all_providers(self.problem)}
        self.providers = {name: providers[name] for name in chosen(options.only, providers)}
        self._timed: dict[str, bool] = {}

    @cached_property
    def truth(self) -> LossAnswer:
        """The float64 solution."""
        return solve(self.problem)

    def call(self, name: str) -> float:
        """Milliseconds of a call. One that fails, or takes longer than --max-seconds, is not timed again."""
        self._timed[name] = False
        ms = milliseconds(partial(self.providers[name].run, self.problem), DEVICE)
        self._timed[name] = ms <= 1e3 * self.options.max_seconds
        return ms

    def check(self, name: str) -> Row:
        """The provider's errors, on CUDA its memory."""
        provider = self.providers[name]
        row: Row = {"provider": name, "note": provider.note}
        self.call(name)  # compiles, allocates
        if (ms := self.call(name)) > 1e3 * self.options.max_seconds:
            row["note"] = f"not timed: {ms / 1e3:.0f} s a call, --max-seconds {self.options.max_seconds:g}"
        if not self.options.no_errors:
            row["errors"] = errors_of(provider.run(self.problem), self.truth)
        if DEVICE == "cuda":
            row["peak_bytes"] = cuda_peak_bytes(partial(provider.run, self.problem))
            torch.cuda.empty_cache()
        gc.collect()
        return row

    def time(self, name: str) -> Row | None:
        """One call, timed; None if the provider cannot be."""
        if name not in self._timed:  # the call goes on from a record
            with suppress(Exception):
                self.call(name)
        row = {"provider": name, "ms": self.call(name)} if self._timed[name] else None
        gc.collect()
        return row

    def memory(self, name: str) -> Row | None:
        """Peak bytes of one call on a CPU, in a process of its own."""
        timed = self._timed.get(name)
        return {"provider": name, "peak_bytes": alone(_memory, name, self.options)} if timed else None


def _memory(name: str, options: Namespace) -> int:
    comparison = Comparison(options)
    call = partial(comparison.providers[name].run, comparison.problem)
    call()
    return resident_peak_bytes(call)


def cases(options: Namespace) -> Iterator[Case]:
    """Every provider's errors, its time in each round, and on a CPU its memory."""
    comparison = Comparison(options)
    names = list(comparison.providers)
    for name in names:
        yield f"{name}: errors", partial(comparison.check, name)
    yield from in_turns(names, options.rounds, comparison.time)
    if DEVICE == "cpu" and not options.no_memory:
        for name in names:
            if "bare" not in name:
                yield f"{name}: memory", partial(comparison.memory, name)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each provider."""
    o = head["options"]
    n, h, v = o["rows"], o["hidden"], o["vocab"]
    providers, lines = grouped(rows, "provider"), []
    times = {name: [row["ms"] for row in group if "ms" in row] for name, group in providers.items()}
    medians = {name: statistics.median(ms) for name, ms in times.items() if ms}
    for name, group in providers.items():
        case = {key: value for row in group for key, value in row.items()}
        ms, peak, errors = medians.get(name), case.get("peak_bytes"), case.get("errors", {})
        limit = medians.get(LIMIT) if name != LIMIT else None
        lines.append([
            name,
            median_and_range(times[name]) if ms else "–",
            number(6 * n * h * v / ms / 1e9 if ms else None),
            number(ms / limit if ms and limit else None, ".2f"),
            number(None if peak is None else peak / 2**20, ".0f"),
            *(number(errors.get(k), ".1e") for k in ("logp_max_abs", "d_hidden_rel", "d_weight_rel")),
            case.get("note", ""),
        ])  # fmt: skip
    shape = f"N={n} H={h} V={v} {o['dtype']}, chunks of {o['chunk']} rows"
    return f"{shape} · {machine_of(head)} · {o['rounds']} interleaved rounds\n{table(HEAD, lines)}"
