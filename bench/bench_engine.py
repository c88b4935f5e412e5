"""The embedded engine and transformers' `generate` as a benchmark suite; bench.engine interleaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import NEW, SEQUENCES, providers, random_prompts, requests
from bench.learner.step import TINY, save_model
from trainer.engines.torch.engine import TorchEngine
from trainer.launcher.placement import cpu_has_bfloat16
from trainer.models.resolve import resolve_model

SHORT = 8  # new tokens of each sequence in the comparison of dtypes


@pytest.mark.parametrize("name", ["torch engine", "transformers generate"])
def test_generation(benchmark: Any, name: str, tmp_path: Path) -> None:
    """SmolLM2-135M; where benchmarks are off, a tiny model with random weights."""
    if not benchmark.enabled:
        save_model(TINY, str(tmp_path))
    folder = resolve_model("smollm2-135m") if benchmark.enabled else str(tmp_path)
    generate = providers(folder, threads=2)[name]
    assert benchmark.pedantic(generate, rounds=3, warmup_rounds=1) == SEQUENCES * NEW


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_on_a_cpu(benchmark: Any, dtype: str, tmp_path: Path) -> None:
    """SmolLM2-135M's shape with random weights; the record has the best `tokens_per_s`."""
    if benchmark.enabled and dtype == "bfloat16" and not cpu_has_bfloat16():
        pytest.skip("this CPU has no instructions for bfloat16: a round would take minutes")
    torch.set_num_threads(2)
    save_model(replace(TINY, model="smollm2-135m") if benchmark.enabled else TINY, str(tmp_path))
    engine = TorchEngine(str(tmp_path), getattr(torch, dtype), True, SEQUENCES)
    prompts = random_prompts() % engine.model.config.vocab_size

    def generate() -> int:
        before = engine.generated
        for request in requests(prompts):
            engine.submit(replace(request, max_tokens=SHORT))
        while not engine.idle:
            engine.step()
        return engine.generated - before

    assert benchmark.pedantic(generate, rounds=3, warmup_rounds=1) == SEQUENCES * SHORT
    if benchmark.enabled:
        benchmark.extra_info["tokens_per_s"] = SEQUENCES * SHORT / benchmark.stats.stats.min
