"""The errors of our kernels against float64, check by check, and whether they meet their bars.

  python -m bench kernels.accuracy                    this machine's backends; about 5 minutes on two cores
  python -m bench kernels.accuracy --quick            small shapes: seconds, and bars are not checked
  python -m bench kernels.accuracy --record           over bench/results/accuracy-cpu.jsonl
  TRITON_INTERPRET=1 python -m bench kernels.accuracy --quick --backends triton

Beside ours the table has the error that the GEMM alone allows: FP32 logits straight from the matrix units
(on CUDA mm(out_dtype=float32) of bf16), with everything after them in float64.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import kernels
from bench.harness import Case, Row, chosen
from bench.kernels import providers
from bench.kernels.problem import (
    LossAnswer,
    LossProblem,
    blocks,
    errors_of,
    log_probs,
    make_problem,
    relative,
    solve,
)
from bench.measure import DEVICE
from bench.table import number, table

OPTIONS: dict[str, Any] = {
    "backends": (",".join(providers.our_backends()), "comma-separated"),
    "only": ("", "comma-separated: checks whose name contains one of these"),
    "quick": (False, "small shapes"),
}
RECORD = f"accuracy-{DEVICE}.jsonl"
ROWS = 64  # scored rows of the log-prob checks
LOGIT_BARS = {3.0: 5e-6, 10.0: 1.5e-5}  # max |Δlogp|, by logit std; CUDA: 1.5 × the GEMM's own error
GRADIENT_BARS = {"two-pass": 1.9e-3, "single-pass": 2.5e-3, "fused-epilogue": 2.5e-3, "exact": 1e-5}
SPLIT_BARS = {3: 4e-6, 2: 3e-5}  # max |Δlogp| with FP32 weights split in bf16 parts, logit std 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """(H, V) and the like of each check."""

    logits: tuple[int, int] = (4096, 151936)
    peaked: tuple[int, int] = (1024, 8192)
    gradients: tuple[int, int, int] = (256, 512, 32768)
    chunks: tuple[int, int, int] = (1024, 128, 8192)
    parts: tuple[int, int] = (4096, 32768)


Line = tuple[str, float, float | None]  # what is measured, its value and bar
Check = Callable[[str, Sizes], Iterator[tuple[str, Callable[[], list[Line]]]]]  # of a backend: its modes
QUICK = Sizes((64, 500), (32, 200), (48, 32, 400), (256, 16, 200), (64, 300))


@torch.no_grad()
def logits64(hidden: Tensor, weight: Tensor) -> Tensor:
    """(R, V) float64 logits, a block of the vocabulary at a time."""
    x = hidden.double()
    out = torch.empty(len(hidden), len(weight), dtype=torch.float64, device=x.device)
    for columns in blocks(len(weight), 8 * weight.shape[1]):
        torch.mm(x, weight[columns].double().t(), out=out[:, columns])
    return out


@torch.no_grad()
def mm_error(p: LossProblem, truth: Tensor) -> dict[str, float]:
    """Errors of FP32 logits from one GEMM: of themselves, and of log-probs with a float64 epilogue.

    On the CPU, where mm(out_dtype=) does not exist, the GEMM is torch's FP32 one on upcast operands.
    """
    x, w = p.hidden.detach(), p.weight.detach()
    z = torch.empty(len(x), len(w), device=x.device)
    providers.wide_mm(x, w.t(), z)
    z = z.double()
    return {
        "logits_max_abs": float((z - truth).abs().max()),
        "logp_max_abs": float((log_probs(z, p.targets) - log_probs(truth, p.targets)).abs().max()),
    }


def worst(answer: Tensor, truth: Tensor) -> float:
    """max |answer − truth|; NaN if any of `answer` is."""
    return float((answer.detach().double() - truth).abs().max())


def train_logprobs(p: LossProblem, backend: str, **mode: Any) -> Tensor:
    """Log-probs that `policy_loss` returns with its gradients, so from the row kernel asked for."""
    return kernels.policy_loss(
        p.hidden, p.weight, p.targets, logprobs_gen=p.logprobs_gen, advantages=p.advantages,
        token_weights=p.token_weights, backend=backend, **mode,
    ).logprobs  # fmt: skip


@lru_cache(maxsize=1)
def scored(size: tuple[int, int], std: float) -> tuple[LossProblem, Tensor, dict[str, float]]:
    """A problem, its log-probs in float64, and the errors of the GEMM alone."""
    p = make_problem(ROWS, *size, torch.bfloat16, DEVICE, std)
    z = logits64(p.hidden.detach(), p.weight.detach())
    return p, log_probs(z, p.targets), mm_error(p, z)


def logprobs(backend: str, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
    """max |Δlogp| of scoring and of training at a large head, by logit std."""
    product = "mm(out_dtype=float32)" if DEVICE == "cuda" else "FP32 mm"
    for std in LOGIT_BARS:
        check = f"|Δlogp| max, H={sizes.logits[0]} V={sizes.logits[1]}, logit std {std:g}"

        def measure(train: dict[str, Any] | None, std: float = std, check: str = check) -> list[Line]:
            p, truth, gemm = scored(sizes.logits, std)
            bar = LOGIT_BARS[std] if DEVICE == "cpu" else 1.5 * gemm["logp_max_abs"]
            if train is None:
                answer = kernels.linear_logprob(p.hidden, p.weight, p.targets, backend=backend)[0]
            else:
                answer = train_logprobs(p, backend, **train)
            return [(check, worst(answer, truth), bar)]

        def alone(std: float = std, check: str = check) -> list[Line]:
            return [(check, scored(sizes.logits, std)[2]["logp_max_abs"], None)]

        yield f"{product} + float64, std {std:g}", alone
        yield f"{backend}, scoring, std {std:g}", partial(measure, None)
        for kernel in row_kernels(backend):
            yield f"{backend}, training, {kernel}, std {std:g}", partial(measure, {"row_kernel": kernel})


def row_kernels(backend: str) -> tuple[str, ...]:
    """Those of a backend."""
    return providers.ROW_KERNELS if backend == "triton" else ("two-pass",)


@lru_cache(maxsize=1)
def peaked_problem(h: int, v: int) -> tuple[LossProblem, Tensor]:
    """Rows with ever more probable targets, log π from about −1 to −1e-12, and their float64 log-probs."""
    p = make_problem(256, h, v, torch.bfloat16, DEVICE, logit_std=1.0)
    w = p.weight.detach().float()[p.targets]
    lead = torch.linspace(0.5, 34, len(p.targets), device=DEVICE) + torch.tensor(float(v)).log()
    hidden = lead[:, None] * w / w.square().sum(1, keepdim=True)
    p = replace(p, hidden=hidden.bfloat16().requires_grad_())
    return p, log_probs(logits64(p.hidden.detach(), p.weight.detach()), p.targets)


def peaked(backend: str, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
    """Largest relative error of log-probs between −1 and −1e-12."""

    def measure(train: bool) -> list[Line]:
        p, truth = peaked_problem(*sizes.peaked)
        rows = (truth < -1e-12) & (truth > -1)
        if train:
            answer = train_logprobs(p, backend)
        else:
            answer = kernels.linear_logprob(p.hidden, p.weight, p.targets, backend=backend)[0]
        check = f"relative logp error, {float(truth[rows].min()):.0e} to {float(truth[rows].max()):.0e}"
        return [(check, worst(answer[rows] / truth[rows], torch.ones(())), 1e-5)]

    yield f"{backend}, scoring", partial(measure, False)
    yield f"{backend}, training", partial(measure, True)


@lru_cache(maxsize=1)
def solved(size: tuple[int, int, int]) -> tuple[LossProblem, LossAnswer]:
    """A problem in bf16 and its solution."""
    p = make_problem(*size, torch.bfloat16, DEVICE)
    return p, solve(p)


def gradients(backend: str, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
    """Relative errors of dX and dW, by row kernel and exactness, from bf16 or FP32 operands.

    The bar leaves out the error of rounding the result to bf16.
    """

    def measure(wide: str, bar: float, **mode: Any) -> list[Line]:
        p, truth = solved(sizes.gradients)
        fp32 = {name: getattr(p, name).detach().float().requires_grad_() for name in wide.split()}
        p = replace(p, **fp32)
        answer, lines = providers.ours(p, backend, **mode), list[Line]()
        errors = errors_of(answer, truth)
        for gradient, key in (("dX", "d_hidden"), ("dW", "d_weight")):
            check = f"{gradient} relative error, {_short(p.hidden)} hidden, {_short(p.weight)} weight"
            error = errors[f"{key}_rel"]
            if getattr(answer, key).dtype == torch.float32:
                lines.append((check, error, bar))
                continue
            lines.append((f"{check}, as returned in bf16", error, None))
            if "exact" not in mode:  # its error is smaller than this estimate's own
                unrounded = before_rounding(error, getattr(truth, key))
                lines.append((f"{check}, before that rounding", unrounded, bar))
        return lines

    for kernel in row_kernels(backend):
        yield f"{backend}, {kernel}", partial(measure, "", GRADIENT_BARS[kernel], row_kernel=kernel)
    for wide in ("weight", "weight hidden"):
        yield f"{backend}, exact, FP32 {wide}", partial(measure, wide, GRADIENT_BARS["exact"], exact=True)


def _short(x: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "FP32"}[x.dtype]


def before_rounding(error: float, true: Tensor) -> float:
    """A gradient's error before it was rounded to bf16, an independent error: √(error² − rounding²).

    The rounding error is taken from the float64 gradient, rounded to bf16.
    """
    return max(0.0, error**2 - relative(true.bfloat16(), true) ** 2) ** 0.5


def chunks(backend: str, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
    """The error of dW for more and more chunks, with which it must not grow."""

    def measure(count: int) -> list[Line]:
        p, truth = solved(sizes.chunks)
        errors = errors_of(providers.ours(p, backend, chunk_rows=len(p.targets) // count), truth)
        assert truth.d_weight is not None
        error = before_rounding(errors["d_weight_rel"], truth.d_weight)
        check = f"dW relative error, {count} chunks, before rounding to bf16"
        return [(check, error, GRADIENT_BARS["two-pass"])]

    for count in (1, 16, 256):
        yield f"{backend}, {count} chunks", partial(measure, count)


def split_weight(backend: str, sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
    """max |Δlogp| with FP32 weights beside bf16 hidden: in bf16 parts (Triton), or as they are."""

    def measure(parts: int) -> list[Line]:
        p = make_problem(ROWS, *sizes.parts, torch.float32, DEVICE)
        p = replace(p, hidden=p.hidden.detach().bfloat16().requires_grad_())
        truth = log_probs(logits64(p.hidden.detach(), p.weight.detach()), p.targets)
        error = worst(train_logprobs(p, backend, weight_parts=parts), truth)
        return [("|Δlogp| max, FP32 weights, logit std 3", error, SPLIT_BARS[parts])]

    for parts in SPLIT_BARS if backend == "triton" else (3,):
        yield f"{backend}, FP32 weights in {parts} bf16 parts or whole", partial(measure, parts)


CHECKS: tuple[Check, ...] = (logprobs, peaked, gradients, chunks, split_weight)


def cases(options: Namespace) -> Iterator[Case]:
    """Every mode of every check. Bars hold at full sizes only."""

    def row(measure: Callable[[], list[Line]]) -> Row:
        lines = [(check, value, None if options.quick else bar) for check, value, bar in measure()]
        return {"lines": lines}

    sizes = QUICK if options.quick else Sizes()
    named = {check.__name__: check for check in CHECKS}
    for name in chosen(options.only, named):
        for backend in options.backends.split(","):
            for mode, measure in named[name](backend, sizes):
                yield f"{name}: {mode}", partial(row, measure)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each error."""
    lines = []
    for row in rows:
        mode = row["case"].partition(": ")[2]
        for check, value, bar in row["lines"]:
            verdict = "" if bar is None else "met" if value is not None and value <= bar else "NOT MET"
            lines.append([check, mode, number(value, ".2e"), number(bar, ".1e"), verdict])
    return table(("check", "", "measured", "bar", "note"), lines)
