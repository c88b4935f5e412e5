"""Promises of weight transfer that need no vLLM: what is done on the GPU around its calls, in order."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config import EngineConfig


def test_the_stream_is_set_before_vllm_speaks_and_pushes_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Factory:
        @staticmethod
        def trainer_init(info: Any, client: Any, source: Any) -> Any:
            log.append("communicator")
            return SimpleNamespace(send_weights=lambda: log.append("send"))

    class WeightSource:
        """What vLLM iterates."""

    transfer = "vllm.distributed.weight_transfer"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        transfer: {"WeightTransferTrainerFactory": Factory},
        f"{transfer}.base": {"ParamMeta": tuple, "WeightSource": WeightSource},
        f"{transfer}.ipc_engine": {"IPCTrainerInitInfo": dict},
        f"{transfer}.nccl_engine": {"NCCLTrainerInitInfo": dict},
        "vllm.utils": {"torch_utils": None},
        "vllm.utils.network_utils": {"get_open_port": lambda: 1},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "trainer.learner.weight_transfer", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the learner's")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"stream: {stream}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("free"))
    from trainer.learner.weight_transfer import Sender

    monkeypatch.delitem(sys.modules, "trainer.learner.weight_transfer")  # it holds these stand-ins
    sender = Sender(EngineConfig(weight_push="nccl", count=1), {}, torch.bfloat16, 0, None)
    for _ in range(2):
        sender.send()
    assert log == ["stream: the learner's", "communicator", *["wait", "send", "free"] * 2]
