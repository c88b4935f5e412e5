"""Models beyond the tiny Llama, on both engines: a mixture of experts, and a real one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from engine_process import (
    VOCAB,
    EngineProcess,
    abort,
    generate,
    load,
    perturb,
    prompt_of,
    request,
    settings,
    stale_kv,
    teacher_forced,
)

from trainer.models import resolve_model


def swap_mid_sequence(
    model: str, kind: str, tmp_path: Path, vocab: int, scale: float, dtype: str = "float32"
) -> tuple[float, float]:
    """Generate, swap while a sequence runs, generate anew; returns the largest gap in nats to independent
    forwards, and the seconds of the swap."""
    process = EngineProcess(settings(model, tmp_path, kind, dtype), where=2)
    old, new = load(model), load(model)
    path = perturb(new, tmp_path / "new.safetensors", scale=scale)
    prompt = prompt_of(70, vocab)

    async def work() -> tuple[dict, dict, float]:
        async with process.client() as client:
            running = asyncio.create_task(generate(client, request("long", prompt, n=2, max_tokens=1900)))
            await asyncio.sleep(0)
            await generate(client, request("short", prompt[:5], max_tokens=6))
            began = time.monotonic()
            await process.push(client, path)
            seconds = time.monotonic() - began
            fresh = await generate(client, request("fresh", prompt, n=4, max_tokens=20, seed=9))
            abort(process.conn, "long")
            return await running, fresh, seconds

    try:
        process.ready()
        running, fresh, seconds = asyncio.run(asyncio.wait_for(work(), 250))
    finally:
        process.close()
    gaps = []
    for c in fresh.values():
        gaps.append(np.abs(c.logprobs - teacher_forced(new, prompt, c.token_ids.tolist())).max())
    for c in running.values():
        tokens, swap = c.token_ids.tolist(), int(np.argmax(c.versions == 1))
        assert c.versions.tolist() == [0] * swap + [1] * (len(tokens) - swap) and swap
        gaps.append(np.abs(c.logprobs[:swap] - teacher_forced(old, prompt, tokens[:swap])).max())
        gaps.append(np.abs(c.logprobs[swap:] - stale_kv(old, new, prompt, tokens, swap)).max())
    return max(gaps), seconds


def test_a_mixture_of_experts_generates_and_takes_new_weights(
    kind: str, tiny_moe: str, tmp_path: Path
) -> None:
    gap, _ = swap_mid_sequence(tiny_moe, kind, tmp_path, VOCAB, scale=0.1)
    assert gap <= 2e-5


@pytest.mark.slow
def test_smollm2_agrees_with_transformers_and_takes_new_weights_mid_sequence(
    kind: str, tmp_path: Path
) -> None:
    gap, seconds = swap_mid_sequence(resolve_model("smollm2-135m"), kind, tmp_path, vocab=40_000, scale=0.01)
    print(f"{kind}, SmolLM2-135M, float32: at most {gap:.1e} nats; weights pushed in {seconds:.2f} s")
    assert gap <= 2e-5
