"""The loss beside its peers, and its parts, as pytest-benchmark suites: for old beside new after a change.

  pytest bench --benchmark-only                           N=512 H=576 V=49152, on CUDA 16384, 4096 and 151936
  pytest bench --benchmark-only -k "ours and float32" --benchmark-autosave
  pytest bench --benchmark-only --benchmark-compare       the figures kept before in the same table

Each line is timed by itself, so a slow moment of the machine affects one alone. `python -m bench
kernels.compare` takes turns, and adds errors and memory.
"""

from functools import cache
from typing import Any

import pytest
import torch

from bench.harness import reason
from bench.kernels import parts
from bench.kernels.problem import LossProblem, make_problem
from bench.kernels.providers import all_providers
from bench.measure import DEVICE, synchronize

SMALL = (16, 32, 64)  # N, H, V where benchmarks are off
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cache
def problem(dtype: str, full: bool) -> LossProblem:
    """One problem for all lines of a type; the one before is let go."""
    problem.cache_clear()
    n, h, v = (parts.N, parts.H, parts.V) if full else SMALL
    return make_problem(n, h, v, DTYPES[dtype], DEVICE, chunk_rows=n // 2)


PROVIDERS = [provider.name for provider in all_providers(problem("float32", False))]
PARTS = [
    (part, line.name)
    for part in parts.PARTS
    if part is not parts.epilogue
    for line in part(problem("bfloat16", False), 8)
]


def time(benchmark: Any, call: Any, before: Any = None) -> None:
    """Time a call to its end on the device, after `before`, which is not timed."""

    def whole() -> None:
        call()
        synchronize(DEVICE)

    def setup() -> None:
        if before:
            before()

    benchmark.pedantic(whole, setup=setup, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROVIDERS)
def test_policy_loss(benchmark: Any, name: str, dtype: str) -> None:
    """Forward and backward; a peer that is missing or fails is skipped, and says why."""
    p = problem(dtype, benchmark.enabled)
    provider = next(x for x in all_providers(p) if x.name == name)
    try:
        provider.run(p)
    except Exception as error:
        if name.startswith("ours"):
            raise
        pytest.skip(reason(error))
    time(benchmark, lambda: provider.run(p))


@pytest.mark.parametrize(("part", "name"), PARTS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_part(benchmark: Any, part: Any, name: str) -> None:
    """A line of `python -m bench kernels.parts`, in bf16."""
    p = problem("bfloat16", benchmark.enabled)
    line = next((x for x in part(p, p.chunk_rows) if x.name == name), None)
    if line is None:
        pytest.skip("not a line of this size")
    time(benchmark, line.call, line.before)
