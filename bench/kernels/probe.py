"""Where the time of `policy_loss` goes on one GPU: its parts one by one, and what each could take at best.

  python -m bench.kernels.probe                        on CUDA N=16384 H=4096 V=151936, in about 4 minutes
  python -m bench.kernels.probe --shape 4096 1024 151936 --out probe.json

Part by part: the card's limits (a copy, cuBLAS's GEMMs),
the row kernels beside the copy, what the epilogues add to the bare Triton GEMM and its configurations, the
whole op by row kernel and chunk, few tokens, and the kernels of one call by time. A line that fails says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import kernels
from bench import records
from bench.kernels.problem import LossProblem, make_problem, subset
from bench.kernels.providers import ROW_KERNELS, ours, scoring, wide_mm
from bench.measure import machine, milliseconds, summary
from bench.records import Record, reason
from bench.table import number, table
from kernels.rows import Gradient

ROUNDS = 7
FEW_TOKENS = (256, 1024, 4096)
CONFIGURATIONS: tuple[dict[str, Any], ...] = (  # of the Triton GEMM, each against the default
    {"group": 16}, {"group": 32}, {"flatten": False}, {"stages": 3}, {"subtiles": 2}, {"subtiles": 1},
    {"columns": 128}, {"columns": 128, "programs_per_sm": 2, "warps": 4, "stages": 3},
)  # fmt: skip
LONGEST = 25  # kernels in the profile


@dataclass(frozen=True, slots=True)
class Line:
    """One thing to time."""

    part: str
    name: str
    call: Callable[[], object]
    flop: float = 0.0
    moved: float = 0.0  # bytes, read and written
    before: Callable[[], object] | None = None  # untimed, before each call: what the call overwrites


def lines(p: LossProblem, chunk: int) -> Iterator[Line]:
    """Everything, in order of value; tensors are made when a line is about to be timed, and let go."""
    for part in (limits, row_kernels, whole_op, epilogues):
        try:
            yield from part(p, chunk)
        except Exception as error:  # out of memory, for one; the other parts go on
            yield Line(part.__name__, "tensors for the rest of it", partial(_fail, error))


def limits(p: LossProblem, chunk: int) -> Iterator[Line]:
    """The card's own: a copy, and the GEMMs of a chunk with results of both types."""
    h, w, (c, v) = p.hidden.detach()[:chunk], p.weight.detach(), (chunk, len(p.weight))
    flop, new = 2.0 * c * h.shape[1] * v, partial(torch.empty, device=h.device)
    source, copy = new(c * v // 2), new(c * v // 2)
    yield Line("limit", "copy", partial(copy.copy_, source), moved=4.0 * c * v)
    del source, copy
    z, dz = new(c, v), new(c, v, dtype=h.dtype).normal_(0, 1e-3)
    yield Line("limit", "logits, bf16 result", lambda: wide_mm(h, w.T, dz), flop)
    yield Line("limit", "logits, FP32 result", lambda: wide_mm(h, w.T, z), flop)
    dz.normal_(0, 1e-3)
    apart = new(c, 2 * v, dtype=h.dtype)[:, :v].copy_(dz)  # as in place of FP32 logits
    dx, dw, dw16 = new(c, h.shape[1]), new(v, h.shape[1]), new(v, h.shape[1], dtype=h.dtype)
    for name, gradient in (("", dz), (", rows 2V apart", apart)):
        yield Line("limit", f"dX, FP32 result{name}", partial(wide_mm, gradient, w, dx), flop)
        yield Line("limit", f"dW, FP32 result{name}", partial(wide_mm, gradient.T, h, dw), flop)
        yield Line("limit", f"dW, FP32 sum{name}", partial(wide_mm, gradient.T, h, dw, add=True), flop)
    yield Line("limit", "dW, bf16 result", lambda: torch.mm(dz.T, h, out=dw16), flop)


def row_kernels(p: LossProblem, chunk: int) -> Iterator[Line]:
    """They can be as fast as the copy moves bytes."""
    from kernels.triton import rows

    y, ones = p.targets[:chunk], torch.ones(chunk, device=p.targets.device)
    z = torch.empty(chunk, len(p.weight), device=y.device)
    wide_mm(p.hidden.detach()[:chunk], p.weight.detach().T, z)
    size, kept = float(z.numel()), z.clone()
    gradient = Gradient(z.amax(1), ones, None, None, ones)
    again = partial(z.copy_, kept)
    yield Line("rows", "row_stats", lambda: rows.row_stats(z, y, ones, 0.0), moved=4 * size)
    grads = partial(rows.row_grads, z, y, ones, 0.0, gradient, False)
    yield Line("rows", "row_grads", grads, moved=6 * size, before=again)
    single = partial(rows.single_pass, z, y, ones, -ones)
    yield Line("rows", "single_pass", single, moved=6 * size, before=again)


def whole_op(p: LossProblem, chunk: int) -> Iterator[Line]:
    """Scoring; training by row kernel and chunk; and few tokens."""
    n, h, v = p.shape
    yield Line("op", "scoring", lambda: scoring(p, backend="triton"), 2.0 * n * h * v)
    for kernel in ROW_KERNELS:
        for rows in sorted({chunk // 2, chunk, n}):
            call = partial(ours, p, "triton", row_kernel=kernel, chunk_rows=rows)
            yield Line("op", f"{kernel}, chunks of {rows}", call, 6.0 * n * h * v)
    for few in (k for k in FEW_TOKENS if k < n):
        yield Line("op", f"{few} tokens", partial(ours, subset(p, few), "triton"), 6.0 * few * h * v)


def epilogues(p: LossProblem, chunk: int) -> Iterator[Line]:
    """The Triton GEMM alone, with each epilogue, and in other configurations."""
    from kernels.triton import config, fused

    h, w, y = p.hidden.detach()[:chunk], p.weight.detach(), p.targets[:chunk]
    ones, flop = torch.ones(chunk, device=h.device), 2.0 * chunk * h.shape[1] * len(w)
    z = torch.empty(chunk, len(w), device=h.device)
    yield Line("epilogue", "none: FP32 logits", partial(fused.logits, h, w, z), flop)
    del z
    score = partial(fused.score, h, w, y, ones, 0.0)
    whole = partial(fused.fused_epilogue, h, w, y, ones, -ones)
    yield Line("epilogue", "score", score, flop)
    yield Line("epilogue", "score, soft cap", lambda: fused.score(h, w, y, ones, 30.0), flop)
    yield Line("epilogue", "fused_epilogue", whole, flop)
    if not h.is_cuda:
        return
    default = config.gemm_config(config.capability(h.device), h.dtype, True, False)
    for changes in CONFIGURATIONS:
        changed = replace(default, **changes)
        yield Line("configuration", f"score {changes}", partial(score, changed), flop)
        yield Line("configuration", f"fused_epilogue {changes}", partial(whole, changed), flop)


def _fail(error: Exception) -> None:
    raise error


def measure(line: Line, device: str, rounds: int = ROUNDS) -> Record:
    """The line's record, after one untimed call; with an error if it fails."""
    record: Record = {"part": line.part, "name": line.name}
    ms = []
    try:
        for _ in range(1 + rounds):
            if line.before:
                line.before()
            ms.append(milliseconds(line.call, device))
    except Exception as error:
        return record | {"error": reason(error)}
    record |= {"ms": summary(ms[1:])}
    median = record["ms"]["median"]
    if line.flop:
        record["tflop_per_s"] = line.flop / median / 1e9
    if line.moved:
        record["tb_per_s"] = line.moved / median / 1e9
    return record


def longest_kernels(p: LossProblem, chunk: int) -> list[Record]:
    """The CUDA kernels of one forward and backward, those that take longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        ours(p, "triton", chunk_rows=chunk)
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [{"name": e.key, "calls": e.count, "ms": e.self_device_time_total / 1e3} for e in events[:LONGEST]]


def describe(cases: Sequence[Record]) -> str:
    """One line each."""
    rows = [
        [
            case["part"], case["name"], number((case.get("ms") or {}).get("median"), ".3f"),
            number(case.get("tflop_per_s"), ".0f"), number(case.get("tb_per_s"), ".2f"),
            case.get("error", ""),
        ]
        for case in cases
    ]  # fmt: skip
    return table(("part", "what", "ms", "TF/s", "TB/s", "note"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Time and print every line; the exit code."""
    tracked = "probe-gpu.json"
    p = records.parser("kernels.probe", __doc__, tracked)
    p.add_argument("--shape", type=int, nargs=3, default=(16384, 4096, 151936), metavar=("N", "H", "V"))
    p.add_argument("--chunk", type=int, default=8192, metavar="C", help="rows of a chunk (8192)")
    args = p.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print(
            "error: torch sees no GPU; TRITON_INTERPRET=1 and a tiny --shape try the lines", file=sys.stderr
        )
        return 1
    n, h, v = args.shape
    chunk = min(args.chunk, n)
    problem = make_problem(n, h, v, torch.bfloat16, device, chunk_rows=chunk)
    cases: list[Record] = []
    for line in lines(problem, chunk):
        cases.append(measure(line, device, ROUNDS if device == "cuda" else 1))
        print(describe(cases[-1:]).splitlines()[-1], flush=True)
    record: Record = {
        "shape": dict(zip("NHV", args.shape, strict=True)), "chunk_rows": chunk, "machine": machine(device),
        "commit": records.commit(), "kernels": kernels.backend_info(), "cases": cases,
    }  # fmt: skip
    text = ""
    if device == "cuda":
        record["longest_kernels"] = longest_kernels(problem, chunk)
        rows = [[k["name"][:80], str(k["calls"]), f"{k['ms']:.3f}"] for k in record["longest_kernels"]]
        text = table(("kernel", "calls", "ms"), rows)
    return records.finish(args, tracked, record, text)


if __name__ == "__main__":
    sys.exit(main())
