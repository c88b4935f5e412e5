"""Times of the parts of the loss and of the body's fused ops, and the rates that they reach. [4 min]

  python -m bench kernels.parts                       CPU: SmolLM2's head; CUDA: N=16384 H=4096 V=151936
  python -m bench kernels.parts --only op,body --dtype float32 --rows 256 --hidden 1024 --vocab 151936
  python -m bench kernels.parts --out new.jsonl --against old.jsonl    after a change: old times beside new

  limit          a copy, and torch's GEMMs of one chunk
  kernel         the kernels of one chunk of the loss, by this device's backend
  op             whole calls: scoring; training by mode, row kernel, chunk, and for few tokens
  epilogue       Triton only: what the epilogues add to its GEMM, and other configurations of it
  body           the body's ops beside what transformers computes in their place, forward and backward
  profile        CUDA only: the kernels of one forward and backward, the longest first
TF/s and TB/s are what the part needs over its time; for the body the bytes of one pass each way.
"""

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
from bench.kernels.problem import LossProblem, make_problem
from bench.kernels.providers import ROW_KERNELS, ours, wide_mm
from bench.measure import DEVICE, milliseconds
from bench.table import number, table
from kernels import fused_add_rms_norm, fused_qk_norm_rope, rms_norm, rope_tables, swiglu
from kernels.backends import choose
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
CONFIGURATIONS: tuple[dict[str, Any], ...] = (  # of the Triton GEMM, each against the default
    {"group": 16}, {"group": 32}, {"flatten": False}, {"stages": 3}, {"subtiles": 2}, {"subtiles": 1},
    {"columns": 128}, {"columns": 128, "programs_per_sm": 2, "warps": 4, "stages": 3},
)  # fmt: skip


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
    z, ones = torch.empty(n, v, device=hidden.device), torch.ones(n, device=hidden.device)
    anchors, size, flop = p.logprobs_gen[:n], 4.0 * n * v, 2.0 * n * h * v
    logits = partial(backend.logits, hidden, prepared, z)
    logits()
    yield Line("logits", logits, flop)
    yield Line("row_stats", lambda: backend.row_stats(z, y, ones, 0.0), moved=size)
    logits_copy, gradient = z.clone(), Gradient(z.amax(1), ones, None, None, ones)
    again = partial(z.copy_, logits_copy)
    grads = partial(backend.row_grads, z, y, ones, 0.0, gradient, torch.bfloat16)
    yield Line("row_grads", grads, moved=1.5 * size, before=again)
    if TRITON:
        single = partial(backend.single_pass, z, y, ones, anchors)
        yield Line("single_pass", single, moved=1.5 * size, before=again)
        fused = partial(backend.fused_epilogue, hidden, prepared, y, ones, anchors)
        yield Line("fused_epilogue", fused, flop)
    scaled = (logits_copy / n).to(hidden.dtype if TRITON else torch.float32)  # as a gradient
    dx, dw = torch.zeros(n, h, device=z.device), torch.zeros(v, h, device=z.device)
    yield Line("d_hidden", partial(backend.d_hidden, scaled, prepared, dx), flop)
    yield Line("d_weight", partial(backend.add_d_weight, scaled, hidden, dw), flop)


def op(p: LossProblem, chunk: int) -> Iterator[Line]:
    """Scoring; training by mode, by row kernel and chunk; and few tokens."""
    n, h, v = p.shape
    flop, backend = float(n * h * v), "triton" if TRITON else None
    score = partial(kernels.linear_logprob, p.hidden, p.weight, p.targets, backend=backend)
    yield Line("scoring", score, 2 * flop)
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
    frozen = replace(p, weight=p.weight.detach())
    yield Line("training, head frozen", partial(ours, frozen, backend, chunk_rows=chunk), 4 * flop)
    for kernel in ROW_KERNELS if TRITON else ():
        for rows in sorted({chunk // 2, chunk, n}):
            call = partial(ours, p, backend, row_kernel=kernel, chunk_rows=rows)
            yield Line(f"{kernel}, chunks of {rows}", call, 6 * flop)
    for few in (k for k in (256, 1024, 4096) if k < n):
        problem = make_problem(few, h, v, p.hidden.dtype, p.hidden.device.type)
        yield Line(f"{few} tokens", partial(ours, problem, backend), 6.0 * few * h * v)


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


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Qwen3RMSNorm of transformers."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same after the residual's sum."""
    total = residual + x
    return eager_norm(total, weight), total


def body(p: LossProblem, chunk: int) -> Iterator[Line]:
    """The ops of a layer of the problem's width, with heads of 128 columns and an MLP four times as wide."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    n, width, device, dtype = len(p.targets), p.hidden.shape[1], p.hidden.device, p.hidden.dtype
    cos, sin = rope_tables(n, 128, 1e6, device)
    eager_cos, eager_sin = (torch.cat([x, x], -1).to(dtype) for x in (cos, sin))
    positions = torch.arange(n, device=device)

    def our_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        return fused_qk_norm_rope(q, k, cos, sin, positions, q_weight=q_weight, k_weight=k_weight)

    def eager_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        normed = eager_norm(q, q_weight), eager_norm(k, k_weight)
        return tuple(apply_rotary_pos_emb(*normed, eager_cos, eager_sin))

    heads, vector, rows, wide = max(1, width // 128), (width,), (n, width), (n, 4 * width)
    ops: tuple[tuple[str, Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]], ...] = (
        ("rms_norm", rms_norm, eager_norm, [rows, vector]),
        ("fused_add_rms_norm", fused_add_rms_norm, eager_add_norm, [rows, rows, vector]),
        (
            "fused_qk_norm_rope", our_rope, eager_rope,
            [(n, heads, 128), (n, max(1, heads // 4), 128), (128,), (128,)],
        ),
        ("swiglu", swiglu, lambda gate, up: F.silu(gate) * up, [wide, wide]),
    )  # fmt: skip
    for name, fused, eager, shapes in ops:
        inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
        yield _both_ways(f"{name}, ours", fused, inputs)
        yield _both_ways(f"{name}, eager", eager, inputs)


def _both_ways(name: str, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Line:
    """Forward and backward, and the bytes that one pass each way moves."""

    def forward() -> tuple[Tensor, ...]:
        out = call(*inputs)
        return (out,) if isinstance(out, Tensor) else out

    upstream = [torch.randn_like(x) for x in forward()]
    moved = sum(x.nbytes for x in [*inputs, *upstream, *inputs, *upstream, *inputs])
    return Line(name, lambda: torch.autograd.grad(forward(), inputs, upstream), moved=moved)


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
    with torch.profiler.profile() as profiler:
        ours(p, "triton", chunk_rows=chunk)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:25]
    lines = [{"name": f"{e.count} × {e.key[:80]}", "ms": e.self_device_time_total / 1e3} for e in events]
    return {"lines": lines}


PARTS = (limit, kernel, op, epilogue, body)


def cases(options: Namespace) -> Iterator[Case]:
    """Every part, in order of value."""
    chunk = min(options.chunk, options.rows)
    shape = options.rows, options.hidden, options.vocab
    p = make_problem(*shape, getattr(torch, options.dtype), DEVICE, chunk_rows=chunk)
    parts: dict[str, Callable[..., Row]] = {part.__name__: partial(measured, part) for part in PARTS}
    for name in chosen(options.only, parts | ({"profile": profile} if CUDA else {})):
        yield name, partial(parts.get(name, profile), p, chunk)


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
