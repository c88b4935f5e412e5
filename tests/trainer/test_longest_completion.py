"""Everything that depends on the longest completion takes it from EngineConfig, with the phrase counted."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.config import Config, EngineConfig, InterruptionConfig
from trainer.engines.vllm.engine import vllm_settings
from trainer.launcher.advice import plan
from trainer.launcher.memory_estimate import PROMPT_TOKENS, ModelSize, estimate
from trainer.launcher.placement import Devices, Split

PHRASE = "Time is up. </think>"
INTERRUPTION = InterruptionConfig(enabled=True, lo=50, hi=100, phrase=PHRASE, answer_tokens=30)
ENGINE = EngineConfig(kind="vllm", weight_push="file", slots=4, max_new_tokens=7, interruption=INTERRUPTION)
CONFIG = Config(engine=ENGINE)
LONGEST = 100 + len(PHRASE) + 30  # the phrase has at most as many tokens as bytes
SIZE = ModelSize(parameters=1000, layers=3, hidden=8, feed_forward=16, kv_width=5, vocabulary=32)


def test_the_longest_completion_has_the_budget_the_phrase_and_the_answer() -> None:
    assert ENGINE.longest_completion() == LONGEST
    assert ENGINE.longest_completion(phrase_tokens=5) == 135
    assert replace(ENGINE, interruption=InterruptionConfig()).longest_completion() == 7


def test_the_memory_estimate_reserves_kv_cache_for_it() -> None:
    devices = Devices(2, (("0",),), (("1",),))
    cache = next(b for name, b in estimate(CONFIG, SIZE, devices).engine.items() if "KV cache" in name)
    per_token = 2 * SIZE.layers * SIZE.kv_width * (4 if CONFIG.model.dtype == "float32" else 2)
    assert cache == per_token * ENGINE.slots * (PROMPT_TOKENS + LONGEST)


def test_the_advice_plans_for_it() -> None:
    uninterrupted = EngineConfig(kind="vllm", slots=4, max_new_tokens=LONGEST)
    plans = [plan(Config(engine=e), SIZE, Split(2, 6)).text for e in (ENGINE, uninterrupted)]
    assert plans[0] == plans[1]


def test_vllm_makes_room_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(WeightTransferConfig=dict))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    model = SimpleNamespace(max_position_embeddings=10**6, model_type="llama")
    model.get_text_config = lambda: model
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda path: model)
    settings = vllm_settings(CONFIG, str(tmp_path))
    assert settings["max_model_len"] == CONFIG.data.max_prompt_tokens + LONGEST
    assert settings["max_num_batched_tokens"] == 8192  # of a step: vLLM's own default is a quarter
    many = replace(CONFIG, engine=replace(ENGINE, slots=9000))
    assert vllm_settings(many, str(tmp_path))["max_num_batched_tokens"] == 9000  # vLLM takes no fewer
