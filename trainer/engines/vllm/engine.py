"""vLLM behind our messages: every call of its API stands here (and in vllm_worker.py, inside its worker).

Weights come as safetensors files on this host, or from the learner's GPUs by vLLM's own transfer. New
ones are loaded between two tokens: running sequences keep their KV, and the prefix cache is salted by
version, so no new one reads old keys. Where the learner has the same GPUs (engine.colocate), vLLM sleeps
in between: sequences stay, their KV does not, and is made again by the new weights.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import Config, ConfigError, EngineConfig
from trainer.engines.vllm.process import Sample, run
from trainer.gpus import visible_gpus
from trainer.roles import role_index
from trainer.types import Completion, FinishReason, Request

VERSION = "0.32.0"
BACKEND = "safetensors"  # the name of our weight transfer in vLLM's registry
EXTENSION = "trainer.engines.vllm.worker.Extension"
OWNER = "SIGMOID_RL_ENGINE_PID"  # environment variable: the process that has started vLLM
BLOCK = 32  # tokens of a KV block on a CPU, the least its kernels take: only whole blocks are shared
STEP_TOKENS = (
    2048  # tokens of one step on a CPU, beyond a token of every sequence: bounds the wait for a swap
)
PROMPT_TOKENS = 128  # assumed of a prompt, for the CPU's KV cache; where they are longer, fewer run at once


def engine_main(
    config: Config, model_dir: str, conn: Connection, threads: int, role: str, telemetry: Connection
) -> None:
    """Entry of the spawned process; returns on Shutdown or when the controller is gone.

    `role` ("engine", "engine-1", ...) is its name in the books and of its log.
    """

    async def start() -> tuple[VLLM, dict[str, Any]]:
        check_installed()
        if config.engine.colocate:  # vLLM measures the GPU's memory: the learner must have left it
            conn.recv()
        log = Path(config.run_dir) / "logs" / f"{role}.log"
        backend = VLLM(config, model_dir, threads, log, role_index(role))
        await backend.label(0)
        return backend, {"kind": "vllm", "dtype": config.model.dtype, "threads": threads}

    run(role, conn, telemetry, config.engine.slots, start)


def check_installed() -> None:
    """ConfigError unless the vLLM that this module was written for is installed."""
    how = f"run `make setup-vllm` (CPU) or `pip install vllm=={VERSION}` (GPU), or set engine.kind torch"
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"engine.kind vllm: vLLM is not installed; {how}")
    from vllm.version import __version__

    if not __version__.startswith(VERSION):
        raise ConfigError(f"engine.kind vllm: vLLM {__version__} is installed, expected {VERSION}; {how}")


class VLLM:
    """One AsyncLLM and its child processes; see vllm_serve.Backend."""

    def __init__(self, config: Config, model_dir: str, threads: int, log: Path, number: int = 0) -> None:
        self._engine, self._first_rank = config.engine, first_rank(config.engine, number)
        self._log = log
        self._log_from = log.stat().st_size if log.is_file() else 0
        environment(threads)
        if config.engine.weight_push == "ipc":  # handles come pickled, from our learner over our pipes
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            arguments = AsyncEngineArgs(**vllm_settings(config, model_dir))
            self.limit: int = arguments.max_model_len
            self._llm: Any = AsyncLLM.from_engine_args(arguments)
        except ConfigError:
            raise
        except Exception as e:
            cause = self._last_words() or _one_line(str(e) or repr(e))
            advice = (
                "; lower engine.slots, engine.max_new_tokens or data.max_prompt_tokens (on a GPU: or raise "
                "engine.memory or engine.tensor_parallel)"
            )
            raise ConfigError(f"vLLM did not start: {cause}{advice * ('memory' in cause.lower())}") from e

    async def sample(self, request: Request, index: int, version: int) -> Completion:
        """See Backend."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        sampling = SamplingParams(**parameters(request, index), output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": f"v{version}"}
        try:
            async for output in self._llm.generate(prompt, sampling, name((request.request_id, index))):
                last = output.outputs[0]
        except EngineDeadError as e:
            raise RuntimeError(self._death()) from e
        return _completion(request, index, last)

    async def abort(self, samples: Iterable[Sample]) -> None:
        """See Backend."""
        await self._llm.abort([name(s) for s in samples])

    async def pause(self) -> None:
        """See Backend."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """See Backend."""
        await self._llm.resume_generation()

    async def sleep(self) -> None:
        """See Backend. Level 1 keeps the weights in the host's memory; `keep` preempts what runs, and vLLM
        computes its KV again once it is awake."""
        if self._engine.colocate:
            await self._llm.sleep(level=1, mode="keep")
        else:
            await self.pause()

    async def wake(self) -> None:
        """See Backend."""
        if self._engine.colocate:
            await self._llm.wake_up()  # what still sleeps; then it generates again
        else:
            await self.resume()

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """See Backend."""
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        try:
            if call == "init_weight_transfer_engine":
                own = ranked(info, self._first_rank)
                await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=own))
            elif call == "start_weight_update":
                if self._engine.colocate:  # the KV cache sleeps on: the learner's weights are there as well
                    await self._llm.wake_up(tags=["weights"])
                await self._llm.start_weight_update()
            elif call == "update_weights":
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            else:
                await self._llm.finish_weight_update()
        except Exception as e:
            cause = self._last_words() or _one_line(str(e) or repr(e))
            raise RuntimeError(
                f"weight push by {self._engine.weight_push} failed at {call}: {cause}; engine.weight_push "
                "file goes through shared memory instead"
            ) from e

    async def load(self, version: int, path: str) -> None:
        """See Backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if path:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": path}))
            await self._llm.finish_weight_update()
        await self.label(version)

    async def label(self, version: int) -> None:
        """Tokens from now on are of this version."""
        await self._llm.update_weight_version(str(version))

    async def check(self) -> None:
        """See Backend."""
        if self._llm.errored:
            raise RuntimeError(self._death())

    async def close(self) -> None:
        """See Backend."""
        self._llm.shutdown(timeout=5)

    def _death(self) -> str:
        return f"vLLM's engine core has died: {self._last_words() or 'it said nothing; was it killed?'}"

    def _last_words(self) -> str:
        """The cause that vLLM's processes wrote to our log: the first error of the last traceback."""
        if not self._log.is_file():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_from)
            text = file.read().decode(errors="replace")
        errors = re.findall(
            r"(?m)^(?:\(.*?\) )?(?:ERROR [^]]*\] )?(?:[\w.]*)((?:Error|Exception): .+)$", text
        )
        causes = [e for e in errors if "Engine core initialization failed" not in e]
        return _one_line(causes[0].partition(": ")[2]) if causes else ""


def vllm_settings(config: Config, model_dir: str) -> dict[str, Any]:
    """The fields of AsyncEngineArgs for this run; ConfigError where the device cannot serve the model."""
    from transformers import AutoConfig
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    model = AutoConfig.from_pretrained(model_dir)
    engine = config.engine
    new = engine.longest_completion()
    length = min(model.max_position_embeddings, config.data.max_prompt_tokens + new)
    device: dict[str, Any]
    if current_platform.is_cpu():
        device = {
            "enforce_eager": True,
            "block_size": BLOCK,
            # A prompt in parts would draw random numbers for each: vLLM takes them back on GPUs alone.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(STEP_TOKENS, length, engine.slots),
            "kv_cache_memory_bytes": _kv_bytes(
                config, model, max(length, engine.slots * (PROMPT_TOKENS + new))
            ),
        }
    else:
        device = {
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
        "generation_config": "vllm",  # no sampling defaults of the model's
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "hf_overrides": {"head_dtype": "float32"} if config.model.fp32_head else {},
        "enable_prefix_caching": True,
        "weight_transfer_config": WeightTransferConfig(
            backend=engine.weight_push if engine.direct_push else BACKEND
        ),
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
    }


def _kv_bytes(config: Config, model: Any, tokens: int) -> int:
    """Room for so many tokens; ConfigError where vLLM's CPU attention does not know the head's size."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    heads = model.num_attention_heads
    size = getattr(model, "head_dim", None) or model.hidden_size // heads
    if size not in (known := CPUAttentionBackend.get_supported_head_sizes()):
        raise ConfigError(
            f"model.path {config.model.path}: its heads have {size} dimensions; vLLM on a CPU expects one of "
            f"{', '.join(map(str, known))}: set engine.kind torch"
        )
    width = size * (getattr(model, "num_key_value_heads", None) or heads)
    bytes_ = 4 if config.model.dtype == "float32" else 2
    blocks = -(-tokens // BLOCK) + config.engine.slots + 1  # each sequence's last block is not full
    return int(2 * model.num_hidden_layers * width * bytes_ * blocks * BLOCK)


def environment(threads: int) -> None:
    """What vLLM reads from the environment; before it is imported, and inherited by its processes."""
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {k: v for k, v in defaults.items() if k not in os.environ} | {
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "VLLM_NO_USAGE_STATS": "1",
        OWNER: str(os.getpid()),
    }
    if _on_cpu():
        os.environ |= {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine core's process
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner has the same cores
            "OMP_NUM_THREADS": str(threads),
        }


def _on_cpu() -> bool:
    """Whether vLLM will choose its CPU platform: it sees no GPU, or is the build for the CPU."""
    try:
        build = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        build = "cpu"  # that package is vllm-cpu
    return "cpu" in build or not visible_gpus()


def first_rank(engine: EngineConfig, number: int) -> int:
    """Of this engine's GPUs in the group that NCCL sends weights over: the learner is 0, engines follow."""
    return 1 + number * engine.tensor_parallel


def ranked(info: dict[str, Any], first: int) -> dict[str, Any]:
    """What begins a transfer, with this engine's own place: vLLM's sender takes all engines for one."""
    return info | {"rank_offset": first} if "rank_offset" in info else info


def parameters(request: Request, index: int) -> dict[str, Any]:
    """vLLM's sampling parameters of one sample."""
    key = np.random.SeedSequence([request.seed, index]).generate_state(1, np.uint64)[0]
    return {
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        "seed": int(key >> np.uint64(1)),  # signed there
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,  # stop_ids is the whole set
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def name(sample: Sample) -> str:
    """What vLLM calls a sample."""
    return f"{sample[0]}/{sample[1]}"


def _completion(request: Request, index: int, output: Any) -> Completion:
    """vLLM's output as ours; its spans of versions cover the tokens."""
    ids = np.asarray(output.token_ids, np.int32)
    flat = output.logprobs
    logprobs = np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices, np.int64)]
    versions = np.zeros(len(ids), np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if output.finish_reason not in reasons or len(logprobs) != len(ids):
        raise RuntimeError(
            f"vLLM ended {request.request_id} with {output.finish_reason!r}, {len(ids)} tokens and "
            f"{len(logprobs)} log-probs; expected {', '.join(reasons)} and one log-prob a token"
        )
    return Completion(request.request_id, index, ids, logprobs, versions, reasons[output.finish_reason])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:600]
