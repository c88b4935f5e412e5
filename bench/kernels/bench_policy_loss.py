"""The policy loss and its peers as a pytest-benchmark suite; bench.kernels.compare adds errors and memory.

pytest bench/ --benchmark-only                       N=512 H=576 V=49152, FP32 and bf16
pytest bench/ --benchmark-only -k "ours and float32"

Each provider is timed by itself here: a slow moment of the machine hits one alone; compare.py interleaves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from bench.kernels.cases import all_cases
from bench.kernels.problem import Problem, make_problem
from bench.measure import reason

ROWS, HIDDEN, VOCAB, CHUNK = 512, 576, 49152, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = [case.name for case in all_cases(make_problem(1, 1, 1, torch.float32, DEVICE))]


@cache
def problem(dtype: torch.dtype) -> Problem:
    """One problem for all providers."""
    return make_problem(ROWS, HIDDEN, VOCAB, dtype, DEVICE, chunk_rows=CHUNK)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch.")
)
@pytest.mark.parametrize("name", NAMES)
def test_policy_loss(benchmark: Any, name: str, dtype: torch.dtype) -> None:
    """Forward and backward; a provider that is missing or fails is skipped, and says why."""
    p = problem(dtype)
    run = next(case.run for case in all_cases(p) if case.name == name)
    try:
        run(p)
    except Exception as error:
        pytest.skip(reason(error))

    def call() -> None:
        run(p)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info |= {"shape": p.shape, "chunk_rows": CHUNK, "device": DEVICE}
    benchmark.pedantic(call, rounds=5, warmup_rounds=1)
