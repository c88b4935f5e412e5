"""Other models than the tiny Llama, on both engines: a mixture of experts and SmolLM2."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_process import (
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

from trainer.learner.learner import Learner
from trainer.mismatch import PARITY_NATS
from trainer.models.resolve import resolve_model
from trainer.telemetry import Clock
from trainer.types import Completion, TrainSequence


def swap_mid_sequence(
    model: str, kind: str, tmp_path: Path, prompt: Sequence[int], scale: float, exact: torch.dtype
) -> tuple[NDArray[np.float64], float]:
    """Generate, change the weights while a sequence runs, generate again; returns each token's gap in nats to
    independent forward passes in `exact`, and the seconds that the change took."""
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
        gaps.append(np.abs(c.logprobs_gen - teacher_forced(new, prompt, c.token_ids.tolist())))
    for c in running.values():
        tokens, swap = c.token_ids.tolist(), int(np.argmax(c.versions == 1))
        assert c.versions.tolist() == [0] * swap + [1] * (len(tokens) - swap) and swap
        gaps.append(np.abs(c.logprobs_gen[:swap] - teacher_forced(old, prompt, tokens[:swap])))
        gaps.append(np.abs(c.logprobs_gen[swap:] - stale_kv(old, new, prompt, tokens, swap)))
    return np.concatenate(gaps), seconds


def test_a_mixture_of_experts_takes_new_weights(kind: str, tiny_moe: str, tmp_path: Path) -> None:
    gap, _ = swap_mid_sequence(tiny_moe, kind, tmp_path, prompt_of(70), 0.1, torch.float32)
    assert gap.max() <= 2e-5


@pytest.mark.slow
def test_smollm2_agrees_with_transformers_across_new_weights(kind: str, tmp_path: Path) -> None:
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
    # On such texts transformers' own float32 forward is up to 2.2e-5 from float64 (mean 3e-6), one with both
    # engines' oneDNN products up to 4e-5 (mean 6e-6); under torch's log_softmax vLLM had a mean of 1.5e-5.
    assert gap.mean() <= 1e-5 and gap.max() <= 6e-5


@pytest.mark.slow
def test_smollm2_in_bfloat16_under_an_fp32_head_agrees_with_the_learner(kind: str, tmp_path: Path) -> None:
    folder = resolve_model("smollm2-135m")
    config = settings(folder, tmp_path, kind, "bfloat16", max_new_tokens=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = "Question: What is 7 + 5?\nAnswer:", "The capital of France is"
    prompts = {text: tokenizer.encode(text) for text in texts}
    wanted = [request(x, ids, n=4, max_tokens=24) for x, ids in prompts.items()]
    process = EngineProcess(config, where=2)

    async def work() -> dict[tuple[str, int], Completion]:
        async with process.client() as client:
            return await asyncio.wait_for(generate(client, *wanted), 250)

    try:
        process.ready()
        done = asyncio.run(work())
    finally:
        process.close()
    clock = Clock("learner", lambda _: None)
    sequences = [
        TrainSequence(
            *(np.asarray(prompts[name], np.int32), c.token_ids, c.logprobs_gen, c.versions),
            *(np.ones(len(c.token_ids), np.float32), np.zeros(len(c.token_ids), np.float32)),
        )
        for (name, _), c in done.items()
    ]
    pairs = zip(Learner(config, folder, clock).score(sequences, logprobs=True), sequences, strict=True)
    gap = np.concatenate([np.abs(x.logprobs - s.logprobs_gen) for x, s in pairs])
    print(
        f"{kind}, SmolLM2-135M, bfloat16: mean {gap.mean():.1e}, at most {gap.max():.1e} nats on {len(gap)} "
        "tokens"
    )
    # Mean distance to float32 with the same rounded weights, on such texts: the learner .013 (FP32 residual
    # stream), transformers' bf16 .024, vLLM .028. Most of the difference is the engine's own rounding.
    assert gap.mean() <= PARITY_NATS["bfloat16"]
