"""vLLM in this process: every call of its API is here (and in worker.py, which runs inside vLLM's worker).

Weights come as safetensors files on this host, or from the learner's GPUs by vLLM's own weight transfer. They
are loaded between two tokens: running sequences keep their KV, and the prefix cache is salted with the weight
version, so that no new sequence reads old keys. With engine.colocate vLLM sleeps while the learner has the
GPUs: sequences stay, and their KV is recomputed with the new weights.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from trainer import run_folder
from trainer.config import Config, ConfigError, EngineConfig
from trainer.engines.backend import kv_shape
from trainer.engines.vllm.process import VLLM, Sample, run_vllm
from trainer.gpus import visible_gpus
from trainer.roles import role_index
from trainer.types import Completion

VERSION = "0.32.0"  # installed, and run on a CPU
VERSIONS = (VERSION, "0.33.0")  # whose sources have what is called
FILE_TRANSFER = "safetensors"  # the name of our weight transfer in vLLM's registry
WORKER_EXTENSION = "trainer.engines.vllm.worker.WorkerExtension"
ENGINE_PID = "SIGMOID_RL_ENGINE_PID"  # environment variable: the process that has started vLLM
SECRET = "SIGMOID_RL_SECRET"  # environment variable: what a run and its vLLM servers share
KV_BLOCK = 32  # tokens of a KV block on a CPU, the smallest that vLLM takes: only whole blocks are shared
# Tokens of one step on a CPU, or one for each sequence if that is more: bounds the delay of a weight update.
STEP_TOKENS = 2048
# The same on a GPU, where vLLM's own default for AsyncLLM is 2,048: prompts would queue.
GPU_STEP_TOKENS = 8192
STATISTICS = {"vllm:kv_cache_usage_perc": "kv_use", "vllm:num_preemptions": "preemptions"}
PROMPT_TOKENS = 128  # assumed prompt length for the CPU's KV cache; with longer prompts, fewer samples run


def engine_main(
    config: Config, model_dir: str, conn: Connection, threads: int, role: str, telemetry: Connection
) -> None:
    """Entry of the spawned process `role`; returns on Shutdown or when the controller is dead."""

    async def start() -> tuple[LocalVLLM, dict[str, Any]]:
        if config.engine.colocate:  # vLLM measures the free GPU memory: wait until the learner has left it
            conn.recv()
        log = Path(config.run_dir) / "logs" / f"{role}.log"
        vllm = LocalVLLM(config, model_dir, threads, log, role_index(role))
        await vllm.load(0)
        return vllm, {"kind": "vllm", "dtype": config.model.dtype, "threads": threads}

    run_vllm(role, conn, telemetry, config.engine.slots, start)


def check_installed() -> None:
    """ConfigError unless a vLLM is installed that this module was written for."""
    advice = f"run `make setup-vllm` (CPU) or `pip install vllm=={VERSION}` (GPU), or set engine.kind torch"
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"engine.kind vllm: vLLM is not installed; {advice}")
    from vllm.version import __version__

    if not __version__.startswith(VERSIONS):
        expected = " or ".join(VERSIONS)
        raise ConfigError(f"engine.kind vllm: vLLM {__version__} is installed, expected {expected}; {advice}")


class LocalVLLM(VLLM):
    """One AsyncLLM and its child processes."""

    def __init__(self, config: Config, model_dir: str, threads: int, log: Path, index: int = 0) -> None:
        self._engine, self._index, self._log = config.engine, index, log
        self._log_start = log.stat().st_size if log.is_file() else 0
        self._own, self._lock = run_folder.own_folder(run_folder.shared())
        set_environment(threads, self._own)
        if config.engine.weight_push == "ipc":  # CUDA handles arrive pickled
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = vllm_settings(config, model_dir)
        try:
            arguments = AsyncEngineArgs(**settings)
            self.limit: int = arguments.max_model_len
            self._llm: Any = AsyncLLM.from_engine_args(arguments)
        except Exception as e:
            cause = self._cause(e)
            advice = (
                "; lower engine.slots, engine.max_new_tokens or data.max_prompt_tokens (on a GPU: or raise "
                "engine.memory or engine.tensor_parallel)"
            )
            raise ConfigError(f"vLLM did not start: {cause}{advice * ('memory' in cause.lower())}") from e

    async def sample(self, sample: Sample, salt: int) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params = SamplingParams(**sample.parameters, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": list(sample.request.prompt_ids), "cache_salt": f"v{salt}"}
        try:
            async for outputs in self._llm.generate(prompt, params, sample.id):
                output = outputs.outputs[0]
        except EngineDeadError as e:
            raise RuntimeError(self._death()) from e
        flat = output.logprobs
        logprobs = np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices, np.int64)]
        spans = [(span.start, span.end, span.version) for span in output.weight_versions or ()]
        prompt_logprobs = [
            {i: x.logprob for i, x in at.items()} for at in outputs.prompt_logprobs or () if at
        ]
        ids, reason, experts = output.token_ids, output.finish_reason, output.routed_experts
        return sample.completion(ids, logprobs, spans, reason, prompt_logprobs, experts)

    async def abort(self, sample_ids: Iterable[str]) -> None:
        await self._llm.abort(sample_ids)

    async def pause(self, free_gpu: bool) -> None:
        """Sleep level 1 keeps the weights in the host's memory; `keep` preempts the running
        sequences, and vLLM recomputes their KV when it wakes."""
        if free_gpu and self._engine.colocate:
            await self._llm.sleep(level=1, mode="keep")
        else:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self, free_gpu: bool) -> None:
        if free_gpu and self._engine.colocate:
            await self._llm.wake_up()  # weights, if they still sleep, and KV cache
        else:
            await self._llm.resume_generation()

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer import base

        try:
            arguments: list[Any] = []
            if call == "init_weight_transfer_engine":
                info = with_rank_offset(info, self._engine, self._index)
                arguments = [base.WeightTransferInitRequest(init_info=info)]
            elif call == "update_weights":
                arguments = [base.WeightTransferUpdateRequest(update_info=info)]
            elif call == "start_weight_update" and self._engine.colocate:
                # Not the KV cache: the learner's weights are on the GPU, too.
                await self._llm.wake_up(tags=["weights"])
            await getattr(self._llm, call)(*arguments)
        except Exception as e:
            raise RuntimeError(
                f"weight push by {self._engine.weight_push} failed at {call}: {self._cause(e)}; "
                "engine.weight_push file goes through shared memory instead"
            ) from e

    async def load(self, version: int, *paths: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if paths:
            await self._llm.start_weight_update()
            for path in paths:
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": path}))
            await self._llm.finish_weight_update()
        await self._llm.update_weight_version(str(version))

    async def check(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        if self._llm.errored:
            raise RuntimeError(self._death())
        return {STATISTICS[m.name]: float(m.value) for m in get_metrics_snapshot() if m.name in STATISTICS}

    async def close(self) -> None:
        self._llm.shutdown(timeout=5)
        shutil.rmtree(self._own, ignore_errors=True)
        self._lock.close()

    def _death(self) -> str:
        return f"vLLM's engine core has died: {self._logged_error() or 'it logged no error; was it killed?'}"

    def _cause(self, error: Exception) -> str:
        """The log's text on an error, or the error's own text, in one line."""
        return self._logged_error() or _one_line(str(error) or repr(error))

    def _logged_error(self) -> str:
        """The first error that vLLM's processes have written to the log, other than of failed start-up."""
        if not self._log.is_file():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        pattern = r"(?m)^(?:\(.*?\) )?(?:ERROR [^]]*\] )?(?:[\w.]*)((?:Error|Exception): .+)$"
        errors = [e for e in re.findall(pattern, text) if "Engine core initialization failed" not in e]
        return _one_line(errors[0].partition(": ")[2]) if errors else ""


def vllm_settings(config: Config, model_dir: str) -> dict[str, Any]:
    """The fields of AsyncEngineArgs for this run; ConfigError if the device cannot serve the model."""
    from transformers import AutoConfig
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    model = AutoConfig.from_pretrained(model_dir)
    engine = config.engine
    completion = engine.longest_completion()
    prompt = max(one.data.max_prompt_tokens for one in config.scored.values())
    length = min(model.max_position_embeddings, prompt + completion)
    transfer = engine.weight_push if engine.direct_push else FILE_TRANSFER
    if current_platform.is_cpu():
        tokens = max(length, engine.slots * (PROMPT_TOKENS + completion))
        device: dict[str, Any] = {
            "enforce_eager": True,
            "block_size": KV_BLOCK,
            # Each chunk of a prompt would consume random numbers: vLLM restores them on GPUs only.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(STEP_TOKENS, length, engine.slots),
            "kv_cache_memory_bytes": _kv_bytes(config, model, tokens),
        }
    else:
        device = {
            "max_num_batched_tokens": max(GPU_STEP_TOKENS, engine.slots),
            "gpu_memory_utilization": engine.memory,
            "enable_sleep_mode": engine.colocate,
            "tensor_parallel_size": engine.tensor_parallel,
        }
    return device | {
        "model": model_dir,
        "dtype": config.model.dtype,
        "max_model_len": length,
        "max_num_seqs": engine.slots,
        "seed": config.seed,
        "skip_tokenizer_init": True,  # token in, token out
        "generation_config": "vllm",  # not the sampling defaults of the model
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "hf_overrides": {"head_dtype": "float32"} if config.model.fp32_head in ("both", "generator") else {},
        "enable_prefix_caching": True,
        "weight_transfer_config": WeightTransferConfig(backend=transfer),
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": False,  # `LocalVLLM.check` reads them
        "enable_return_routed_experts": returns_experts(config, model, current_platform.is_cpu()),
    }


def returns_experts(config: Config, model: Any, cpu: bool) -> bool:
    """True if vLLM is to return the experts of this model (its config); ConfigError if it should and cannot.

    On a CPU it cannot: its second model runner, which records them, needs Triton."""
    from trainer.models.experts import replays_experts  # only now: it imports torch

    setting = config.model.replay_experts
    if cpu and setting:
        why = "vLLM on a CPU returns no experts"
        raise ConfigError(
            f"model.replay_experts cannot be true: {why}; leave it out, or set engine.kind torch"
        )
    return not cpu and replays_experts(setting, model)


def _kv_bytes(config: Config, model: Any, tokens: int) -> int:
    """Bytes of a KV cache for so many tokens; ConfigError if vLLM on a CPU does not take the head size."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    layers, heads, size = kv_shape(model)
    if size not in (supported := CPUAttentionBackend.get_supported_head_sizes()):
        raise ConfigError(
            f"model.path {config.model.path}: its heads have {size} dimensions; vLLM on a CPU expects one of "
            f"{', '.join(map(str, supported))}: set engine.kind torch"
        )
    element = 4 if config.model.dtype == "float32" else 2
    blocks = -(-tokens // KV_BLOCK) + config.engine.slots + 1  # each sequence's last block is partly empty
    return 2 * layers * heads * size * element * blocks * KV_BLOCK


def set_environment(threads: int, folder: Path) -> None:
    """Set the environment variables that vLLM and its processes read; before vLLM is imported. They do not
    remove all of the sockets and files by which they meet, so these are put in `folder`."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if _on_cpu() else "INFO")  # to logs/ENGINE.log
    os.environ |= {
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(folder),
        ENGINE_PID: str(os.getpid()),
    }
    if _on_cpu():
        os.environ |= {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker runs in the engine core's process
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner uses the same cores
            "OMP_NUM_THREADS": str(threads),
            "TMPDIR": str(folder),  # on a GPU compilers may need more room than shared memory has
        }


def _on_cpu() -> bool:
    """True if vLLM will choose its CPU platform: it sees no GPU, or is built for the CPU."""
    try:
        build = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        build = "cpu"  # the CPU build's distribution is named vllm-cpu
    return "cpu" in build or not visible_gpus()


def with_rank_offset(init_info: dict[str, Any], engine: EngineConfig, index: int) -> dict[str, Any]:
    """The `init_info` of NCCL with the rank of this engine's first GPU in the group for weights: the learner
    is 0, engines follow. vLLM's sender assumes that it has one engine."""
    offset = {"rank_offset": 1 + index * engine.tensor_parallel}
    return init_info | offset if "rank_offset" in init_info else init_info


def _one_line(text: str) -> str:
    return " ".join(text.split())[:600]
