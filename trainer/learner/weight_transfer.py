"""New weights straight from the learner's GPUs into vLLM's, by the transfer that vLLM has built in:
`nccl` between distinct GPUs, `ipc` on the same ones.

    rank 0      vLLM's sender --its four calls--> Relay --pipe--> controller --> every engine's AsyncLLM
    every rank  Source, gathered in step === broadcast, or handles of shared memory ===> vLLM's workers
"""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

from trainer.config import EngineConfig
from trainer.learner.sharding import gathered
from trainer.messages import Transfer, Transferred
from trainer.models.checkpoint_names import as_in_checkpoint

BUFFER = 256 << 20  # bytes packed into one message; vLLM holds two of them beside engine.memory
ADVICE = "engine.weight_push file goes through shared memory instead"


class Source(WeightSource):
    """The learner's weights as a checkpoint in `dtype` names them. All ranks iterate it in step."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype

    def metadata(self) -> list[ParamMeta]:
        """What iteration yields, without gathering anything."""
        shapes = ((name, torch.empty(w.shape, device="meta")) for name, w in self.weights.items())
        return [
            ParamMeta(name, self.dtype, tuple(t.shape))
            for whole in shapes
            for name, t in as_in_checkpoint(*whole)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield from as_in_checkpoint(name, gathered(weight, self.dtype))


class Relay:
    """What vLLM's sender takes for the engine: each call is made at all engines, and returns once all did it.

    vLLM makes `update_weights` from a thread of its own while it broadcasts; nothing else uses the pipe then.
    """

    def __init__(self, conn: Connection | None) -> None:
        self._conn = conn  # None on ranks that do not send

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM's VLLMWeightSyncClient, as for the others."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """See there."""
        self._call("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See there. Handles of CUDA memory hold types, which vLLM's messages take pickled only."""
        info = {key: value for key, value in update_info.items() if value is not None}
        if "ipc_handles" in info:
            pickled = pickle.dumps(info.pop("ipc_handles"))
            info["ipc_handles_pickled"] = base64.b64encode(pickled).decode()
        self._call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See there; the controller labels the weights."""
        self._call("finish_weight_update", {})

    def _call(self, call: str, info: dict[str, Any]) -> None:
        assert self._conn is not None, "only rank 0 speaks with the engines"
        self._conn.send(Transfer(call, info))
        answer = self._conn.recv()
        if not isinstance(answer, Transferred):
            raise RuntimeError(f"{call} was answered by {type(answer).__name__}")


class Sender:
    """One learner rank's end of the transfer; all ranks make one, and call `send` in step."""

    def __init__(
        self,
        engine: EngineConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        rank: int,
        conn: Connection | None,
    ) -> None:
        self._by = engine.weight_push
        source = Source(weights, dtype)
        try:
            self._sender = WeightTransferTrainerFactory.trainer_init(
                init_info(engine, source, rank), client=Relay(conn), source=source
            )
            group = getattr(self._sender, "model_update_group", None)
            if group is not None and group.disabled:  # vLLM would go on, and send nothing
                raise RuntimeError("vLLM cannot load the NCCL library")
        except Exception as e:
            raise self._failure("cannot begin", e) from e

    def send(self) -> None:
        """Bring the present weights to every engine, which stands still meanwhile."""
        try:
            torch.cuda.synchronize()  # vLLM packs on streams of its own, which do not wait for the step's
            self._sender.send_weights()
        except Exception as e:
            raise self._failure("failed", e) from e

    def _failure(self, how: str, error: Exception) -> RuntimeError:
        return RuntimeError(f"weight push by {self._by} {how}: {str(error) or repr(error)}; {ADVICE}")


def init_info(engine: EngineConfig, source: Source, rank: int) -> IPCTrainerInitInfo | NCCLTrainerInitInfo:
    """What vLLM's sender on this rank is to know. Rank 0 sends; the engines' GPUs come behind it in order."""
    if engine.weight_push == "ipc":
        largest = max(m.dtype.itemsize * torch.Size(m.shape).numel() for m in source.metadata())
        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(BUFFER, largest))
    engines = len(engine.urls) or engine.count
    address = _towards(engine.urls[0]) if engine.urls else "127.0.0.1"
    return NCCLTrainerInitInfo(
        rank=rank,
        master_address=address,
        master_port=get_open_port(),
        world_size=1 + engines * engine.tensor_parallel,
        packed_buffer_size_bytes=BUFFER,
    )


def _towards(url: str) -> str:
    """This machine's address as the host of the URL sees it."""
    to = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((to.hostname, to.port or 80))  # sends nothing
        return str(probe.getsockname()[0])
