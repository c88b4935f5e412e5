"""The embedded engine and transformers' `generate` as a pytest-benchmark suite; bench.engine interleaves them."""

from __future__ import annotations

from typing import Any

import pytest

from bench.engine import providers


@pytest.mark.parametrize("name", ["torch engine", "transformers generate"])
def test_generation(benchmark: Any, name: str) -> None:
    """32 sequences of 64 new tokens by SmolLM2-135M; where benchmarks are off, the tiny model."""
    model = "smollm2-135m" if benchmark.enabled else "tiny"
    generate = providers(model, threads=2)[name]
    assert benchmark.pedantic(generate, rounds=3, warmup_rounds=1) == 32 * 64
