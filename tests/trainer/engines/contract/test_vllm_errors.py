"""What vLLM cannot serve gets an error of one line: what was given, what was expected, what to do."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engine_process import SHAPE, EngineProcess, settings
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config import Config, ConfigError
from trainer.engines.vllm.engine import VERSION, check_installed


def test_a_missing_vllm_or_another_version_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"not installed; run `make setup-vllm`.*vllm=={VERSION}"):
        check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for name, content in (("vllm", {}), ("vllm.version", {"__version__": "0.33.1"})):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError, match=rf"vLLM 0\.33\.1 is installed, expected {VERSION} or 0\.33\.0"):
        check_installed()


def failure(config: Config) -> str:
    """The error that the engine's process ends with."""
    process = EngineProcess(config)
    try:
        with pytest.raises(AssertionError, match="died"):
            process.ready()
        process.process.join(30)
        assert process.process.exitcode == 1
        assert process.failure is not None and process.failure.user_error, process.failure
        assert "\n" not in process.failure.message
        return process.failure.message
    finally:
        process.close()


@pytest.mark.usefixtures("vllm_installed")
def test_a_head_that_vllms_cpu_attention_does_not_know_gets_a_clear_error(tmp_path: Path) -> None:
    shape: dict[str, Any] = SHAPE | {"head_dim": 48}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / "odd")
    message = failure(settings(str(tmp_path / "odd"), tmp_path, "vllm"))
    assert "48 dimensions" in message and "32, 64" in message and "engine.kind torch" in message


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_installed")
def test_a_kv_cache_beyond_the_memory_is_an_error_with_its_size(tmp_path: Path) -> None:
    shape: dict[str, Any] = SHAPE | {"head_dim": 512, "num_key_value_heads": 4}  # 48 KiB a token
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / "wide")
    message = failure(settings(str(tmp_path / "wide"), tmp_path, "vllm", slots=4000))
    assert "GiB" in message and "engine.slots" in message


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_installed")
def test_an_engine_that_dies_at_its_start_reports_the_logged_cause(tied_llama: str, tmp_path: Path) -> None:
    config = settings(tied_llama, tmp_path, "vllm")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(tied_llama).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])  # as after a download that stopped
    message = failure(replace(config, model=replace(config.model, path=str(broken))))
    assert message.startswith("vLLM did not start: ") and "header" in message.lower()
