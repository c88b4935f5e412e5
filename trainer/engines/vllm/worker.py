"""Runs inside vLLM's worker: loads weights from safetensors files, ends the worker with its engine process.

Only vLLM imports this module, by `worker_extension_cls`; importing it is what registers everything.
"""

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from threading import Thread

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from trainer.engines.vllm.engine import ENGINE_PID, FILE_TRANSFER
from trainer.models.checkpoint_names import as_in_checkpoint
from trainer.models.lora import pushed_weights

LOGITS_AT_A_TIME = 200_000  # few enough to stay in the CPU's cache between the passes of log_softmax


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Empty: a file needs no process group."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """The file of the new weights, on a file system that this worker sees, preferably in shared memory."""

    path: str


class FileWeightTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads a safetensors file that the learner has written."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Start vLLM's layerwise reload, since it keeps weights in its own layout. On a CPU it lays experts
        out only when it sets up their kernel, so the kernel is dropped and set up again."""
        if self.device.type == "cpu":
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, UnquantizedFusedMoEMethod):
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load all tensors; files are mapped, so this is the only copy. LoRA's sums are made one by one, on
        the device; the base's other tensors come with them, since a layer is reloaded whole or not at all."""
        weights = pushed_weights(update_info.path, self.device, whole=True)
        self.model.load_weights(chain.from_iterable(as_in_checkpoint(*weight) for weight in weights))

    def finish_weight_update(self) -> None:
        """Finish the layerwise reload. A tied head has no tensor in the file, but on a CPU it is a copy of
        the embeddings in another layout, so it is copied again."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to do."""


def log_softmax(logits: Tensor) -> Tensor:
    """(n, V) logits become log-probs, in place. On a CPU torch's log_softmax sums a row in a few accumulators
    and loses unlikely words: with SmolLM2's 49,152 words, log-probs are 1.5e-5 nats too high. `logsumexp`
    sums pairwise: 5e-7."""
    for rows in logits.split(max(1, LOGITS_AT_A_TIME // logits.shape[1])):
        rows.sub_(rows.logsumexp(-1, keepdim=True))
    return logits


def sample_with_exact_logprobs(
    self: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Replaces vLLM's sampler on a CPU: the same tokens, with log-probs by our log_softmax."""
    self.logprobs_mode = "processed_logits"
    tokens, processed = VLLM_FORWARD_CPU(self, logits, generators, k, p)
    return tokens, log_softmax(processed)


class WorkerExtension:
    """vLLM adds it to its worker class; it exists so that vLLM imports this module."""


def _exit_with(engine: int, parent: int) -> None:
    """Wait for the engine process's end; then kill this process and, if it is another, vLLM's engine core.

    vLLM's own processes notice a front end that exits in order, but not one that is killed.
    """
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(engine)], [], [])  # readable when it has ended
    if parent not in (engine, os.getpid()) and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if current_platform.is_cpu():
    VLLM_FORWARD_CPU = TopKTopPSampler.forward_cpu
    TopKTopPSampler.forward_cpu = sample_with_exact_logprobs
    Sampler.compute_logprobs = staticmethod(log_softmax)  # used where all samples are greedy

if engine_pid := os.environ.get(ENGINE_PID):
    WeightTransferEngineFactory.register_engine(FILE_TRANSFER, FileWeightTransfer)
    Thread(target=_exit_with, args=(int(engine_pid), os.getppid()), daemon=True).start()
