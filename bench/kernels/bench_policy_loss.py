"""The policy loss and its peers as a pytest-benchmark suite; bench.kernels.compare adds errors and memory.

  pytest bench --benchmark-only                           N=512 H=576 V=49152, FP32 and bf16
  pytest bench --benchmark-only -k "ours and float32"

Each provider is timed by itself here, so a slow moment of the machine affects one alone; compare interleaves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from bench.kernels.problem import LossProblem, make_problem
from bench.kernels.providers import all_providers
from bench.records import reason

FULL, SMALL = (512, 576, 49152), (16, 8, 64)  # N, H, V; the small one where benchmarks are off
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = [provider.name for provider in all_providers(make_problem(1, 1, 1, torch.float32, DEVICE))]


@cache
def problem(shape: tuple[int, int, int], dtype: torch.dtype) -> LossProblem:
    """One problem for all providers."""
    return make_problem(*shape, dtype, DEVICE, chunk_rows=shape[0] // 2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch.")
)
@pytest.mark.parametrize("name", NAMES)
def test_policy_loss(benchmark: Any, name: str, dtype: torch.dtype) -> None:
    """Forward and backward; a provider that is missing or fails is skipped, and says why."""
    p = problem(FULL if benchmark.enabled else SMALL, dtype)
    run = next(provider.run for provider in all_providers(p) if provider.name == name)
    try:
        run(p)
    except Exception as error:
        if name.startswith("ours"):
            raise
        pytest.skip(reason(error))

    def call() -> None:
        run(p)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info |= {"shape": p.shape, "chunk_rows": p.chunk_rows, "device": DEVICE}
    benchmark.pedantic(call, rounds=5, warmup_rounds=1)
