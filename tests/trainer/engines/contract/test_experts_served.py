"""The experts of a mixture that engines return: those of the pass that read each token first."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_process import EngineProcess, generate, load, perturb, prompt_of, request, settings
from fakes import having
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.engines.vllm.engine import LocalVLLM, vllm_settings
from trainer.engines.vllm.process import Sample
from trainer.types import Completion

TOP_K, LAYERS = 2, 3


@torch.no_grad()
def routed(model: Any, ids: Sequence[int], cache: Any = None) -> tuple[NDArray[np.int64], Any]:
    """(T, layers, k) transformers' own choice, sorted, and the cache after these tokens."""
    out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, output_router_logits=True)
    return torch.stack([x.topk(TOP_K).indices for x in out.router_logits], 1).sort(-1)[0].numpy(), (
        out.past_key_values
    )


def recorded(c: Completion) -> NDArray[np.int64]:
    assert c.experts is not None and c.experts.dtype == np.uint8
    return np.sort(c.experts.reshape(-1, LAYERS, TOP_K).astype(np.int64), axis=-1)


async def _turns(process: EngineProcess, path: str) -> tuple[Completion, Completion, Completion]:
    """A turn, one that continues it after new weights came in the midst of it, and an evaluation's."""
    prompt = prompt_of(9)
    async with process.client() as client:
        asked = request("a", prompt, max_tokens=600, keep_kv=("length",), experts_from=0)
        running = asyncio.create_task(generate(client, asked, request("other", prompt_of(5), n=3)))
        await generate(client, request("short", prompt[:4], max_tokens=5))
        await process.push(client, path)
        first = (await running)["a", 0]
        whole = (*prompt, *first.token_ids.tolist())
        more = request("a.1", (*whole, 7, 8), max_tokens=6, continues="a", experts_from=len(whole) - 1)
        second = (await generate(client, more))["a.1", 0]
        return first, second, (await generate(client, request("e", prompt, evaluation=True)))["e", 0]


def test_each_token_has_the_experts_of_the_weights_that_read_it(
    kind: str, tiny_moe: str, tmp_path: Path
) -> None:
    """vLLM returns them on GPUs only: the next test holds on what that depends."""
    process = EngineProcess(settings(tiny_moe, tmp_path, kind), where=2)
    old, new = load(tiny_moe), load(tiny_moe)
    path = perturb(new, tmp_path / "new.safetensors", scale=0.3)
    try:
        process.ready()
        first, second, evaluated = asyncio.run(asyncio.wait_for(_turns(process, path), 250))
    finally:
        process.close()
    assert evaluated.experts is None
    if kind == "vllm":
        assert first.experts is second.experts is None
        return
    prompt, tokens = prompt_of(9), first.token_ids.tolist()
    swap = int(np.argmax(first.versions == 1))
    assert 0 < swap < len(tokens) - 4
    fed = [*prompt, *tokens, 7, 8, *second.token_ids.tolist()][:-1]
    read = len(prompt) + swap - 1  # tokens read before the new weights
    by_old, cache = routed(old, fed[:read])
    by_new, _ = routed(new, fed[read:], cache)
    np.testing.assert_array_equal(
        np.concatenate([recorded(first), recorded(second)]), np.concatenate([by_old, by_new])
    )
    assert (by_new != routed(old, fed)[0][read:]).any()


def test_vllm_is_asked_for_experts_where_it_has_them(
    vllm_installed: None, tiny_moe: str, tied_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    def flag(model: str, setting: bool | None = None) -> Any:
        config = having(settings(model, tmp_path, "vllm"), model={"replay_experts": setting})
        return vllm_settings(config, model)["enable_return_routed_experts"]

    assert flag(tiny_moe) is flag(tiny_moe, False) is flag(tied_llama) is False
    with pytest.raises(ConfigError, match="vLLM on a CPU returns no experts; leave it out"):
        flag(tiny_moe, True)
    # Why: once vLLM's CPU backend records experts, this fails, and `returns_experts` may ask it for them.
    asked = vllm_settings(settings(tiny_moe, tmp_path, "vllm"), tiny_moe)
    asked["enable_return_routed_experts"] = True
    with pytest.raises(Exception, match="requires Model Runner V2"):
        AsyncEngineArgs(**asked).create_engine_config()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert flag(tiny_moe) is flag(tiny_moe, True) is True and flag(tied_llama) is False
    with pytest.raises(ConfigError, match="cannot be true: llama is none of"):
        flag(tied_llama, True)


def test_what_vllm_returns_of_experts_is_read_here_and_over_http(vllm_installed: None) -> None:
    """Fakes at the seam, which return vLLM's own output and the answer of its route."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput
    from vllm.utils.serial_utils import numpy2base64

    from trainer.engines.vllm.remote import RemoteVLLM

    experts = np.arange(4 * LAYERS * TOP_K, dtype=np.uint8).reshape(4, LAYERS, TOP_K)
    sample = Sample(request("a", (1, 2, 3), experts_from=0), 0)
    asked = list[Any]()

    class LLM:
        async def generate(self, prompt: Any, params: Any, name: str) -> Any:
            asked.append(params.routed_experts_prompt_start)
            flat = FlatLogprobs()
            for i in (7, 8):
                flat.append_fast([i], [-1.0], [1], [None])
            ended = {"finish_reason": "length", "routed_experts": experts}
            output = CompletionOutput(0, "", [7, 8], -2.0, flat, **ended)
            yield SimpleNamespace(outputs=[output], prompt_logprobs=None)

    local, remote = LocalVLLM.__new__(LocalVLLM), RemoteVLLM.__new__(RemoteVLLM)
    local._llm = LLM()

    async def call(method: str, route: str, json: Any, **more: Any) -> Any:
        asked.append(json["sampling_params"]["routed_experts_prompt_start"])
        choice = {"token_ids": [7, 8], "finish_reason": "length", "weight_versions": None}
        logprobs = {"content": [{"logprob": -1.0}, {"logprob": -1.0}]}
        return {"choices": [choice | {"logprobs": logprobs, "routed_experts": numpy2base64(experts)}]}

    remote._call = call  # type: ignore[method-assign]
    for one in (local, remote):
        done = asyncio.run(one.sample(sample, 0))
        np.testing.assert_array_equal(done.experts, experts.reshape(4, -1))
    assert asked == [0, 0]
