"""Packing a batch into micro-batches as a pytest-benchmark suite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.learner.step import PACKS, make_batch
from trainer.learner.packing import pack


def test_pack(benchmark: Any) -> None:
    """48 prompts of 16 completions with a median of 1,400 tokens, into packs of 16K tokens."""
    batch = make_batch(replace(PACKS, prompts=48, group=16))
    assert len(benchmark(pack, batch, PACKS.micro_batch_tokens)) > 48
