"""Which engines the contract is tested on, and the small models they serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_process import SHAPE, EngineProcess, need_vllm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.fixture(scope="session", params=["torch", "vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    """Both engines; vLLM is skipped if it is not installed, unless SIGMOID_RL_REQUIRE_VLLM is set."""
    if request.param == "vllm":
        need_vllm()
    return request.param


@pytest.fixture
def vllm_installed() -> None:
    """For promises of vLLM alone."""
    need_vllm()


@pytest.fixture(autouse=True, scope="module")
def no_engine_is_left_behind() -> Iterator[None]:
    """Close the engines of failed tests: multiprocessing would wait for them forever when pytest exits."""
    yield
    for process in list(EngineProcess.running):
        process.close()


def save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    return save(model, tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"initializer_range": 0.1}, tie_word_embeddings=False))
    return save(model, tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(2)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=False))
    return save(model, tmp_path_factory.mktemp("moe"))
