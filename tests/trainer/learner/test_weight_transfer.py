"""Promises of weight transfer that need no vLLM: what is done around its calls, in order, and who waits."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config import EngineConfig


def sender(monkeypatch: pytest.MonkeyPatch, init: Any, conn: Connection | None = None) -> Any:
    """A Sender on stand-ins of vLLM's modules, whose `trainer_init` is `init`."""

    class WeightSource:
        """What vLLM iterates."""

    transfer = "vllm.distributed.weight_transfer"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        transfer: {"WeightTransferTrainerFactory": SimpleNamespace(trainer_init=init)},
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
    weight_transfer = importlib.import_module("trainer.learner.weight_transfer")
    monkeypatch.delitem(sys.modules, "trainer.learner.weight_transfer")  # it holds these stand-ins
    monkeypatch.setattr(weight_transfer, "JOIN_S", 0.2)
    return weight_transfer.Sender(EngineConfig(weight_push="nccl", count=1), {}, torch.bfloat16, 0, conn)


def test_the_stream_is_set_before_vllm_speaks_and_pushes_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def trainer_init(info: Any, client: Any, source: Any) -> Any:
        log.append("communicator")
        return SimpleNamespace(send_weights=lambda: log.append("send"))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the learner's")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"stream: {stream}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("free"))
    made = sender(monkeypatch, trainer_init)
    for _ in range(2):
        made.send()
    assert log == ["stream: the learner's", "communicator", *["wait", "send", "free"] * 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", ["ncclCommInitRank: unhandled system error", ""])
def test_where_nccl_fails_on_the_learners_rank_alone_it_does_not_wait_for_the_engines(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines answer nothing, with an `error` since they wait in NCCL for this rank; vLLM joins the
    thread that asks them. It ends with one line."""
    ours, engines = Pipe()

    def trainer_init(info: Any, client: Any, source: Any) -> None:  # as vLLM 0.32.0 and 0.33.0
        with ThreadPoolExecutor(max_workers=1) as threads:
            asked = threads.submit(client.init_weight_transfer_engine, {})
            if error:
                raise ConnectionError(error)
        asked.result()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    said = error or "init_weight_transfer_engine: no answer of the engines within 0.2 s"
    line = f"weight push by nccl cannot begin: {said}; [^\n]*file goes[^\n]*"
    with pytest.raises(RuntimeError, match=rf"^{line}$"):
        sender(monkeypatch, trainer_init, ours)
    assert engines.recv().call == "init_weight_transfer_engine"
