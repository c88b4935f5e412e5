"""Every op of the loss that can be imported, and what it consists of, as a pytest-benchmark suite.

  pytest bench/kernels/bench_ops.py --benchmark-only                         CPU, and CUDA where there is one
  pytest bench/kernels/bench_ops.py --benchmark-only -k "train and smollm2"
  pytest bench/kernels/bench_ops.py --benchmark-only --benchmark-autosave    keep the figures, for this:
  pytest bench/kernels/bench_ops.py --benchmark-only --benchmark-compare     old and new in a table

train and score are whole calls; logits, row_stats, row_grads, single_pass, fused_epilogue, d_hidden and
d_weight are the kernels of one chunk; objectives turn log-probs into loss terms. Shapes are heads of real
models. Each record has its shape, and for GEMMs the FLOP of a call; bench_policy_loss.py has the peers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import kernels
from bench.kernels.problem import LossProblem, make_problem
from bench.kernels.providers import ours, scoring
from kernels.backends import choose
from kernels.rows import Gradient

HEADS = {  # H and V
    "smollm2-135m": (576, 49152),
    "qwen3-0.6b": (1024, 151936),
    "qwen3-4b": (2560, 151936),
    "llama-3.1-8b": (4096, 128256),
}
ROWS = {"cpu": 128, "cuda": 8192}  # one chunk on CUDA
SMALL = (16, 8, 64)  # N, H, V where benchmarks are off
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CUDA_KERNELS = ("single_pass", "fused_epilogue")
OBJECTIVES = {
    "CISPO": kernels.CISPO(), "REINFORCE": kernels.REINFORCE(), "TIS": kernels.TIS(), "GRPO": kernels.GRPO(),
    "DAPO": kernels.DAPO(), "DualClip": kernels.DualClip(), "SAPO": kernels.SAPO(), "GSPO": kernels.GSPO(),
    "IcePop": kernels.IcePop(),
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "default": {}, "entropy and KL": {"entropy_bonus": 0.01, "kl": kernels.KL(0.01)},
    "exact": {"exact": True}, "GSPO": {"objective": kernels.GSPO()},
}  # fmt: skip


@cache
def problem(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> LossProblem:
    """One problem for all ops of a shape; the one before is let go."""
    problem.cache_clear()
    return make_problem(*shape, dtype, device, chunk_rows=shape[0])


def the_problem(benchmark: Any, model: str, dtype: str, device: str) -> LossProblem:
    """The model's head, small where benchmarks are off; its shape goes into the record."""
    shape = (ROWS[device], *HEADS[model]) if benchmark.enabled else SMALL
    benchmark.extra_info |= {"shape": shape, "dtype": dtype, "device": device}
    return problem(shape, DTYPES[dtype], device)


def measure(
    benchmark: Any, device: str, call: Callable[..., object], new: Callable[[], object] | None = None
) -> None:
    """Time a call, to its end on the device; `new` makes the argument that it overwrites, untimed."""

    def whole(*given: object) -> None:
        call(*given)
        if device == "cuda":
            torch.cuda.synchronize()

    def setup() -> tuple[tuple[object, ...], dict[str, object]]:
        made = (new(),) if new else ()
        if device == "cuda":
            torch.cuda.synchronize()
        return made, {}

    benchmark.pedantic(whole, setup=setup, rounds=20 if device == "cuda" else 5, warmup_rounds=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", HEADS)
def test_train(benchmark: Any, model: str, mode: str, dtype: str, device: str) -> None:
    """`policy_loss`, forward and backward."""
    p, options = the_problem(benchmark, model, dtype, device), dict(MODES[mode])
    if "kl" in options:
        options["logprobs_ref"] = p.logprobs_gen
    if mode == "GSPO":
        options["sequences"] = torch.arange(len(p.targets), device=device) // 16
    n, h, v = p.shape
    benchmark.extra_info["flop"] = (8 if mode == "GSPO" else 6) * n * h * v  # GSPO scores all tokens first
    measure(benchmark, device, lambda: ours(p, None, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", HEADS)
def test_score(benchmark: Any, model: str, dtype: str, device: str) -> None:
    """`linear_logprob` without gradients."""
    p = the_problem(benchmark, model, dtype, device)
    n, h, v = p.shape
    benchmark.extra_info["flop"] = 2 * n * h * v
    measure(benchmark, device, lambda: scoring(p, backend=None))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernel", ["logits", "row_stats", "row_grads", "single_pass", "fused_epilogue", "d_hidden", "d_weight"]
)
@pytest.mark.parametrize("model", HEADS)
def test_kernel(benchmark: Any, model: str, kernel: str, dtype: str, device: str) -> None:
    """One kernel of the device's backend, on one chunk."""
    if kernel in CUDA_KERNELS and device == "cpu":
        pytest.skip("Triton only")
    p = the_problem(benchmark, model, dtype, device)
    n, h, v = p.shape
    hidden, weight = p.hidden.detach(), p.weight.detach()
    backend: Any = choose(hidden, weight, None)[1]
    prepared = backend.prepare(hidden, weight, torch.float32, 3)
    z = torch.empty(n, v, device=device)
    backend.logits(hidden, prepared, z)
    ones = torch.ones(n, device=device)
    gradient = Gradient(z.amax(1), ones, None, None, ones)
    out = {"d_hidden": torch.zeros(n, h, device=device), "d_weight": torch.zeros(v, h, device=device)}
    scaled = (z / n).bfloat16() if device == "cuda" else z / n  # as a gradient
    calls: dict[str, Callable[..., object]] = {
        "logits": lambda: backend.logits(hidden, prepared, z),
        "row_stats": lambda: backend.row_stats(z, p.targets, ones, 0.0),
        "row_grads": lambda fresh: backend.row_grads(fresh, p.targets, ones, 0.0, gradient, False),
        "single_pass": lambda fresh: backend.single_pass(fresh, p.targets, ones, p.logprobs_gen),
        "fused_epilogue": lambda: backend.fused_epilogue(hidden, prepared, p.targets, ones, p.logprobs_gen),
        "d_hidden": lambda: backend.d_hidden(scaled, prepared, out["d_hidden"]),
        "d_weight": lambda: backend.add_d_weight(scaled, hidden, out["d_weight"]),
    }
    if kernel not in ("row_stats", "row_grads", "single_pass"):
        benchmark.extra_info["flop"] = 2 * n * h * v
    overwritten = kernel in ("row_grads", "single_pass")
    measure(benchmark, device, calls[kernel], z.clone if overwritten else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective(benchmark: Any, name: str, device: str) -> None:
    """An objective's terms for 65,536 tokens, GSPO's in sequences of 512."""
    n = 65536 if benchmark.enabled else 64
    g = torch.Generator(device).manual_seed(0)
    logp, logprobs_gen, advantages = (torch.randn(n, generator=g, device=device) for _ in range(3))
    objective: Any = OBJECTIVES[name]
    benchmark.extra_info |= {"tokens": n, "device": device}
    if name == "GSPO":
        owners, weights = torch.arange(n, device=device) // 512, torch.full_like(logp, 1 / n)
        measure(
            benchmark, device,
            lambda: objective.over_sequences(logp, logprobs_gen, advantages, owners, weights),
        )  # fmt: skip
    else:
        measure(benchmark, device, lambda: objective(logp, logprobs_gen, advantages))
