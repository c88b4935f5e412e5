"""The policy loss, forward and backward: ours beside its peers and its limit, in one run.

  python -m bench.kernels.compare                              FP32, N=2048 H=576 V=49152 (SmolLM2's head)
  python -m bench.kernels.compare --dtype bfloat16 --rounds 20
  python -m bench.kernels.compare --only ours,naive --rows 256 --vocab 8192 --out quick.json
  python -m bench.kernels.compare --rounds 6 --record          over bench/results/compare-cpu-float32.json

The providers take turns, so that a slow moment of the machine affects all of them. Columns:
{columns}
A provider that would take more than --max-seconds a call gets a line that says so, as does one that fails.
The peers: pip install --no-deps -r requirements/peers.txt
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from bench import records
from bench.kernels import harness
from bench.kernels.problem import LossAnswer, LossProblem, make_problem, solve, subset
from bench.kernels.providers import LIMIT, Provider, all_providers, peer_versions
from bench.measure import machine, milliseconds, resident_peak_bytes
from bench.records import ROOT, Record

PROBE = 16  # a first call on N/16 rows shows what a whole one will take
TRACKED = "compare-{device}-{dtype}.json"
T = TypeVar("T")


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    text = (__doc__ or "").format(columns=harness.COLUMNS)
    tracked = TRACKED.format(device="DEVICE", dtype="DTYPE")
    p = records.parser("kernels.compare", text, tracked, rounds=10, threads=records.cores())
    for name, letter, value, text in (
        ("rows", "N", 2048, "tokens"),
        ("hidden", "H", 576, "width of the hidden states"),
        ("vocab", "V", 49152, "vocabulary"),
        ("chunk", "C", 512, "rows per chunk, where chunked"),
    ):
        p.add_argument(f"--{name}", type=int, default=value, metavar=letter, help=f"{text} ({value})")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both operands")
    text = "a provider whose call takes longer, by an estimate on N/16 rows, is not timed (60)"
    p.add_argument("--max-seconds", type=float, default=60.0, metavar="S", help=text)
    p.add_argument("--only", default="", help="comma-separated: providers whose name contains one of these")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=("cpu", "cuda"), default=device)
    p.add_argument("--no-errors", action="store_true", help="skip the float64 oracle")
    p.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    p.add_argument("--memory-of", help=argparse.SUPPRESS)  # the child process: measure this provider alone
    return p


def build(args: argparse.Namespace) -> tuple[LossProblem, list[Provider]]:
    """The problem and the providers asked for."""
    dtype = getattr(torch, args.dtype)
    problem = make_problem(
        args.rows, args.hidden, args.vocab, dtype, args.device, chunk_rows=min(args.chunk, args.rows)
    )
    wanted = [word.strip().lower() for word in args.only.split(",") if word.strip()]
    providers = all_providers(problem)
    chosen = [x for x in providers if not wanted or any(word in x.name.lower() for word in wanted)]
    if not chosen:
        names = ", ".join(x.name for x in providers)
        raise SystemExit(f"--only {args.only}: no provider's name contains that; there are: {names}")
    return problem, chosen


def compare(problem: LossProblem, providers: Sequence[Provider], args: argparse.Namespace) -> list[Record]:
    """One record per provider: errors, times and memory, or why there are none."""
    few = subset(problem, max(1, args.rows // PROBE))
    truth = few_truth = None
    if not args.no_errors:
        truth, few_truth = _timed("float64 oracle", lambda: (solve(problem), solve(few)))
    cases = {x.name: {"name": x.name, "note": x.note} | _warm_up(x, problem, few, truth, few_truth, args)
               for x in providers}  # fmt: skip
    del truth, few_truth
    ready = [x for x in providers if not cases[x.name].keys() & {"error", "skipped"}]
    for name, measured in harness.measure(ready, problem, args.rounds, LIMIT, records.say).items():
        cases[name] |= measured
        if args.device == "cpu" and not args.no_memory and "error" not in measured and "bare" not in name:
            cases[name] |= _timed(f"{name}: memory", functools.partial(_memory, name, args))
    return list(cases.values())


def _warm_up(
    provider: Provider,
    problem: LossProblem,
    few: LossProblem,
    truth: LossAnswer | None,
    few_truth: LossAnswer | None,
    args: argparse.Namespace,
) -> Record:
    """The errors, or those of a few rows and why the provider is not timed; a failure as a line."""
    try:
        provider.run(few)
        seconds = milliseconds(lambda: provider.run(few), args.device) / 1e3 * args.rows / len(few.targets)
        records.say(f"{provider.name}: about {seconds:.1f} s a call")
        if seconds <= args.max_seconds:
            return {"errors": harness.errors(provider, problem, truth)}
        skipped = (
            f"not timed: about {seconds:.0f} s a call, more than --max-seconds {args.max_seconds:g}; "
            f"its errors are of {len(few.targets)} rows"
        )
        return {"skipped": skipped, "errors": harness.errors(provider, few, few_truth)}
    except Exception as error:
        records.say(f"{provider.name}: {records.reason(error)}")
        return {"error": records.reason(error)}
    finally:
        harness.free_memory()


def _memory(name: str, args: argparse.Namespace) -> Record:
    """Peak bytes of one call, and how they were read, in a process of its own."""
    shared = ("rows", "hidden", "vocab", "dtype", "chunk", "device", "threads")
    options = [f"--{k.replace('_', '-')}={getattr(args, k)}" for k in shared]
    command = [sys.executable, "-m", "bench.kernels.compare", *options, f"--memory-of={name}"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if child.returncode:
        tail = " ".join(child.stderr.split())[-150:]
        return {"memory_method": f"the measuring process ended with {child.returncode}: {tail}"}
    record: Record = json.loads(child.stdout.splitlines()[-1])
    return record


def _measure_memory(args: argparse.Namespace) -> None:
    """In the child: warm up, measure the second call, print JSON."""
    problem, providers = build(args)
    run = next(x.run for x in providers if x.name == args.memory_of)
    run(problem)
    peak, method = resident_peak_bytes(lambda: run(problem))
    print(json.dumps({"peak_bytes": peak, "memory_method": method}))


def _timed(step: str, call: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = call()
    records.say(f"{step}: {time.perf_counter() - start:.1f} s")
    return result


def describe(record: Record) -> str:
    """The table of a record."""
    n, h, v = (record["shape"][k] for k in "NHV")
    where = record["machine"].get("card") or f"{record['machine']['cpu']}, {record['machine']['isa']}"
    parts = (
        f"N={n} H={h} V={v} {record['dtype']}, chunks of {record['chunk_rows']} rows",
        f"{where}, {record['machine']['threads']} threads, torch {record['versions']['torch']}",
        f"commit {record['commit']}",
        f"medians of {record['rounds']} interleaved rounds",
    )
    return " · ".join(parts) + "\n" + harness.providers_table(record["cases"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the record where asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    records.at_least(1, args, "rows", "hidden", "vocab", "chunk", "rounds", "threads")
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="(liger_kernel|trl|cut_cross_entropy|torch)")
    if args.memory_of:
        _measure_memory(args)
        return 0
    problem, providers = build(args)
    record = {
        "command": records.command("kernels.compare", arguments),
        "machine": machine(args.device),
        "versions": peer_versions(),
        "commit": records.commit(),
        "shape": dict(zip("NHV", problem.shape, strict=True)),
        "dtype": args.dtype,
        "chunk_rows": problem.chunk_rows,
        "rounds": args.rounds,
        "cases": compare(problem, providers, args),
    }
    tracked = TRACKED.format(device=args.device, dtype=args.dtype)
    return records.finish(args, tracked, record, describe(record))


if __name__ == "__main__":
    sys.exit(main())
