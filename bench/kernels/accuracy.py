"""The errors of our kernels against float64, check by check, and whether they meet their bars. [5 min]

  python -m bench kernels.accuracy                    this machine's backends; about 5 minutes on two cores
  python -m bench kernels.accuracy --quick            small shapes: seconds, and bars are not checked
  python -m bench kernels.accuracy --record           over bench/results/accuracy-cpu.jsonl
  TRITON_INTERPRET=1 python -m bench kernels.accuracy --quick --backends triton

Beside ours the table has the error that the GEMM alone allows: FP32 logits straight from the matrix units
(on CUDA mm(out_dtype=float32) of bf16), with everything after them in float64.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernels
from bench.harness import Case, Row, chosen
from bench.kernels import providers
from bench.kernels.problem import LossProblem, blocks, errors_of, log_probs, make_problem, relative, solve
from bench.measure import DEVICE
from bench.table import number, table

OPTIONS: dict[str, Any] = {
    "backends": (",".join(providers.our_backends()), "comma-separated"),
    "only": ("", "comma-separated: checks whose name contains one of these"),
    "quick": (False, "small shapes"),
}
RECORD = f"accuracy-{DEVICE}.jsonl"
ROWS = 64  # scored rows of the log-prob checks
LOGIT_BARS = {3.0: 5e-6, 10.0: 1.5e-5}  # max Δ logp, by logit std; CUDA: 1.5 × the GEMM's own error
GRADIENT_BARS = {"two-pass": 1.9e-3, "single-pass": 2.5e-3, "fused-epilogue": 2.5e-3, "exact": 1e-5}
SPLIT_BARS = {3: 4e-6, 2: 3e-5}  # max Δ logp with FP32 weights split in bf16 parts, logit std 3


Line = tuple[str, str, float, float | None]  # what is measured, how it was computed, the error and its bar


@torch.no_grad()
def logits64(hidden: Tensor, weight: Tensor) -> Tensor:
    """(R, V) float64 logits, a block of the vocabulary at a time."""
    x = hidden.double()
    out = torch.empty(len(hidden), len(weight), dtype=torch.float64, device=x.device)
    for columns in blocks(len(weight), 8 * weight.shape[1]):
        torch.mm(x, weight[columns].double().t(), out=out[:, columns])
    return out


@torch.no_grad()
def gemm_logprobs(p: LossProblem) -> Tensor:
    """(N,) log-probs in float64 from the FP32 logits of one GEMM.

    On the CPU, where mm(out_dtype=) does not exist, the GEMM is torch's FP32 one on upcast operands.
    """
    z = torch.empty(len(p.hidden), len(p.weight), device=p.hidden.device)
    providers.wide_mm(p.hidden.detach(), p.weight.detach().t(), z)
    return log_probs(z.double(), p.targets)


def worst(answer: Tensor, truth: Tensor) -> float:
    """max |answer − truth|; NaN if any of `answer` is."""
    return float((answer.detach().double() - truth).abs().max())


def scored_logprobs(p: LossProblem, backend: str) -> Tensor:
    """Log-probs without gradients."""
    return kernels.linear_logprob(p.hidden, p.weight, p.targets, backend=backend).logprobs


def train_logprobs(p: LossProblem, backend: str, **mode: Any) -> Tensor:
    """Log-probs that `policy_loss` returns with its gradients, so from the row kernel asked for."""
    return providers.policy_loss(p, backend, **mode).logprobs


def row_kernels(backend: str) -> tuple[str, ...]:
    """Those of a backend."""
    return providers.ROW_KERNELS if backend == "triton" else ("two-pass",)


def logprobs(backend: str, h: int, v: int) -> Iterator[Line]:
    """max Δ logp of scoring and of training at a large head, by logit std."""
    product = "mm(out_dtype=float32)" if DEVICE == "cuda" else "FP32 mm"
    for std, bar in LOGIT_BARS.items():
        check = f"Δ logp max, H={h} V={v}, logit std {std:g}"
        p = make_problem(ROWS, h, v, torch.bfloat16, DEVICE, std)
        truth = log_probs(logits64(p.hidden.detach(), p.weight.detach()), p.targets)
        gemm = worst(gemm_logprobs(p), truth)
        bar = bar if DEVICE == "cpu" else 1.5 * gemm
        yield check, f"{product} + float64", gemm, None
        yield check, f"{backend}, scoring", worst(scored_logprobs(p, backend), truth), bar
        for kernel in row_kernels(backend):
            error = worst(train_logprobs(p, backend, row_kernel=kernel), truth)
            yield check, f"{backend}, training, {kernel}", error, bar


def peaked(backend: str, h: int, v: int) -> Iterator[Line]:
    """Largest relative error of log-probs between −1 and −1e-12, of rows with ever more probable targets."""
    p = make_problem(256, h, v, torch.bfloat16, DEVICE, logit_std=1.0)
    w = p.weight.detach().float()[p.targets]
    lead = torch.linspace(0.5, 34, len(p.targets), device=DEVICE) + torch.tensor(float(len(p.weight))).log()
    hidden = lead[:, None] * w / w.square().sum(1, keepdim=True)
    p = replace(p, hidden=hidden.bfloat16().requires_grad_())
    truth = log_probs(logits64(p.hidden.detach(), p.weight.detach()), p.targets)
    rows = (truth < -1e-12) & (truth > -1)
    check = f"relative logp error, {float(truth[rows].min()):.0e} to {float(truth[rows].max()):.0e}"
    for name, compute in (("scoring", scored_logprobs), ("training", train_logprobs)):
        error = worst(compute(p, backend)[rows] / truth[rows], torch.ones(()))
        yield check, f"{backend}, {name}", error, 1e-5


def gradients(backend: str, n: int, h: int, v: int) -> Iterator[Line]:
    """Relative errors of dX and dW, by row kernel and exactness, from bf16 or FP32 operands.

    The bar leaves out the error of rounding the result to bf16.
    """
    problem = make_problem(n, h, v, torch.bfloat16, DEVICE)
    truth = solve(problem)
    modes: list[tuple[str, float, list[str], dict[str, Any]]] = [
        (kernel, GRADIENT_BARS[kernel], [], {"row_kernel": kernel}) for kernel in row_kernels(backend)
    ]
    for wide in (["weight"], ["weight", "hidden"]):
        modes.append((f"exact, FP32 {' '.join(wide)}", GRADIENT_BARS["exact"], wide, {"exact": True}))
    for name, bar, wide, mode in modes:
        p = replace(problem, **{key: getattr(problem, key).detach().float().requires_grad_() for key in wide})
        answer, name = providers.ours(p, backend, **mode), f"{backend}, {name}"
        errors = errors_of(answer, truth)
        for gradient, key in (("dX", "d_hidden"), ("dW", "d_weight")):
            check, error = f"{gradient} relative error", errors[f"{key}_rel"]
            if getattr(answer, key).dtype == torch.float32:
                yield check, name, error, bar
                continue
            yield f"{check}, as returned in bf16", name, error, None
            if "exact" not in mode:  # its error is smaller than this estimate's own
                unrounded = before_rounding(error, getattr(truth, key))
                yield f"{check}, before that rounding", name, unrounded, bar


def before_rounding(error: float, true: Tensor) -> float:
    """A gradient's error before it was rounded to bf16, an independent error: √(error² − rounding²).

    The rounding error is taken from the float64 gradient, rounded to bf16.
    """
    return max(0.0, error**2 - relative(true.bfloat16(), true) ** 2) ** 0.5


def chunks(backend: str, n: int, h: int, v: int) -> Iterator[Line]:
    """The error of dW for more and more chunks, with which it must not grow."""
    p = make_problem(n, h, v, torch.bfloat16, DEVICE)
    truth = solve(p)
    assert truth.d_weight is not None
    for count in (1, 16, 256):
        errors = errors_of(providers.ours(p, backend, chunk_rows=len(p.targets) // count), truth)
        error = before_rounding(errors["d_weight_rel"], truth.d_weight)
        check = "dW relative error, before rounding to bf16"
        yield check, f"{backend}, {count} chunks", error, GRADIENT_BARS["two-pass"]


def split_weight(backend: str, h: int, v: int) -> Iterator[Line]:
    """max Δ logp with FP32 weights beside bf16 hidden: in bf16 parts (Triton), or as they are."""
    p = make_problem(ROWS, h, v, torch.float32, DEVICE)
    p = replace(p, hidden=p.hidden.detach().bfloat16().requires_grad_())
    truth = log_probs(logits64(p.hidden.detach(), p.weight.detach()), p.targets)
    for parts in SPLIT_BARS if backend == "triton" else (3,):
        error = worst(train_logprobs(p, backend, weight_parts=parts), truth)
        mode = f"{backend}, FP32 weights in {parts} bf16 parts or whole"
        yield "Δ logp max, FP32 weights, logit std 3", mode, error, SPLIT_BARS[parts]


Check = Callable[..., Iterator[Line]]
Sizes = tuple[int, ...]  # N, H, V or H, V
CHECKS: dict[Check, tuple[Sizes, Sizes]] = {  # with the sizes of --quick
    logprobs: ((4096, 151936), (64, 500)),
    peaked: ((1024, 8192), (32, 200)),
    gradients: ((256, 512, 32768), (48, 32, 400)),
    chunks: ((1024, 128, 8192), (256, 16, 200)),
    split_weight: ((4096, 32768), (64, 300)),
}


def measure(check: Check, backend: str, quick: bool) -> Row:
    """The errors of one check. Bars hold at full sizes only."""
    lines = check(backend, *CHECKS[check][quick])
    return {"lines": [(what, mode, error, None if quick else bar) for what, mode, error, bar in lines]}


def cases(options: Namespace) -> Iterator[Case]:
    """Every check of every backend."""
    named = {check.__name__: check for check in CHECKS}
    for name in chosen(options.only, named):
        for backend in options.backends.split(","):
            yield f"{name}: {backend}", partial(measure, named[name], backend, options.quick)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each error."""
    lines = []
    for check, mode, error, bar in (line for row in rows for line in row["lines"]):
        verdict = "" if bar is None else "met" if error is not None and error <= bar else "NOT MET"
        lines.append([check, mode, number(error, ".2e"), number(bar, ".1e"), verdict])
    return table(("check", "", "measured", "bar", "note"), lines)
