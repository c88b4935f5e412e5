"""The errors of our kernels against float64, check by check, and whether they meet their bars.

  python -m bench.kernels.accuracy                    this machine's backends; about 5 minutes on two cores
  python -m bench.kernels.accuracy --quick            small shapes: seconds, and bars are not checked
  python -m bench.kernels.accuracy --record           over bench/results/accuracy-DEVICE.json
  TRITON_INTERPRET=1 python -m bench.kernels.accuracy --quick --backends triton

Beside ours the table has the error that the GEMM alone allows: FP32 logits straight from the matrix units
(on CUDA mm(out_dtype=float32) of bf16), with everything after them in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernels
from bench import records
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
from bench.measure import machine
from bench.records import Record
from bench.table import number, table

ROWS = 64  # scored rows of the log-prob checks
LOGIT_BARS = {"cpu": {3.0: 5e-6, 10.0: 1.5e-5}}  # max |Δlogp|, by logit std; CUDA: 1.5 × the GEMM's own error
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


QUICK = Sizes((64, 500), (32, 200), (48, 32, 400), (256, 16, 200), (64, 300))


def record(check: str, backend: str, value: float, bar: float | None, **more: Any) -> Record:
    """One measured value; `bar` is None where it has none."""
    return {
        "check": check,
        "backend": backend,
        "value": value,
        "bar": bar,
        "met": bar and value <= bar,
    } | more


def failure(check: str, backend: str, error: Exception) -> Record:
    """The record of a measurement that failed."""
    return {"check": check, "backend": backend, "value": None, "bar": None, "error": records.reason(error)}


def attempt(check: str, backend: str, bar: float | None, measure: Callable[[], float]) -> Record:
    """The record of one measurement, or of why it failed."""
    try:
        return record(check, backend, measure(), bar)
    except Exception as error:
        return failure(check, backend, error)


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


def worst(given: Tensor, truth: Tensor) -> float:
    """max |given − truth|; NaN if anything given is."""
    return float((given.double() - truth).abs().max())


def train_logprobs(p: LossProblem, backend: str, **mode: Any) -> Tensor:
    """Log-probs that `policy_loss` returns with its gradients, so from the row kernel asked for."""
    return kernels.policy_loss(
        p.hidden, p.weight, p.targets, logprobs_gen=p.logprobs_gen, advantages=p.advantages,
        token_weights=p.token_weights, backend=backend, **mode,
    ).logprobs  # fmt: skip


def train_error(p: LossProblem, truth: Tensor, backend: str, **mode: Any) -> float:
    """max |Δlogp| of training in one mode."""
    return worst(train_logprobs(p, backend, **mode), truth)


def logprob_checks(backends: Sequence[str], device: str, sizes: Sizes) -> Iterator[Record]:
    """max |Δlogp| of scoring and of training at a large head, by logit std."""
    h, v = sizes.logits
    for std in (3.0, 10.0):
        p = make_problem(ROWS, h, v, torch.bfloat16, device, std)
        z = logits64(p.hidden.detach(), p.weight.detach())
        truth = log_probs(z, p.targets)
        gemm = mm_error(p, z)
        del z
        name = f"|Δlogp| max, H={h} V={v}, logit std {std:g}"
        product = "mm(out_dtype=float32)" if device == "cuda" else "FP32 mm"
        yield record(name, f"{product} + float64", gemm["logp_max_abs"], None, logits=gemm["logits_max_abs"])
        for backend in backends:
            bar = LOGIT_BARS["cpu"][std] if device == "cpu" else 1.5 * gemm["logp_max_abs"]
            scored, _, *_ = kernels.linear_logprob(p.hidden, p.weight, p.targets, backend=backend)
            yield record(name, f"{backend}, scoring", worst(scored, truth), bar)
            for kernel in providers.ROW_KERNELS if backend == "triton" else ("two-pass",):
                measure = partial(train_error, p, truth, backend, row_kernel=kernel)
                yield attempt(name, f"{backend}, training, {kernel}", bar, measure)


def peaked_problem(h: int, v: int, device: str) -> LossProblem:
    """Rows with ever more probable targets: log π from about −1 to −1e-12."""
    p = make_problem(256, h, v, torch.bfloat16, device, logit_std=1.0)
    w = p.weight.detach().float()[p.targets]
    lead = torch.linspace(0.5, 34, len(p.targets), device=device) + torch.tensor(float(v)).log()
    hidden = lead[:, None] * w / w.square().sum(1, keepdim=True)
    return replace(p, hidden=hidden.bfloat16().requires_grad_())


def peaked_checks(backends: Sequence[str], device: str, sizes: Sizes) -> Iterator[Record]:
    """Largest relative error of log-probs between −1 and −1e-12."""
    p = peaked_problem(*sizes.peaked, device)
    truth = log_probs(logits64(p.hidden.detach(), p.weight.detach()), p.targets)
    rows = (truth < -1e-12) & (truth > -1)
    name = f"relative logp error, {float(truth[rows].min()):.0e} to {float(truth[rows].max()):.0e}"
    for backend in backends:
        for mode, given in (
            ("scoring", kernels.linear_logprob(p.hidden, p.weight, p.targets, backend=backend)[0]),
            ("training", train_logprobs(p, backend)),
        ):
            yield record(name, f"{backend}, {mode}", worst(given[rows] / truth[rows], torch.ones(())), 1e-5)


def gradient_checks(backends: Sequence[str], device: str, sizes: Sizes) -> Iterator[Record]:
    """Relative errors of dX and dW, by row kernel and exactness."""
    p = make_problem(*sizes.gradients, torch.bfloat16, device)
    truth = solve(p)
    for backend in backends:
        for kernel in providers.ROW_KERNELS if backend == "triton" else ("two-pass",):
            yield from _gradients(p, truth, backend, GRADIENT_BARS[kernel], row_kernel=kernel)
        wide = replace(p, weight=p.weight.detach().float().requires_grad_())
        yield from _gradients(wide, truth, backend, GRADIENT_BARS["exact"], exact=True)
        wide = replace(wide, hidden=p.hidden.detach().float().requires_grad_())
        yield from _gradients(wide, truth, backend, GRADIENT_BARS["exact"], exact=True)


def _gradients(p: LossProblem, truth: LossAnswer, backend: str, bar: float, **mode: Any) -> Iterator[Record]:
    """Both gradients' errors. The bar leaves out the error of rounding the result to bf16."""
    name = f"{backend}, " + ("exact" if "exact" in mode else mode["row_kernel"])
    try:
        answer = providers.ours(p, backend, **mode)
        errors = errors_of(answer, truth)
    except Exception as error:
        yield failure("dX and dW relative errors", name, error)
        return
    for gradient, key, given, true in (
        ("dX", "d_hidden_rel", answer.d_hidden, truth.d_hidden),
        ("dW", "d_weight_rel", answer.d_weight, truth.d_weight),
    ):
        assert given is not None and true is not None
        check = f"{gradient} relative error, {_short(p.hidden)} hidden, {_short(p.weight)} weight"
        if given.dtype == torch.float32:
            yield record(check, name, errors[key], bar)
            continue
        yield record(f"{check}, as returned in bf16", name, errors[key], None)
        if "exact" not in mode:  # its error is smaller than this estimate's own
            yield record(f"{check}, before that rounding", name, before_rounding(errors[key], true), bar)


def _short(x: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "FP32"}[x.dtype]


def before_rounding(error: float, true: Tensor) -> float:
    """A gradient's error before it was rounded to bf16, an independent error: √(error² − rounding²).

    The rounding error is taken from the float64 gradient, rounded to bf16.
    """
    return max(0.0, error**2 - relative(true.bfloat16(), true) ** 2) ** 0.5


def chunk_checks(backends: Sequence[str], device: str, sizes: Sizes) -> Iterator[Record]:
    """The error of dW for more and more chunks, with which it must not grow."""
    p = make_problem(*sizes.chunks, torch.bfloat16, device)
    truth = solve(p)
    for backend in backends:
        for count in (1, 16, 256):
            errors = errors_of(providers.ours(p, backend, chunk_rows=len(p.targets) // count), truth)
            assert truth.d_weight is not None
            error = before_rounding(errors["d_weight_rel"], truth.d_weight)
            name = f"dW relative error, {count} chunks, before rounding to bf16"
            yield record(name, backend, error, GRADIENT_BARS["two-pass"])


def split_weight_checks(backends: Sequence[str], device: str, sizes: Sizes) -> Iterator[Record]:
    """max |Δlogp| with FP32 weights beside bf16 hidden: in bf16 parts (Triton), or as they are."""
    p = make_problem(ROWS, *sizes.parts, torch.float32, device)
    p = replace(p, hidden=p.hidden.detach().bfloat16().requires_grad_())
    truth = log_probs(logits64(p.hidden.detach(), p.weight.detach()), p.targets)
    for backend in backends:
        for parts, bar in SPLIT_BARS.items() if backend == "triton" else ((3, SPLIT_BARS[3]),):
            name = f"{backend}, {parts} bf16 parts" if backend == "triton" else f"{backend}, whole"
            given = train_logprobs(p, backend, weight_parts=parts)
            yield record("|Δlogp| max, FP32 weights, logit std 3", name, worst(given, truth), bar)


CHECKS: dict[str, Callable[[Sequence[str], str, Sizes], Iterator[Record]]] = {
    "logprobs": logprob_checks,
    "peaked": peaked_checks,
    "gradients": gradient_checks,
    "chunks": chunk_checks,
    "parts": split_weight_checks,
}


def run(names: Sequence[str], backends: Sequence[str], device: str, sizes: Sizes) -> Iterator[Record]:
    """All records; a backend that fails a check gets a record that says why. Bars hold at full sizes only."""
    for name in names:
        for backend in backends:
            try:
                for result in CHECKS[name]([backend], device, sizes):
                    yield result if sizes == Sizes() else result | {"bar": None, "met": None}
            except Exception as error:
                yield failure(name, backend, error)


def describe(record: Record) -> str:
    """The table of a record."""
    rows = []
    for r in record["records"]:
        verdict = {True: "met", False: "NOT MET"}.get(r.get("met"), "")
        error = f"error: {r['error']}" if r.get("error") else verdict
        rows.append([r["check"], r["backend"], number(r["value"], ".2e"), number(r["bar"], ".1e"), error])
    unique = list(dict.fromkeys(map(tuple, rows)))  # the GEMM's own error is repeated for each backend
    return table(("check", "", "measured", "bar", "note"), unique)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print the table, write the record where asked."""
    p = records.parser("kernels.accuracy", __doc__, "accuracy-DEVICE.json")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=("cpu", "cuda"), default=default)
    p.add_argument("--backends", help="comma-separated (those of the device)")
    p.add_argument("--checks", default=",".join(CHECKS), help="comma-separated: " + ", ".join(CHECKS))
    p.add_argument("--quick", action="store_true", help="small shapes")
    args = p.parse_args(argv)
    names = args.checks.split(",")
    if unknown := set(names) - set(CHECKS):
        raise SystemExit(f"--checks {', '.join(sorted(unknown))}: expected some of {', '.join(CHECKS)}")
    backends = args.backends.split(",") if args.backends else providers.our_backends(args.device)
    result: Record = {
        "command": records.command("kernels.accuracy", argv), "machine": machine(args.device),
        "versions": providers.peer_versions(), "commit": records.commit(), "records": [],
    }  # fmt: skip
    tracked = f"accuracy-{args.device}.json"
    for entry in run(names, backends, args.device, QUICK if args.quick else Sizes()):
        result["records"].append(entry)
        value = entry.get("error") or number(entry["value"], ".2e")
        records.say(f"{entry['check']} · {entry['backend']}: {value}")
        records.write(records.path_of(args, tracked), result)
    return records.finish(args, tracked, result, describe(result))


if __name__ == "__main__":
    sys.exit(main())
