"""A pytest-benchmark suite of the work around the loss: generation, packing, verdicts, the fit of a curve.

pytest bench/bench_trainer.py --benchmark-only
"""

import asyncio
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import engine
from bench.learner.step import PACKS, TINY, make_batch, save_model
from bench.validation.scenarios import PAPER_RUNS, SCENARIOS, simulate
from bench.verifiers import ANSWERS, ROUND, ordinary
from trainer.config import VerifierConfig
from trainer.learner.packing import pack
from trainer.models.resolve import resolve_model
from trainer.scaling import fit
from trainer.verifiers.pool import VerifierPool


@pytest.mark.parametrize("name", ["ours", "generate"])
def test_generation(benchmark: Any, name: str, tmp_path: Path) -> None:
    """The embedded engine and `generate` of SmolLM2-135M; where benchmarks are off, of a tiny model."""
    folder = str(tmp_path)
    if benchmark.enabled:
        folder = resolve_model("smollm2-135m")
    else:
        save_model(TINY, folder)
    options = Namespace(dtype="float32", sequences=32, tokens=64 if benchmark.enabled else 4)
    work = getattr(engine, name)(options, folder)
    assert benchmark.pedantic(work, rounds=3, warmup_rounds=1) == 32 * options.tokens


def test_pack(benchmark: Any) -> None:
    """48 prompts of 16 completions with a median of 1,400 tokens, into packs of 16K tokens."""
    batch = make_batch(replace(PACKS, prompts=48, group=16))
    assert len(benchmark(pack, batch, PACKS.micro_batch_tokens)) > 48


@pytest.mark.parametrize("kind", [*ANSWERS, "reasoning_gym"])
def test_ordinary_answers(benchmark: Any, kind: str) -> None:
    """300 answers that are asked for at once, judged by two workers."""
    asked = (ordinary(kind) * ROUND)[: ROUND if benchmark.enabled else 8]
    pool = VerifierPool(VerifierConfig(kind=kind, workers=2, timeout_s=60.0))

    async def judge() -> int:
        return len(await asyncio.gather(*(pool.score(*case) for case in asked)))

    with asyncio.Runner() as loop:
        judged = benchmark.pedantic(lambda: loop.run(judge()), rounds=7 if benchmark.enabled else 1)
        assert judged == len(asked)
    pool.close()


def test_fit(benchmark: Any) -> None:
    """27 evaluations of the paper's ScaleRL, with all intervals."""
    _, run = simulate(SCENARIOS[0], PAPER_RUNS["ScaleRL"], 0, seed=0)
    assert len(run.points) == 27
    assert 0.5 < benchmark(fit, run).A.value < 0.7
