"""Which engines the contract is tested on, and the small models they serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_process import SHAPE, EngineProcess, need_vllm
from random_episodes import VOCABULARY
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig


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


def saved(folder: Path, seed: int, config: PretrainedConfig) -> str:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("tied"), 0, LlamaConfig(**SHAPE, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def untied_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(**SHAPE | {"initializer_range": 0.1}, tie_word_embeddings=False)
    return saved(tmp_path_factory.mktemp("untied"), 1, config)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=False)
    return saved(tmp_path_factory.mktemp("moe"), 2, config)


@pytest.fixture(scope="session")
def letters_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For the tokenizer of random episodes."""
    shape = SHAPE | {"vocab_size": VOCABULARY, "initializer_range": 0.1}
    return saved(tmp_path_factory.mktemp("letters"), 3, LlamaConfig(**shape, tie_word_embeddings=True))
