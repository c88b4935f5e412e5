"""The promise that a real vLLM server is a teacher: its log-probs of token ids are those of transformers."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_process import START_S, need_vllm
from small import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.config import ConfigError, KLConfig
from trainer.controller.teacher import Teacher
from trainer.types import Group, Prompt, Rollout


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of `vllm serve`, and the folder of its model of 64 positions."""
    need_vllm()
    folder = make_model(tmp_path_factory.mktemp("served") / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    argv += ["--port", str(port), "--max-model-len", "64", "--dtype", "float32", "--enforce-eager"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder.parent / "log").open("w") as log:
        process = subprocess.Popen(argv, env=os.environ | env, stdout=log, stderr=log)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        answers = False
        while not answers:
            assert process.poll() is None and time.monotonic() < deadline, (folder.parent / "log").read_text()
            with suppress(OSError):
                answers = urllib.request.urlopen(f"{url}/v1/models", timeout=5).status == 200
            time.sleep(0.5)
        yield url, folder
    finally:
        process.terminate()
        process.wait(30)


def rollout(ids: list[int]) -> Rollout:
    n = len(ids)
    arrays = np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), np.ones(n, bool)
    return Rollout(*arrays, "", 0.0, "wrong", False, False)


def test_vllms_log_probs_of_ids_are_those_of_transformers(served: tuple[str, Path]) -> None:
    url, folder = served
    config = KLConfig(to=url, coefficient=1.0, place="as_advantage", estimator="k1", deadline_s=60)
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), np.random.default_rng(0)
    prompt = Prompt("id", "", (3, 12, 4, 13), "", {})
    completions = [rng.integers(0, 16, n).tolist() for n in (1, 7, 40)]
    group = Group(0, 0, prompt, tuple(map(rollout, completions)))

    async def score() -> Group:
        teacher = Teacher(config)
        await teacher.start(tokenizer, 44)
        with pytest.raises(ConfigError, match="takes 64 tokens, and prompt and completion have up to 64"):
            await Teacher(config).start(tokenizer, 64)
        return await teacher.score(group)

    scored = asyncio.run(score())
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for ids, x in zip(completions, scored.logprobs_ref, strict=True):
        whole = torch.tensor([[*prompt.token_ids, *ids]])
        with torch.no_grad():
            exact = lm(whole).logits[0, 3:-1].log_softmax(-1).gather(1, whole[0, 4:, None])[:, 0]
        np.testing.assert_allclose(x, exact.numpy(), atol=1e-5)
