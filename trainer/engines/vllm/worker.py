"""What runs inside vLLM's worker: weights from a safetensors file, and its end with the engine process.

vLLM imports this module by `worker_extension_cls`; nothing else does.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from trainer.engines.vllm.engine import BACKEND, OWNER
from trainer.models.checkpoint_names import as_in_checkpoint

CACHED = 200_000  # logits normalised at a time: they stay in the CPU's cache between the passes


@dataclass
class Nothing(WeightTransferInitInfo):
    """A file needs no rendezvous."""


@dataclass
class FromFile(WeightTransferUpdateInfo):
    """Where the new weights lie, on a file system that this worker sees (shared memory at best)."""

    path: str


class FileWeightTransfer(WeightTransferEngine[Nothing, FromFile]):
    """Loads a file written by the learner, by the names of its checkpoint."""

    init_info_cls = Nothing
    update_info_cls = FromFile

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Layer by layer, since vLLM keeps weights in a layout of its own; on a CPU it lays experts out only
        while it sets up their kernel, so that is to be done again."""
        if self.device.type == "cpu":
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, UnquantizedFusedMoEMethod):
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FromFile) -> None:
        """Load all tensors; the file is mapped, so this is the only copy."""
        self.model.load_weights(tensors(update_info.path))

    def finish_weight_update(self) -> None:
        """Process what waited for the last tensor. A tied head has no tensor of its own in the file, but on a
        CPU its own copy in another layout, which is made again."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to do."""


def tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors by the names of a checkpoint."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            yield from as_in_checkpoint(name, file.get_tensor(name))


def log_softmax(logits: Tensor) -> Tensor:
    """(n, V) logits become log-probs. On a CPU torch's own adds a row up in a few lanes of a register
    and loses unlikely words: of 49,152, SmolLM2's tokens come out 1.5e-5 nats too likely. `logsumexp` adds in
    pairs: 5e-7."""
    for rows in logits.split(max(1, CACHED // logits.shape[1])):
        rows.sub_(rows.logsumexp(-1, keepdim=True))
    return logits


def sample(
    self: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """In place of vLLM's sampler on a CPU: its tokens, their log-probs by our log_softmax."""
    self.logprobs_mode = "processed_logits"
    tokens, processed = VLLM_SAMPLE(self, logits, generators, k, p)
    return tokens, log_softmax(processed)


class Extension:
    """Mixed into vLLM's worker class; being imported is all it is for."""


def _end_with(owner: int, parent: int) -> None:
    """Once the owner is gone, end this process and, if that is another, vLLM's engine core above it.

    vLLM's own processes notice a front end that ends in order, not one that is killed.
    """
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])  # readable when it has ended
    if parent not in (owner, os.getpid()) and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if current_platform.is_cpu():
    VLLM_SAMPLE = TopKTopPSampler.forward_cpu
    TopKTopPSampler.forward_cpu = sample
    Sampler.compute_logprobs = staticmethod(log_softmax)  # where all are greedy

if owner := os.environ.get(OWNER):
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)
    Thread(target=_end_with, args=(int(owner), os.getppid()), daemon=True).start()
