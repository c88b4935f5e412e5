"""The policy loss, forward and backward: ours beside its peers and its limit, in one run.

  python -m bench.kernels.compare                              FP32, N=2048 H=576 V=49152 (SmolLM2's head)
  python -m bench.kernels.compare --dtype bfloat16 --rounds 20
  python -m bench.kernels.compare --only ours,naive --rows 256 --vocab 8192 --out quick.json

The providers take turns (round robin), so a slow moment of the machine hits all. Columns:
  ms, quartiles   of one forward + backward over the rounds; "× limit" is over the three bare GEMMs
  peak MB         growth of memory during one call, dX and dW included: of the process's resident peak on the
                  CPU (each provider in a process of its own), of torch's allocator on CUDA
  |Δlogp|         largest distance of a log-prob from float64, in nats
  dX rel, dW rel  ‖gradient − float64's‖ / ‖float64's‖
A provider that would take more than --max-seconds a call is a line that says so, as is one that fails.
The peers: pip install --no-deps -r requirements/peers.txt
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.kernels.cases import Case, all_cases, peer_versions
from bench.kernels.problem import Answer, Problem, errors, make_problem, solve, subset
from bench.measure import (
    ROOT,
    commit,
    cuda_peak_bytes,
    interleaved,
    machine,
    milliseconds,
    reason,
    resident_peak_bytes,
    summary,
    write_json,
)
from bench.table import COMPARE_HEAD, compare_rows, table

LIMIT = "3 bare GEMMs"
PROBE = 16  # a first call on N/16 rows tells what a whole one will take


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    p = argparse.ArgumentParser(
        "python -m bench.kernels.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--rows", type=int, default=2048, metavar="N", help="tokens (2048)")
    p.add_argument("--hidden", type=int, default=576, metavar="H", help="width of the hidden states (576)")
    p.add_argument("--vocab", type=int, default=49152, metavar="V", help="vocabulary (49152)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both operands")
    p.add_argument(
        "--chunk", type=int, default=512, metavar="C", help="rows per chunk, for all who chunk (512)"
    )
    p.add_argument("--logit-std", type=float, default=3.0, help="standard deviation of the logits (3)")
    p.add_argument("--rounds", type=int, default=10, help="timed calls of each provider (10)")
    p.add_argument(
        "--max-seconds", type=float, default=60.0, metavar="S",
        help="a provider whose call takes longer, by an estimate on N/16 rows, is not timed (60)",
    )  # fmt: skip
    p.add_argument("--only", default="", help="comma-separated: providers whose name contains one of these")
    p.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    p.add_argument(
        "--threads", type=int, default=_cores(), help="CPU threads (all that this process may use)"
    )
    p.add_argument("--no-errors", action="store_true", help="skip the float64 oracle")
    p.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    p.add_argument("--out", type=Path, help="the JSON (bench/results/compare-DEVICE-DTYPE.json)")
    p.add_argument("--memory-of", help=argparse.SUPPRESS)  # the child process: measure this provider alone
    return p


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(args: argparse.Namespace) -> tuple[Problem, list[Case]]:
    """The problem and the providers asked for."""
    dtype = getattr(torch, args.dtype)
    problem = make_problem(
        args.rows, args.hidden, args.vocab, dtype, args.device, args.logit_std, min(args.chunk, args.rows)
    )
    wanted = [word.strip().lower() for word in args.only.split(",") if word.strip()]
    cases = [c for c in all_cases(problem) if not wanted or any(w in c.name.lower() for w in wanted)]
    if not cases:
        names = ", ".join(c.name for c in all_cases(problem))
        raise SystemExit(f"--only {args.only}: no provider's name contains that; there are: {names}")
    return problem, cases


def compare(problem: Problem, cases: Sequence[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per case: times, errors, memory, or why there are none."""
    few = subset(problem, max(1, args.rows // PROBE))
    truth = few_truth = None
    if not args.no_errors:
        truth, few_truth = _said("float64 oracle", lambda: (solve(problem), solve(few)))
    records = {c.name: {"name": c.name, "note": c.note, "gemm_flops_per_nhv": c.flops} for c in cases}
    ready = [c for c in cases if _first(c, problem, few, truth, few_truth, args, records[c.name])]
    del truth, few_truth
    calls = {c.name: functools.partial(c.run, problem) for c in ready}
    times, failed = interleaved(calls, args.rounds, args.device, say)
    for name, call in calls.items():
        records[name] |= {"ms": summary(times[name]), "rounds_ms": times[name]}
        if name in failed:
            records[name]["error"] = failed[name]
        elif not args.no_memory and "bare" not in name:
            records[name] |= _said(f"{name}: memory", functools.partial(_memory, name, call, args))
    return list(records.values())


def _first(
    case: Case,
    problem: Problem,
    few: Problem,
    truth: Answer | None,
    few_truth: Answer | None,
    args: argparse.Namespace,
    record: dict[str, Any],
) -> bool:
    """Warm up and take the errors, into the record; whether the case is to be timed."""
    try:
        case.run(few)
        seconds = milliseconds(lambda: case.run(few), args.device) / 1e3 * args.rows / len(few.targets)
        if seconds > args.max_seconds:
            record["skipped"] = (
                f"not timed: about {seconds:.0f} s a call, more than --max-seconds {args.max_seconds:g}; "
                f"its errors are of {len(few.targets)} rows"
            )
            record["errors"] = errors(case.run(few), few_truth) if few_truth else {}
        else:
            answer = case.run(problem)
            record["errors"] = errors(answer, truth) if truth else {}
        say(f"{case.name}: " + record.get("skipped", f"about {seconds:.1f} s a call"))
    except Exception as error:
        record["error"] = reason(error)
        say(f"{case.name}: {record['error']}")
    gc.collect()
    return not record.keys() & {"error", "skipped"}


def _memory(name: str, call: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes of one call and how they were read; on the CPU in a process of its own."""
    if args.device == "cuda":
        return {"peak_bytes": cuda_peak_bytes(call), "memory_method": "torch.cuda.max_memory_allocated"}
    options = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if k in (
        "rows", "hidden", "vocab", "dtype", "chunk", "logit_std", "device", "threads")]  # fmt: skip
    command = [sys.executable, "-m", "bench.kernels.compare", *options, f"--memory-of={name}"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if child.returncode:
        tail = " ".join(child.stderr.split())[-150:]
        return {"memory_method": f"the measuring process ended with {child.returncode}: {tail}"}
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def _measure_memory(args: argparse.Namespace) -> None:
    """In the child: warm up, measure the second call, print JSON."""
    problem, cases = build(args)
    run = next(c.run for c in cases if c.name == args.memory_of)
    run(problem)
    peak, method = resident_peak_bytes(lambda: run(problem))
    print(json.dumps({"peak_bytes": peak, "memory_method": method}))


def say(line: str) -> None:
    """Progress, on stderr: stdout is the table's."""
    print(line, file=sys.stderr, flush=True)


def _said(what: str, call: Any) -> Any:
    start = time.perf_counter()
    result = call()
    say(f"{what}: {time.perf_counter() - start:.1f} s")
    return result


def describe(record: dict[str, Any]) -> str:
    """The table of a record."""
    n, h, v = (record["shape"][k] for k in "NHV")
    where = record["machine"].get("card") or f"{record['machine']['cpu']}, {record['machine']['isa']}"
    parts = (
        f"N={n} H={h} V={v} {record['dtype']}, chunks of {record['chunk_rows']} rows",
        f"{where}, {record['machine']['threads']} threads, torch {record['versions']['torch']}",
        f"commit {record['commit']}",
        f"medians of {record['rounds']} interleaved rounds",
    )
    return " · ".join(parts) + "\n" + table(COMPARE_HEAD, compare_rows(record["cases"], LIMIT))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    for name in ("rows", "hidden", "vocab", "chunk", "rounds", "threads"):
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name} is {getattr(args, name)}; expected at least 1")
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="(liger_kernel|trl|cut_cross_entropy|torch)")
    if args.memory_of:
        return _measure_memory(args)
    problem, cases = build(args)
    record = {
        "command": " ".join(("python -m bench.kernels.compare", *arguments)),
        "machine": machine(args.device),
        "versions": peer_versions(),
        "commit": commit(),
        "shape": dict(zip("NHV", problem.shape, strict=True)),
        "dtype": args.dtype,
        "chunk_rows": problem.chunk_rows,
        "logit_std": args.logit_std,
        "rounds": args.rounds,
        "cases": compare(problem, cases, args),
    }
    out = args.out or ROOT / "bench" / "results" / f"compare-{args.device}-{args.dtype}.json"
    write_json(out, record)
    print(describe(record))
    say(f"written to {out}")


if __name__ == "__main__":
    main()
