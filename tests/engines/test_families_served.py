"""Models beyond the tiny Llama, on both engines: a mixture of experts, and a real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
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
from numpy.typing import NDArray
from transformers import AutoTokenizer

from trainer.models import resolve_model


def swap_mid_sequence(
    model: str, kind: str, tmp_path: Path, prompt: Sequence[int], scale: float, exact: torch.dtype
) -> tuple[NDArray[np.float64], float]:
    """Generate, swap while a sequence runs, generate anew; returns each token's gap in nats to independent
    forwards in `exact`, and the seconds of the swap."""
    process = EngineProcess(settings(model, tmp_path, kind), where=2)
    old, new = load(model), load(model)
    path = perturb(new, tmp_path / "new.safetensors", scale=scale)
    old, new = old.to(exact), new.to(exact)

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
        gaps.append(np.abs(c.logprobs - teacher_forced(new, prompt, c.token_ids.tolist())))
    for c in running.values():
        tokens, swap = c.token_ids.tolist(), int(np.argmax(c.versions == 1))
        assert c.versions.tolist() == [0] * swap + [1] * (len(tokens) - swap) and swap
        gaps.append(np.abs(c.logprobs[:swap] - teacher_forced(old, prompt, tokens[:swap])))
        gaps.append(np.abs(c.logprobs[swap:] - stale_kv(old, new, prompt, tokens, swap)))
    return np.concatenate(gaps), seconds


def test_a_mixture_of_experts_generates_and_takes_new_weights(
    kind: str, tiny_moe: str, tmp_path: Path
) -> None:
    gap, _ = swap_mid_sequence(tiny_moe, kind, tmp_path, prompt_of(70, VOCAB), 0.1, torch.float32)
    assert gap.max() <= 2e-5


@pytest.mark.slow
def test_smollm2_agrees_with_transformers_and_takes_new_weights_mid_sequence(
    kind: str, tmp_path: Path
) -> None:
    folder = resolve_model("smollm2-135m")
    text = (
        "A fair die is thrown twice. Let us find how likely it is that both throws together make seven, " * 4
    )
    prompt = AutoTokenizer.from_pretrained(folder).encode(text)
    gap, seconds = swap_mid_sequence(folder, kind, tmp_path, prompt, 0.01, torch.float64)
    print(
        f"{kind}, SmolLM2-135M, float32: mean {gap.mean():.1e}, at most {gap.max():.1e} nats on {len(gap)} "
        f"tokens; weights pushed in {seconds:.2f} s"
    )
    # transformers' own float32 forward is up to 2e-5 from its float64 one on such a text
    assert gap.mean() <= 2e-5 and gap.max() <= 1e-4
