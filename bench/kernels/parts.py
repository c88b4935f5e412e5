"""Times of the parts of the loss and of the body's fused ops, and the rates that they reach.

  python -m bench kernels.parts                       CPU: SmolLM2's head; CUDA: N=16384 H=4096 V=151936
  python -m bench kernels.parts --only op,body --dtype float32 --rows 256 --hidden 1024 --vocab 151936
  python -m bench kernels.parts --out new.jsonl --against old.jsonl    after a change: old times beside new

  limit          a copy, and torch's GEMMs of one chunk
  kernel         the kernels of one chunk of the loss, by this device's backend
  op             whole calls: scoring; training by mode, row kernel, chunk, and for few tokens
  epilogue       Triton only: what the epilogues add to its GEMM, and other configurations of it
  objective      log-probs into terms of the loss, for 65,536 tokens
  body           the body's ops beside what transformers computes in their place, forward and backward
  profile        CUDA only: the kernels of one forward and backward, the longest first
TF/s and TB/s are what the part needs over its time; for the body the bytes of one pass each way.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from bench.harness import Case, Row, chosen, read, reason
from bench.kernels.problem import LossProblem, make_problem, subset
from bench.kernels.providers import ROW_KERNELS, ours, scoring, wide_mm
from bench.measure import DEVICE, milliseconds
from bench.table import number, table
from kernels import fused_add_rms_norm, fused_qk_norm_rope, rms_norm, rope_tables, swiglu
from kernels.backends import choose
from kernels.objectives import OBJECTIVES
from kernels.rows import Gradient

CUDA = DEVICE == "cuda"
TRITON = CUDA or os.environ.get("TRITON_INTERPRET") == "1"
ROUNDS = 7 if CUDA else 3
N, H, V, CHUNK = (16384, 4096, 151936, 8192) if CUDA else (512, 576, 49152, 128)
OPTIONS: dict[str, Any] = {
    "rows": (N, "tokens N"),
    "hidden": (H, "width H"),
    "vocab": (V, "vocabulary V"),
    "chunk": (CHUNK, "rows of a chunk"),
    "dtype": ("bfloat16", "of both operands", ("float32", "bfloat16")),
    "only": ("", "comma-separated: parts whose name contains one of these"),
    "against": (None, "a record whose times to print beside these"),
}
FEW_TOKENS = (256, 1024, 4096)
OBJECTIVE_TOKENS, SEQUENCE = 65_536, 512
CONFIGURATIONS: tuple[dict[str, Any], ...] = (  # of the Triton GEMM, each against the default
    {"group": 16}, {"group": 32}, {"flatten": False}, {"stages": 3}, {"subtiles": 2}, {"subtiles": 1},
    {"columns": 128}, {"columns": 128, "programs_per_sm": 2, "warps": 4, "stages": 3},
)  # fmt: skip
LONGEST = 25  # kernels in the profile


class Line(NamedTuple):
    """One thing to time."""

    name: str
    call: Callable[[], object]
    flop: float = 0.0
    moved: float = 0.0  # bytes, read and written
    before: Callable[[], object] | None = None  # untimed, before each call: what the call overwrites


def limit(p: LossProblem, chunk: int) -> Iterator[Line]:
    """A copy, and the GEMMs of a chunk with results of both types."""
    h, w, (c, v) = p.hidden.detach()[:chunk], p.weight.detach(), (chunk, len(p.weight))
    flop, new = 2.0 * c * h.shape[1] * v, partial(torch.empty, device=h.device)
    source, copy = new(c * v // 2), new(c * v // 2)
    yield Line("copy", partial(copy.copy_, source), moved=4.0 * c * v)
    del source, copy
    z, dz = new(c, v), new(c, v, dtype=h.dtype).normal_(0, 1e-3)
    yield Line("logits, result of the same type", lambda: wide_mm(h, w.T, dz), flop)
    yield Line("logits, FP32 result", lambda: wide_mm(h, w.T, z), flop)
    dz.normal_(0, 1e-3)
    apart = new(c, 2 * v, dtype=h.dtype)[:, :v].copy_(dz)  # as in place of FP32 logits
    dx, dw, narrow = new(c, h.shape[1]), new(v, h.shape[1]), new(v, h.shape[1], dtype=h.dtype)
    for name, gradient in (("", dz), (", rows 2V apart", apart)):
        yield Line(f"dX, FP32 result{name}", partial(wide_mm, gradient, w, dx), flop)
        yield Line(f"dW, FP32 result{name}", partial(wide_mm, gradient.T, h, dw), flop)
        yield Line(f"dW, FP32 sum{name}", partial(wide_mm, gradient.T, h, dw, add=True), flop)
    yield Line("dW, result of the same type", lambda: torch.mm(dz.T, h, out=narrow), flop)


def kernel(p: LossProblem, chunk: int) -> Iterator[Line]:
    """The row kernels can be as fast as the copy moves bytes, the others as torch's GEMMs."""
    hidden, weight, y = p.hidden.detach()[:chunk], p.weight.detach(), p.targets[:chunk]
    backend: Any = choose(hidden, weight, "triton" if TRITON else None)[1]
    (n, h), v = hidden.shape, len(weight)
    prepared = backend.prepare(hidden, weight, torch.float32, 3)
    z = torch.empty(n, v, device=hidden.device)
    logits = partial(backend.logits, hidden, prepared, z)
    logits()
    ones, anchors, size, flop = (
        torch.ones(n, device=z.device),
        p.logprobs_gen[:n],
        4.0 * n * v,
        2.0 * n * h * v,
    )
    yield Line("logits", logits, flop)
    yield Line("row_stats", lambda: backend.row_stats(z, y, ones, 0.0), moved=size)
    logits_copy, gradient = z.clone(), Gradient(z.amax(1), ones, None, None, ones)
    again = partial(z.copy_, logits_copy)
    grads = partial(backend.row_grads, z, y, ones, 0.0, gradient, False)
    yield Line("row_grads", grads, moved=1.5 * size, before=again)
    if TRITON:
        single = partial(backend.single_pass, z, y, ones, anchors)
        yield Line("single_pass", single, moved=1.5 * size, before=again)
        fused = partial(backend.fused_epilogue, hidden, prepared, y, ones, anchors)
        yield Line("fused_epilogue", fused, flop)
    scaled = (logits_copy / n).to(hidden.dtype if TRITON else torch.float32)  # as a gradient
    for name, call, shape in (
        ("d_hidden", partial(backend.d_hidden, scaled, prepared), (n, h)),
        ("d_weight", partial(backend.add_d_weight, scaled, hidden), (v, h)),
    ):
        yield Line(name, partial(call, torch.zeros(shape, device=z.device)), flop)


def op(p: LossProblem, chunk: int) -> Iterator[Line]:
    """Scoring; training by mode, by row kernel and chunk; and few tokens."""
    n, h, v = p.shape
    flop, backend = float(n * h * v), "triton" if TRITON else None
    yield Line("scoring", lambda: scoring(p, backend=backend), 2 * flop)
    modes: dict[str, dict[str, Any]] = {
        "training": {}, "training, exact": {"exact": True},
        "training, entropy and KL": {
            "entropy_bonus": 0.01, "kl": kernels.KL(0.01), "logprobs_ref": p.logprobs_gen,
        },
        "training, GSPO": {
            "objective": kernels.GSPO(), "sequences": torch.arange(n, device=p.hidden.device) // 16,
        },
    }  # fmt: skip
    for name, mode in modes.items():
        work = (8 if "GSPO" in name else 6) * flop  # GSPO scores all tokens first
        yield Line(name, partial(ours, p, backend, chunk_rows=chunk, **mode), work)
    for kernel in ROW_KERNELS if TRITON else ():
        for rows in sorted({chunk // 2, chunk, n}):
            call = partial(ours, p, backend, row_kernel=kernel, chunk_rows=rows)
            yield Line(f"{kernel}, chunks of {rows}", call, 6 * flop)
    for few in (k for k in FEW_TOKENS if k < n):
        yield Line(f"{few} tokens", partial(ours, subset(p, few), backend), 6.0 * few * h * v)


def epilogue(p: LossProblem, chunk: int) -> Iterator[Line]:
    """The Triton GEMM alone, with each epilogue, and in other configurations."""
    if not TRITON:
        return
    from kernels.triton import config, fused

    h, w, y = p.hidden.detach()[:chunk], p.weight.detach(), p.targets[:chunk]
    ones, flop = torch.ones(chunk, device=h.device), 2.0 * chunk * h.shape[1] * len(w)
    z = torch.empty(chunk, len(w), device=h.device)
    yield Line("none: FP32 logits", partial(fused.logits, h, w, z), flop)
    del z
    score = partial(fused.score, h, w, y, ones, 0.0)
    whole = partial(fused.fused_epilogue, h, w, y, ones, -ones)
    yield Line("score", score, flop)
    yield Line("score, soft cap", lambda: fused.score(h, w, y, ones, 30.0), flop)
    yield Line("fused_epilogue", whole, flop)
    if not CUDA:
        return
    default = config.gemm_config(config.capability(h.device), h.dtype, True, False)
    for changes in CONFIGURATIONS:
        changed = replace(default, **changes)
        yield Line(f"score {changes}", partial(score, changed), flop)
        yield Line(f"fused_epilogue {changes}", partial(whole, changed), flop)


def objective(p: LossProblem, chunk: int) -> Iterator[Line]:
    """An objective's terms, GSPO's in sequences."""
    n = min(OBJECTIVE_TOKENS, p.weight.numel())
    logp, logprobs_gen, advantages = torch.randn(3, n, device=p.hidden.device)
    sequences = torch.arange(n, device=logp.device) // SEQUENCE, torch.full_like(logp, 1 / n)
    for name, entry in OBJECTIVES.items():
        one: Any = entry.make()
        if entry.over_sequences:
            yield Line(name, partial(one.over_sequences, logp, logprobs_gen, advantages, *sequences))
        else:
            yield Line(name, partial(one, logp, logprobs_gen, advantages))


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Qwen3RMSNorm of transformers."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same after the residual's sum."""
    total = residual + x
    return eager_norm(total, weight), total


def eager_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, ...]:
    """q_norm, k_norm and apply_rotary_pos_emb of transformers."""
    cos, sin = (torch.cat([x, x], -1)[positions][:, None].to(q.dtype) for x in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return rotated(eager_norm(q, q_weight)), rotated(eager_norm(k, k_weight))


def our_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, ...]:
    """The same by one call."""
    return fused_qk_norm_rope(q, k, cos, sin, positions, q_weight=q_weight, k_weight=k_weight)


def body(p: LossProblem, chunk: int) -> Iterator[Line]:
    """The ops of a layer of the problem's width, with heads of 128 columns and an MLP four times as wide."""
    n, width, device = len(p.targets), p.hidden.shape[1], p.hidden.device

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(p.hidden.dtype).requires_grad_()

    wide, heads = (n, 4 * width), max(1, width // 128)
    tables = *rope_tables(n, 128, 1e6, device), torch.arange(n, device=device)
    rope = [new(n, heads, 128), new(n, max(1, heads // 4), 128), new(128), new(128), *tables]
    ops: tuple[tuple[str, Callable[..., Any], Callable[..., Any], list[Tensor]], ...] = (
        ("rms_norm", rms_norm, eager_norm, [new(n, width), new(width)]),
        (
            "fused_add_rms_norm",
            fused_add_rms_norm,
            eager_add_norm,
            [new(n, width), new(n, width), new(width)],
        ),
        ("fused_qk_norm_rope", our_rope, eager_rope, rope),
        ("swiglu", swiglu, lambda gate, up: F.silu(gate) * up, [new(*wide), new(*wide)]),
    )
    for name, fused, eager, inputs in ops:
        for who, call in (("ours", fused), ("eager", eager)):
            yield _both_ways(f"{name}, {who}", call, inputs)


def _both_ways(name: str, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Line:
    """Forward and backward, and the bytes that one pass each way moves."""
    leaves = [x for x in inputs if x.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        out = call(*inputs)
        return (out,) if isinstance(out, Tensor) else out

    upstream = [torch.randn_like(x) for x in forward()]
    moved = sum(x.nbytes for x in [*inputs, *upstream, *inputs, *upstream, *leaves])
    return Line(name, lambda: torch.autograd.grad(forward(), leaves, upstream), moved=moved)


def measure(line: Line) -> Row:
    """The line's median time, after one untimed call, and its rates; with an error if it fails."""
    ms = []
    try:
        for _ in range(1 + ROUNDS):
            if line.before:
                line.before()
            ms.append(milliseconds(line.call, DEVICE))
    except Exception as error:
        return {"name": line.name, "error": reason(error)}
    time = median(ms[1:])
    rates = {"tflop_per_s": line.flop / time / 1e9, "tb_per_s": line.moved / time / 1e9}
    return {"name": line.name, "ms": time} | {key: rate for key, rate in rates.items() if rate}


def measured(part: Callable[[LossProblem, int], Iterator[Line]], p: LossProblem, chunk: int) -> Row:
    """Every line of a part; one that has no memory for its tensors ends it."""
    lines = []
    try:
        for line in part(p, chunk):
            lines.append(measure(line))
    except Exception as error:
        lines.append({"name": "tensors for the rest of it", "error": reason(error)})
    return {"lines": lines}


def profile(p: LossProblem, chunk: int) -> Row:
    """The CUDA kernels of one forward and backward, those that take longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    with profiling(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        ours(p, "triton", chunk_rows=chunk)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:LONGEST]
    return {
        "lines": [{"name": f"{e.count} × {e.key[:80]}", "ms": e.self_device_time_total / 1e3} for e in events]
    }


PARTS = (limit, kernel, op, epilogue, objective, body)


def cases(options: Namespace) -> Iterator[Case]:
    """Every part, in order of value."""
    chunk = min(options.chunk, options.rows)
    shape = options.rows, options.hidden, options.vocab
    p = make_problem(*shape, getattr(torch, options.dtype), DEVICE, chunk_rows=chunk)
    parts = {part.__name__: partial(measured, part) for part in PARTS}
    if CUDA:
        parts["profile"] = profile  # type: ignore[assignment]  # of the same signature
    for name in chosen(options.only, parts):
        yield name, partial(parts[name], p, chunk)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each thing that was timed."""
    old: dict[tuple[str, str], float] = {}
    against = head["options"].get("against")
    if against:
        earlier = read(Path(against))[1]
        old = {(row["case"], x["name"]): x["ms"] for row in earlier for x in row["lines"] if "ms" in x}
    lines = []
    for row in rows:
        for x in row["lines"]:
            cells = [number(x.get(key), form) for key, form in (("ms", ".3f"), ("tflop_per_s", ".3g"))]
            cells += [number(old.get((row["case"], x["name"])), ".3f")] * bool(against)
            cells += [number(x.get("tb_per_s"), ".2f"), x.get("error", "")]
            lines.append([row["case"], x["name"], *cells])
    columns = ("part", "what", "ms", "TF/s", *(["ms before"] * bool(against)), "TB/s", "note")
    return table(columns, lines)
