"""New weights from the learner's GPUs to vLLM's, by vLLM's own weight transfer: `nccl` between distinct GPUs,
`ipc` on shared ones.

    rank 0      vLLM's sender -- four calls --> Relay -- pipe --> controller --> every engine's AsyncLLM
    every rank  Source, gathered in step === broadcast, or handles of shared memory ===> vLLM's workers
"""

import base64
import pickle
import socket
from collections.abc import Iterator, Mapping
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils import torch_utils  # noqa: F401  it replaces torch.cuda.set_stream, to notice which is set
from vllm.utils.network_utils import get_open_port

from trainer.config import EngineConfig
from trainer.learner.lora import AdaptedWeight
from trainer.learner.sharding import full_tensor
from trainer.messages import Ack, Transfer
from trainer.models.checkpoint_names import as_in_checkpoint

BUFFER = 256 << 20  # bytes packed into one message; vLLM needs two of them beyond engine.memory
JOIN_S = 300.0  # for the engines to join NCCL's group, as vLLM's own store waits
ADVICE = "engine.weight_push file goes through shared memory instead"


class Shapes(list[ParamMeta]):
    """Names and shapes, read as `source.metadata` by vLLM 0.33 and called by 0.32."""

    def __call__(self) -> "Shapes":
        return self


class Source(WeightSource):
    """The learner's weights as `dtype` under their checkpoint names. All ranks iterate it in step."""

    def __init__(self, weights: Mapping[str, Tensor | AdaptedWeight], dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype

    @cached_property
    def metadata(self) -> Shapes:
        """Names and shapes that iteration yields, without gathering the tensors."""
        return Shapes(
            ParamMeta(name, self.dtype, tuple(tensor.shape))
            for parameter, weight in self.weights.items()
            for name, tensor in as_in_checkpoint(parameter, torch.empty(weight.shape, device="meta"))
        )

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, for vLLM 0.33."""
        for name, weight in self.weights.items():
            yield from as_in_checkpoint(name, full_tensor(weight, self.dtype))

    __iter__ = iter_full  # for vLLM 0.32


class Relay:
    """The client that vLLM's sender calls: each call goes to all engines and returns once all have done it.

    vLLM calls `update_weights` from a thread of its own while it broadcasts; nothing else uses the pipe then.
    """

    def __init__(self, conn: Connection | None) -> None:
        self._conn = conn  # None on ranks that do not send

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Same contract as in vLLM's VLLMWeightSyncClient, like the other three methods."""
        self._call("init_weight_transfer_engine", init_info, JOIN_S)

    def start_weight_update(self) -> None:
        """Start one version's transfer."""
        self._call("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Handles of CUDA memory must be pickled: vLLM's messages take no types."""
        info = {key: value for key, value in update_info.items() if value is not None}
        if "ipc_handles" in info:
            pickled = pickle.dumps(info.pop("ipc_handles"))
            info["ipc_handles_pickled"] = base64.b64encode(pickled).decode()
        self._call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """No version is sent: the controller labels the weights."""
        self._call("finish_weight_update", {})

    def _call(self, call: str, info: dict[str, Any], seconds: float | None = None) -> None:
        assert self._conn is not None, "only rank 0 calls the engines"
        self._conn.send(Transfer(call, info))
        # If NCCL fails on rank 0 alone, the engines never answer, and vLLM waits for this thread.
        if not self._conn.poll(seconds):
            raise RuntimeError(f"{call}: no answer of the engines within {seconds:g} s")
        answer = self._conn.recv()
        if not isinstance(answer, Ack):
            raise RuntimeError(f"{call} was answered by {type(answer).__name__}")


class Sender:
    """One learner rank's side of the transfer; all ranks create one and call `send` in step."""

    def __init__(
        self, engine: EngineConfig, weights: Mapping[str, Tensor | AdaptedWeight], dtype: torch.dtype,
        rank: int, conn: Connection | None,
    ) -> None:  # fmt: skip
        self._method = engine.weight_push
        source = Source(weights, dtype)
        try:
            # Else vLLM's communicator makes a new stream this thread's, and it does not wait for the old.
            torch.cuda.set_stream(torch.cuda.current_stream())
            info = init_info(engine, source, rank)
            self._sender = WeightTransferTrainerFactory.trainer_init(info, client=Relay(conn), source=source)
            group = getattr(self._sender, "model_update_group", None)
            if group is not None and group.disabled:  # vLLM would continue and send nothing
                raise RuntimeError("vLLM cannot load the NCCL library")
        except Exception as e:
            raise self._failure("cannot begin", e) from e

    def send(self) -> None:
        """Send the present weights to every engine; the engines are paused."""
        try:
            torch.cuda.synchronize()  # vLLM packs on its own streams, which do not wait for the step's
            self._sender.send_weights()
            torch.cuda.empty_cache()  # what vLLM packed on streams of its own, no other stream can use
        except Exception as e:
            raise self._failure("failed", e) from e

    def _failure(self, event: str, error: Exception) -> RuntimeError:
        return RuntimeError(f"weight push by {self._method} {event}: {str(error) or repr(error)}; {ADVICE}")


def init_info(engine: EngineConfig, source: Source, rank: int) -> IPCTrainerInitInfo | NCCLTrainerInitInfo:
    """The settings of vLLM's sender on this rank: rank 0 sends, and the engines' GPUs follow it in order."""
    if engine.weight_push == "ipc":
        largest = max(m.dtype.itemsize * torch.Size(m.shape).numel() for m in source.metadata)
        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(BUFFER, largest))
    engines = len(engine.urls) or engine.count
    address = _own_address(engine.urls[0]) if engine.urls else "127.0.0.1"
    return NCCLTrainerInitInfo(
        rank=rank, master_address=address, master_port=get_open_port(),
        world_size=1 + engines * engine.tensor_parallel, packed_buffer_size_bytes=BUFFER,
    )  # fmt: skip


def _own_address(url: str) -> str:
    """This machine's address on the way to the URL's host."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))  # sends nothing
        return str(probe.getsockname()[0])
