"""Estimates a run's memory before anything is loaded (--dry-run), and refuses a model that cannot fit.

Sizes are read from a model's files without torch, so this takes no time.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernels.chunk_size import CUDA_CHUNK_ROWS, cuda_chunk_rows
from trainer.accounting.flops import experts_per_token
from trainer.config import Config, ConfigError, LoraConfig, default_token_budget
from trainer.launcher.placement import Devices, weight_push

GIB = 2**30
LOGITS_CHUNK = 128 << 20  # bytes of one chunk of logits in the loss, on a CPU
TOP_K_LOGITS = 2 * (4 << 25)  # of a teacher, and their log-softmax: `learner.policy_model` has it
CONTEXT = int(1.5 * GIB)  # of CUDA and NCCL, beside what torch allocates
MIN_GPU_PARAMETERS = 2_000_000  # below, the torch engine and the learner mostly launch kernels
SPARE = 0.08  # of a GPU, for what fragments and for longer packs
PINNED = 4 / 3  # torch rounds each pinned block up to a power of two: a third more, on average
PROMPT_TOKENS = 128  # assumed length of a prompt, for the KV cache
ENGINE_WORK = 3.5e9  # bytes of a GPU for vLLM's activations and CUDA graphs, as in its own profiles of an 8 B
MAX_SLOTS = 512  # vLLM captures CUDA graphs of no more sequences
CONFIG_KEYS = {  # in config.json; the second is GPT-2's
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "feed_forward": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that its memory depends on."""

    parameters: int
    layers: int
    hidden: int
    feed_forward: int  # width; of all the experts that a token passes through
    kv_width: int
    vocabulary: int
    tied: bool = True  # the head is the embedding
    positions: int = 0  # of a prompt and its completion together; 0: not known


SIZES = {
    "smollm2-135m": ModelSize(134_515_008, 30, 576, 1536, 192, 49_152, positions=8192),
    "tiny": ModelSize(162_112, 3, 64, 192, 64, 27, positions=256),
    "Qwen/Qwen3-0.6B": ModelSize(596_049_920, 28, 1024, 3072, 1024, 151_936),
    "Qwen/Qwen3-1.7B": ModelSize(1_720_574_976, 28, 2048, 6144, 1024, 151_936),
    "Qwen/Qwen3-4B": ModelSize(4_022_468_096, 36, 2560, 9728, 1024, 151_936),
    "Qwen/Qwen3-8B": ModelSize(8_190_735_360, 36, 4096, 12288, 1024, 151_936, tied=False),
}
SIZES |= {f"{name}-Base": size for name, size in SIZES.items() if "/" in name}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose: of one learner rank, of one engine, and of the host for both."""

    rank: dict[str, int]
    engine: dict[str, int]
    host: dict[str, int]


def size_of(folder: str | Path) -> ModelSize:
    """The size of the model in a folder, from its config and the headers of its weight files."""
    config = json.loads(Path(folder, "config.json").read_text())
    config |= config.get("text_config") or {}
    values = {name: next(filter(None, map(config.get, keys)), 0) for name, keys in CONFIG_KEYS.items()}
    heads = values.pop("heads")
    head = config.get("head_dim") or values["hidden"] // max(1, heads)
    if experts := experts_per_token(config):
        values["feed_forward"] = experts * (config.get("moe_intermediate_size") or values["feed_forward"])
    values["feed_forward"] = values["feed_forward"] or 4 * values["hidden"]
    kv_width = head * (config.get("num_key_value_heads") or heads)
    tied = bool(config.get("tie_word_embeddings", True))
    positions = config.get("max_position_embeddings") or config.get("n_positions") or 0
    parameters = _parameters(Path(folder))
    return ModelSize(parameters=parameters, kv_width=kv_width, tied=tied, positions=positions, **values)


def estimate(config: Config, size: ModelSize, devices: Devices, gpu: float | None = None) -> MemoryEstimate:
    """The memory of one learner rank, of one engine and of the host.

    With `gpu` bytes a GPU the loss takes what it would take there, without them the least that it needs.
    """
    width = dtype_bytes(config)
    weights, ranks = width * size.parameters, len(devices.learner)  # each node holds a replica
    critic = size.parameters if config.objective.critic.body == "own" else 0  # an untied head is not in it
    reference = 0
    if config.objective.needs_reference:  # its embedding and head stay FP32
        model = _teacher(config, size)
        reference = width * model.parameters + (4 - width) * model.vocabulary * model.hidden
    lora, adapters = config.model.lora, adapter_numbers(size, config.model.lora)
    if lora.rank:
        reference *= config.objective.kl.to != "initial"  # which is the base
        learners = 12 * adapters + weights
        trained = {"the frozen base": weights // ranks}
        trained["LoRA's adapters, their gradients and moments"] = 16 * adapters
    else:
        trained = {"weights, gradients and AdamW's moments, FP32": 16 * size.parameters // ranks}
        learners = 12 * size.parameters
    rank = trained | {"the critic's": 16 * critic // ranks, "the frozen reference": reference // ranks}
    files = config.weight_files if weight_push(config, devices) == "file" else 0
    offloaded = learners + 12 * critic + reference + weights * len(devices.engines)
    published = 4 * adapters if lora.rank and not config.engine.urls else weights
    host = {
        "published weights (at most)": published * files,
        "a pinned copy of them, which is written": published if files and devices.gpus else 0,
        "offloaded from the GPUs, pinned": int(PINNED * offloaded) if config.engine.colocate else 0,
    }
    engine = _of_an_engine(config, size, any(devices.engines), width)
    beside = sum(engine.values()) if devices.shared and not config.engine.colocate else 0
    free = gpu and gpu - sum(rank.values()) - beside
    return MemoryEstimate(rank | _at_the_peak(config, size, devices, free or 0), engine, host)


def _teacher(config: Config, size: ModelSize) -> ModelSize:
    """The size of the frozen reference; one that is not on this machine counts as the policy."""
    return known_size(config.objective.kl.to) or size


def adapter_numbers(size: ModelSize, lora: LoraConfig) -> int:
    """Numbers in LoRA's adapters, for layers that are built as Llama's are; queries as wide as the model."""
    h, kv, f = size.hidden, size.kv_width, size.feed_forward
    widths = {"q_proj": 2 * h, "k_proj": h + kv, "v_proj": h + kv, "o_proj": 2 * h}  # in + out
    widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + f)
    return lora.rank * size.layers * sum(widths.get(name, h + f) for name in lora.targets or widths)


def _of_an_engine(config: Config, size: ModelSize, on_gpu: bool, width: int) -> dict[str, int]:
    """Bytes that an engine holds, with `width` bytes a number of its weights."""
    engine, weights, torch = config.engine, width * size.parameters, config.engine.kind != "vllm"
    numbers = 2 * size.layers * size.kv_width * engine.slots * _longest_sequence(config)
    between = int(engine.interruption.enabled)  # what is kept between thinking and answer
    cache = f"KV cache ({PROMPT_TOKENS} + {engine.longest_completion()} tokens)"
    if not torch:
        return {"weights": weights, cache: width * numbers}
    if on_gpu:  # the cache grows to twice its length at most
        grown = (3 + between) * width * numbers
        steps = 12 * size.vocabulary * engine.slots
        return {"weights": weights, f"{cache}, and its old place": grown, "logits, CUDA": steps + CONTEXT}
    fp32_head = config.model.fp32_head in ("both", "generator") and width < 4
    packed = weights * (config.model.dtype != "float16") + 8 * size.vocabulary * size.hidden * fp32_head
    return {"weights": weights, cache: 4 * (1 + between) * numbers, "linear layers again, packed": packed}


def _longest_sequence(config: Config) -> int:
    """Tokens of a prompt and the longest completion."""
    return PROMPT_TOKENS + config.engine.longest_completion()


def _at_the_peak(config: Config, size: ModelSize, devices: Devices, free: float) -> dict[str, int]:
    """Bytes that a learner rank holds beside weights, gradients and moments, when it holds most.

    `free` bytes are left for that (0: not known). That is in the loss, when all layers' activations are
    saved, or at the end of the backward, when the gradients of embedding and head are whole, or before, while
    a teacher scores its top-k. Ranks gather embedding and head, in FP32 unless frozen, and keep them.
    """
    learner, ranks = config.learner, len(devices.learner)
    # A completion is never split: one that is longer than the budget has a micro-batch of its own.
    tokens = max(learner.micro_batch_tokens or default_token_budget(devices.gpus), _longest_sequence(config))
    narrow, head = config.model.dtype != "float32", size.vocabulary * size.hidden
    # Bytes of a token in a layer; in 16 bits norms, RoPE and residual stream are FP32, the rest is not.
    whole = 32 * size.hidden + 8 * size.feed_forward if narrow else 48 * size.hidden + 16 * size.feed_forward
    # Between layers there are two tensors on a GPU (learner/fused_body.py), of 16 bits unless set otherwise.
    between = 8 if devices.gpus and not (narrow and config.model.match_engine is not False) else 4
    saved = size.layers * tokens * (between * size.hidden if learner.checkpoint_activations else whole)
    parts = ranks if learner.vocab_parallel else 1
    activations, logits = "activations of a micro-batch", "logits, and the head's gradients and copies"
    frozen, width = bool(config.model.lora.rank), 2 if narrow and config.model.lora.rank else 4
    top_k = 0 if frozen or not config.objective.kl.top_k else 4 * head  # another FP32 dW
    if not devices.gpus:  # several ranks on a CPU are a test
        chunk = max(LOGITS_CHUNK, 4 * size.vocabulary)
        return {activations: saved, logits: chunk // parts + top_k}
    in_loss = {activations: saved, logits: 0}
    at_end = {"a layer": whole * tokens if learner.checkpoint_activations else saved // size.layers}
    if ranks > 1:
        # A split head is never gathered.
        ends = width * head * (1 if size.tied or learner.vocab_parallel else 2)
        layer = (size.parameters - (1 if size.tied else 2) * head) // size.layers
        in_loss["embedding and head, gathered whole"] = ends
        at_end["embedding and head, gathered whole, and their gradients"] = (1 if frozen else 3) * ends
        of_layers = 2 * width if frozen else 12 if narrow else 16
        at_end["two gathered layers and a layer's gradients"] = of_layers * layer
    if frozen:  # the sum of the widest weight, in FP32 and in the compute type
        adapted = {"a weight with its adapter": (8 + width) * size.hidden * size.feed_forward}
        in_loss, at_end = in_loss | adapted, at_end | adapted
    beside = {"CUDA and NCCL": CONTEXT, "CUDA, of the sleeping engine": CONTEXT * config.engine.colocate}
    copy = 0 if frozen or not narrow else 2 * head
    free -= sum(in_loss.values()) + sum(beside.values()) + copy
    rows = CUDA_CHUNK_ROWS if learner.vocab_parallel else cuda_chunk_rows(free, size.vocabulary, size.hidden)
    # FP32: dW twice, for a loss scale. Else the copy, and dW in both types, or in bf16 alone twice.
    d_weight = 0 if frozen else (4 if narrow and tokens <= rows else 6 if narrow else 8) * head + top_k
    in_loss[logits] = (4 * size.vocabulary * min(rows, tokens) + copy + d_weight) // parts
    peaks = (in_loss, at_end, _of_top_k(config, size, ranks))
    return max(peaks, key=lambda items: sum(items.values())) | beside


def _of_top_k(config: Config, size: ModelSize, ranks: int) -> dict[str, int]:
    """Bytes on a GPU while a teacher scores its top-k: its head, gathered, in 16 bits and again in FP32."""
    kl, model, narrow = config.objective.kl, _teacher(config, size), config.model.dtype != "float32"
    if not kl.top_k:
        return {}
    head, base = model.vocabulary * model.hidden, config.model.lora.rank and kl.to == "initial"
    gathered = (1 if model.tied else 2) * (2 if narrow and base else 4) * (ranks > 1)
    copies = (4 if base else 6) * narrow
    return {"a teacher's head, its copies and its logits": (gathered + copies) * head + TOP_K_LOGITS}


def check_fits(config: Config, size: ModelSize, devices: Devices, gpu: float | None) -> tuple[int, str]:
    """Raise ConfigError, with by how much, if the model cannot fit. `gpu`: bytes of the smallest, if known.

    Returns the bytes that a learner rank needs, and a note if the check is not possible, else an empty text.
    """
    memory = estimate(config, size, devices, gpu)
    rank, engine, host = (sum(items.values()) for items in (memory.rank, memory.engine, memory.host))
    host += 0 if any(devices.engines) else engine * len(devices.engines)
    host += 0 if devices.gpus else rank * len(devices.learner)
    lower = "the longest completion, pipeline.max_lag, engine.slots or engine.count, or the model"
    if not devices.gpus:
        lower += ", or learner.micro_batch_tokens"
    elif config.engine.colocate:
        lower = "the model, or take more GPUs, with engine.colocate false"
    problem = _too_much("on the host", host, _ram(), "this machine", lower)
    if problem := problem or gpu_problem(config, size, devices, gpu):
        raise ConfigError(
            f"model.path {config.model.path}: {size.parameters / 1e9:.3g} G parameters, {problem}"
        )
    unknown = "the driver does not tell the GPUs' memory, so whether the model fits is not checked"
    return rank, unknown if devices.gpus and gpu is None else ""


def gpu_problem(config: Config, size: ModelSize, devices: Devices, gpu: float | None) -> str:
    """The part of the run that does not fit its GPUs, by how much, and what to lower; empty if all fits."""
    if gpu is None or not devices.gpus:
        return ""
    memory, engine = estimate(config, size, devices), config.engine
    rank, beside = sum(memory.rank.values()), sum(memory.engine.values())
    place, room = f"a GPU, with {SPARE:.0%} to spare,", (1 - SPARE) * gpu
    problem = ""
    if any(devices.engines) and engine.kind != "vllm":
        lower = "engine.slots or learner.micro_batch_tokens, or set engine.tensor_parallel 0: on the CPU"
        item, needed = (
            ("a learner rank and the engine beside it", rank) if devices.shared else ("an engine", 0)
        )
        problem = _too_much(item, needed + beside, room, place, lower)
    elif any(devices.engines):
        lower = "the model, or give engine.tensor_parallel more GPUs"
        longest = 2 * size.layers * size.kv_width * _longest_sequence(config) * dtype_bytes(config)
        share = "engine.memory of a GPU"
        weights = memory.engine["weights"] // engine.tensor_parallel
        problem = _too_much("an engine's share of the weights", weights, engine.memory * gpu, share, lower)
        least = (memory.engine["weights"] + longest) // engine.tensor_parallel + int(ENGINE_WORK)
        item = "an engine with its work space and one longest completion"
        problem = problem or _too_much(item, least, engine.memory * gpu, share, lower)
    lower = (
        "learner.micro_batch_tokens and the longest completion, set checkpoint_activations, or give "
        "learner.ranks more GPUs"
    )
    return problem or _too_much("a learner rank", rank, room, place, lower)


def _too_much(item: str, needed: float, available: float, place: str, lower: str) -> str:
    """The shortage in words; empty if there is none."""
    if needed <= available:
        return ""
    return (
        f"{item}: about {needed / GIB:.1f} GiB are needed and {place} has {available / GIB:.1f}, "
        f"{(needed - available) / GIB:.1f} too few; lower {lower}"
    )


def dtype_bytes(config: Config) -> int:
    """Bytes of a number in model.dtype."""
    return 4 if config.model.dtype == "float32" else 2


def stays_on_cpu(config: Config) -> bool:
    """True if a model is too small for a GPU to be of use. With learner.ranks given it gets one."""
    size = known_size(config.model.path)
    small = size is not None and size.parameters < MIN_GPU_PARAMETERS
    return small and config.engine.kind != "vllm" and not config.learner.ranks


def with_slots(config: Config, size: ModelSize | None, devices: Devices, gpu: float | None) -> Config:
    """engine.slots, where it was not set, by the room for keys and values on the GPUs of one vLLM engine.

    If lengths are spread evenly up to the longest, a sequence that runs has a third of it on average; if most
    reach the longest, as with interruption, half. While more have come far, vLLM preempts some.
    """
    engine = config.engine
    if engine.kind != "vllm" or size is None or gpu is None or not devices.gpus or devices.remote:
        return config
    share = 2 if engine.interruption.enabled else 3
    room = kv_tokens(config, size, gpu) / (PROMPT_TOKENS + engine.longest_completion() / share)
    slots = min(MAX_SLOTS, max(8, int(room) // 8 * 8))
    return replace(config, engine=replace(engine, slots=slots))


def kv_tokens(config: Config, size: ModelSize, gpu: float) -> int:
    """Number of tokens whose keys and values one vLLM engine holds, on GPUs of `gpu` bytes."""
    width, engine = dtype_bytes(config), config.engine
    room = engine.tensor_parallel * (engine.memory * gpu - ENGINE_WORK) - width * size.parameters
    return max(0, int(room / (2 * size.layers * size.kv_width * width)))


def rank_bytes(config: Config, size: ModelSize, devices: Devices, gpu: float | None = None) -> int:
    """Bytes that a learner rank holds at most."""
    return sum(estimate(config, size, devices, gpu).rank.values())


def known_size(path: str) -> ModelSize | None:
    """The size of a built-in model or a preset's, or of one on this machine."""
    if path in SIZES:
        return SIZES[path]
    return size_of(path) if Path(path, "config.json").is_file() else None


def describe(config: Config, devices: Devices, size: ModelSize | None, gpu: float | None) -> str:
    """Device split and memory estimate, as --dry-run prints them."""
    workers = sum(config.scored[name].verifier.workers for name in set(config.scorers.values()))
    others = f"{workers} verifier worker{'s' * (workers != 1)}; new weights by {weight_push(config, devices)}"
    split = f"devices: {devices.describe()}; {others}"
    if size is None:
        unknown = f"{config.model.path} is not on this machine yet, so its size is not known"
        return f"{split}\nmemory: {unknown}" + ", and the split is the usual one" * devices.gpus
    memory = estimate(config, size, devices, gpu)
    lines, total = [f"memory, for {size.parameters / 1e6:.4g} M parameters:"], 0
    counts = {"learner rank": len(devices.learner), "engine": len(devices.engines), "host": 1}
    for (owner, count), items in zip(counts.items(), (memory.rank, memory.engine, memory.host), strict=True):
        prefix = f"each {owner}: " if count > 1 else f"{owner}: "
        lines += [f"  {prefix + name:<58}{b / GIB:8.2f} GiB" for name, b in items.items() if b and count]
        total += count * sum(items.values())
    lines.append(f"  {'together, at most':<58}{total / GIB:8.2f} GiB")
    lines.append(f"  {'memory of this machine, without GPUs':<58}{_ram() / GIB:8.2f} GiB")
    return "\n".join([split, *lines])


def _parameters(folder: Path) -> int:
    """Parameters in a folder's safetensors files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total


def _ram() -> float:
    """Bytes of memory this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
