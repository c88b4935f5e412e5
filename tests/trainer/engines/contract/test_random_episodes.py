"""Promises of episodes on each engine: tokens, masks and log-probs are those of a recomputation."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_process import (
    EngineProcess,
    assert_logprobs,
    generate,
    load,
    perturb,
    prompt_of,
    request,
    settings,
    stale_kv,
    write,
)
from random_episodes import EPISODES, Played, by_hand, play_all, recomputed

from trainer.engines.pool import EnginePool
from trainer.types import Completion

WEIGHTS = 3  # that are pushed in turn
BLOCKS = {"torch": 1, "vllm": 32}  # tokens whose keys are kept together


@pytest.fixture(scope="module")
def engine(
    kind: str, letters_llama: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    config = settings(letters_llama, tmp_path_factory.mktemp("run"), kind, slots=16, max_new_tokens=1000)
    process = EngineProcess(config)
    process.ready()
    yield process
    process.close()


@pytest.mark.parametrize("groups", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_random_episodes_are_those_worked_out_from_scratch(
    engine: EngineProcess, kind: str, letters_llama: str, tmp_path: Path, groups: int
) -> None:
    models = [load(letters_llama) for _ in range(WEIGHTS)]
    paths = [perturb(model, tmp_path / f"{i}.safetensors", seed=i) for i, model in enumerate(models)]
    exact = [model.double() for model in models]

    async def played() -> list[Played]:
        async with engine.client() as client:

            async def push() -> None:
                await engine.push(client, paths[(engine.version + 1) % WEIGHTS])

            async def nothing() -> None:
                """vLLM's weights are not updated: a request that waits inside vLLM during an update may reuse
                prefix-cache blocks of the previous version."""

            await push()
            pool = EnginePool([client], lambda work, name, start=False: work)
            between = push if kind == "torch" else nothing
            return await asyncio.wait_for(play_all(pool, groups, tmp_path, between), 280)

    episodes, gaps, drifted = asyncio.run(played()), [], 0
    assert len(episodes) == groups * EPISODES
    for one in episodes:
        ids, sampled = by_hand(one)
        rollout, prompt = one.rollout, len(one.prompt.token_ids)
        assert rollout.token_ids.tolist() == ids[prompt:]
        assert rollout.sampled.tolist() == sampled[prompt:]
        versions = [version for _, completion in one.turns for version in completion.versions.tolist()]
        assert rollout.versions[rollout.sampled].tolist() == versions
        if one.turns:
            expected = recomputed(one, lambda version: exact[version % WEIGHTS], BLOCKS[kind])
            gaps.append(np.abs(rollout.logprobs_gen - np.where(sampled, expected, 0)[prompt:]).max())
            drifted += one.ctx.encode(one.ctx.tokenizer.decode(ids)) != ids
    assert max(gaps) <= 1e-5
    # The episodes are such that the test would notice it if text were tokenised again, or keys dropped.
    changed = sum(len(set(one.rollout.versions.tolist())) > 1 for one in episodes)
    assert drifted > 5 and (changed > 5 or kind == "vllm")


def test_a_turn_that_stopped_is_continued_with_its_keys_until_it_is_released(
    engine: EngineProcess, letters_llama: str, tmp_path: Path
) -> None:
    old, new, prompt = load(letters_llama), load(letters_llama), prompt_of(40)
    path = perturb(new, tmp_path / "new.safetensors")

    async def played() -> tuple[list[int], dict[str, Completion]]:
        async with engine.client() as client:
            await engine.push(client, write(old, tmp_path / "old.safetensors"))
            # 64 tokens have keys then, two of vLLM's blocks: it keeps whole ones.
            free = await generate(client, *(request(f"{i}", prompt, max_tokens=25, seed=i) for i in range(9)))
            turns = [c.token_ids.tolist() for c in free.values()]
            seed = next(i for i, ids in enumerate(turns) if ids[-1] not in ids[:-1])
            stop = {"keep_kv": ("stop",), "stop_ids": frozenset(turns[seed][-1:]), "max_tokens": 99}
            wanted = [request(name, prompt, seed=seed, **stop) for name in ("a", "b")]
            stopped = await generate(client, *wanted)
            assert [c.token_ids.tolist() for c in stopped.values()] == [turns[seed]] * 2
            await engine.push(client, path)
            client.release("b")
            ids = [*turns[seed], 1, 2, 3]
            more = [request(f"{name}.1", (*prompt, *ids), continues=name) for name in ("a", "b")]
            return ids, {name: c for (name, _), c in (await generate(client, *more)).items()}

    ids, done = asyncio.run(asyncio.wait_for(played(), 250))
    expected = stale_kv(old, new, prompt, [*ids, *done["a.1"].token_ids.tolist()], 25)[-12:]
    np.testing.assert_allclose(done["a.1"].logprobs_gen, expected, atol=2e-5)
    assert_logprobs(done["b.1"], new, (*prompt, *ids))
    anew = stale_kv(old, new, prompt, [*ids, *done["b.1"].token_ids.tolist()], 25)[-12:]
    assert np.abs(done["b.1"].logprobs_gen - anew).max() > 1e-2
