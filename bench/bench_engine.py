"""The embedded engine and transformers' `generate` as a benchmark suite; bench.engine interleaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.engine import NEW, SEQUENCES, providers
from bench.learner.step import save_model
from bench.learner.throughput import TINY
from trainer.models.resolve import resolve_model


@pytest.mark.parametrize("name", ["torch engine", "transformers generate"])
def test_generation(benchmark: Any, name: str, tmp_path: Path) -> None:
    """SmolLM2-135M; where benchmarks are off, a tiny model with random weights."""
    if not benchmark.enabled:
        save_model(TINY, str(tmp_path))
    folder = resolve_model("smollm2-135m") if benchmark.enabled else str(tmp_path)
    generate = providers(folder, threads=2)[name]
    assert benchmark.pedantic(generate, rounds=3, warmup_rounds=1) == SEQUENCES * NEW
