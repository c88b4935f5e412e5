"""Estimates a run's memory before anything is loaded (--dry-run), and refuses a model that cannot fit.

Sizes are read from a model's files without torch, so this takes no time.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config import Config, ConfigError, default_token_budget
from trainer.gpus import smallest_gpu_memory
from trainer.launcher.placement import Devices, weight_push

GIB = 2**30
LOGITS_CHUNK = 128 << 20  # bytes of one chunk of logits in the loss, on a CPU
CUDA_CHUNK_ROWS = 8192  # of logits, on a GPU: `kernels.op` has it
CONTEXT = int(1.5 * GIB)  # of CUDA and NCCL, beside what torch allocates
MIN_GPU_PARAMETERS = 2_000_000  # below, the torch engine and the learner mostly launch kernels
SPARE = 0.08  # of a GPU, for what fragments and for longer packs
PINNED = 4 / 3  # torch rounds each pinned block up to a power of two: a third more, on average
PROMPT_TOKENS = 128  # assumed length of a prompt, for the KV cache
ENGINE_WORK = 3.5e9  # bytes of a GPU for vLLM's activations and CUDA graphs, as in its own profiles of an 8 B
MOST_SLOTS = 512  # vLLM captures CUDA graphs of no more sequences
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
    feed_forward: int  # width; in a mixture of experts, of all experts that one token passes through
    kv_width: int
    vocabulary: int
    tied: bool = True  # the head is the embedding


SIZES = {
    "smollm2-135m": ModelSize(134_515_008, 30, 576, 1536, 192, 49_152),
    "tiny": ModelSize(162_112, 3, 64, 192, 64, 27),
    "Qwen/Qwen3-8B-Base": ModelSize(8_190_735_360, 36, 4096, 12288, 1024, 151_936, tied=False),
}


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
    if experts := config.get("num_experts_per_tok"):
        values["feed_forward"] = experts * (config.get("moe_intermediate_size") or values["feed_forward"])
    values["feed_forward"] = values["feed_forward"] or 4 * values["hidden"]
    kv_width = head * (config.get("num_key_value_heads") or heads)
    tied = bool(config.get("tie_word_embeddings", True))
    return ModelSize(parameters=_parameters(Path(folder)), kv_width=kv_width, tied=tied, **values)


def estimate(config: Config, size: ModelSize, devices: Devices) -> MemoryEstimate:
    """The memory of one learner rank, of one engine and of the host."""
    width = 4 if config.model.dtype == "float32" else 2
    engine = config.engine
    tokens = PROMPT_TOKENS + engine.longest_completion()
    shard = size.parameters // len(devices.learner)  # each node holds a replica
    rank = {
        "weights, FP32": 4 * shard,
        "gradients, FP32": 4 * shard,
        "AdamW's two moments, FP32": 8 * shard,
    }
    rank |= _at_the_peak(config, size, devices)
    reference = 0
    if config.objective.kl.coefficient:  # its embedding and head stay FP32
        reference = width * size.parameters + (4 - width) * size.vocabulary * size.hidden
        rank["the frozen reference"] = reference // len(devices.learner)
    critic = size.parameters if config.objective.critic.body == "own" else 0  # an untied head is not in it
    if critic:
        rank["the critic's weights, gradients and moments, FP32"] = 16 * (critic // len(devices.learner))
    engine_bytes = _of_an_engine(config, size, devices, tokens, width)
    files = config.weight_files if weight_push(config, devices) == "file" else 0
    host = {"published weights (at most)": width * size.parameters * files}
    if files and devices.gpus:
        host["a pinned copy of them, which is written"] = width * size.parameters
    if engine.colocate:
        offloaded = 12 * (size.parameters + critic) + reference
        offloaded += width * size.parameters * len(devices.engines)
        host["weights and moments offloaded from the GPUs, pinned"] = int(PINNED * offloaded)
    return MemoryEstimate(rank, engine_bytes, host)


def _of_an_engine(
    config: Config, size: ModelSize, devices: Devices, tokens: int, width: int
) -> dict[str, int]:
    """What an engine holds for sequences of so many tokens, with `width` bytes a number."""
    engine, on_gpu = config.engine, any(devices.engines)
    torch, kept = engine.kind != "vllm", int(engine.interruption.enabled)
    numbers = 2 * size.layers * size.kv_width * engine.slots * tokens
    cache = f"KV cache (prompts of {PROMPT_TOKENS} tokens)"
    if torch and on_gpu:
        return {
            "weights": width * size.parameters,
            # To twice its length at most; and what is kept between thinking and answer.
            f"{cache}, and its old place while it grows": (3 + kept) * width * numbers,
            "logits of a step, and their probabilities": 12 * size.vocabulary * engine.slots,
            "CUDA": CONTEXT,
        }
    held = {"weights": width * size.parameters, cache: (4 * (1 + kept) if torch else width) * numbers}
    if torch:
        fp32_head = config.model.fp32_head in ("both", "generator") and width < 4
        packed = 0 if config.model.dtype == "float16" else width * size.parameters
        head = 8 * size.vocabulary * size.hidden * fp32_head
        held["linear layers again, packed"] = packed + head
    return held


def _at_the_peak(config: Config, size: ModelSize, devices: Devices) -> dict[str, int]:
    """What a learner rank holds beside weights, gradients and moments, when it holds most.

    That is in the loss, when all layers' activations are saved, or at the end of the backward, when the
    gradients of embedding and head are whole. Ranks gather these two in FP32 and keep them for the step.
    """
    learner, ranks = config.learner, len(devices.learner)
    ends = 1 if size.tied or learner.vocab_parallel else 2  # a head split over the ranks is never gathered
    tokens = learner.micro_batch_tokens or default_token_budget(devices.gpus)
    narrow = config.model.dtype != "float32"
    # Bytes of a token in a layer; in 16 bits norms, RoPE and residual stream are FP32, the rest is not.
    whole = 32 * size.hidden + 8 * size.feed_forward if narrow else 48 * size.hidden + 16 * size.feed_forward
    checkpointed = learner.checkpoint_activations
    # Between layers there are two tensors on a GPU (learner/fused_body.py), of 16 bits unless set otherwise.
    between = 8 if devices.gpus and not (narrow and config.model.match_engine is not False) else 4
    activations = size.layers * tokens * (between * size.hidden if checkpointed else whole)
    head = size.vocabulary * size.hidden
    rows = min(CUDA_CHUNK_ROWS, tokens)
    parts = ranks if learner.vocab_parallel else 1
    chunk = 4 * size.vocabulary * rows if devices.gpus else max(LOGITS_CHUNK, 4 * size.vocabulary)
    logits, copies = "a chunk of logits", "the head's gradients, and its 16-bit copy"
    in_loss = {"activations of a micro-batch": activations, logits: chunk // parts}
    if not devices.gpus:  # several ranks on a CPU are a test
        return in_loss
    # FP32: dW twice, as it is scaled. Else 2 for the copy, and dW in both types, or in bf16 alone twice.
    in_loss[copies] = (8 if not narrow or tokens > rows else 6) * head // parts
    at_end = {"a recomputed layer": whole * tokens if checkpointed else activations // size.layers}
    if ranks > 1:
        layer = (size.parameters - (1 if size.tied else 2) * head) // size.layers
        gathered = "embedding and head, gathered whole in FP32"
        in_loss[gathered] = at_end[gathered] = 4 * ends * head
        at_end["their gradients, and those to be scattered, FP32"] = 8 * ends * head
        at_end["two gathered layers and a layer's gradients"] = (4 if narrow else 8) * layer + 8 * layer
    context = {"CUDA and NCCL": CONTEXT}
    return max(in_loss, at_end, key=lambda held: sum(held.values())) | context


def check_fits(config: Config, model_dir: str, devices: Devices) -> tuple[int, str]:
    """Raise ConfigError, with by how much, if the model cannot fit.

    Returns the bytes that a learner rank needs, and a note if the check is not possible, else an empty text.
    """
    size = size_of(model_dir)
    memory = estimate(config, size, devices)
    rank, engine = sum(memory.rank.values()), sum(memory.engine.values())
    model = f"model.path {config.model.path}: {size.parameters / 1e9:.3g} G parameters"
    if not devices.gpus:
        total = rank * len(devices.learner) + engine * len(devices.engines) + sum(memory.host.values())
        lower = "pipeline.max_lag, learner.micro_batch_tokens or engine.slots"
        _check(model, total, _ram(), "this machine", lower)
        return rank, ""
    gpu = smallest_gpu_memory()
    lower = "the model, or leave out engine.colocate"
    host = sum(memory.host.values())
    if any(devices.engines):
        _check(f"{model}, what leaves the GPUs in turns", host, _ram(), "this machine", lower)
    else:
        held = host + engine * len(devices.engines)
        _check(f"{model}, engines on the CPU", held, _ram(), "this machine", "engine.slots or engine.count")
    if gpu is None:
        return rank, "the driver does not tell the GPUs' memory, so whether the model fits is not checked"
    place = f"a GPU, with {SPARE:.0%} to spare,"
    if any(devices.engines) and config.engine.kind != "vllm":
        beside = devices.shared
        lower = "engine.slots or learner.micro_batch_tokens, or set engine.tensor_parallel 0: on the CPU"
        roles = "a learner rank and the engine beside it" if beside else "an engine"
        _check(f"{model}, {roles}", engine + (rank if beside else 0), (1 - SPARE) * gpu, place, lower)
    elif any(devices.engines):
        weights = memory.engine["weights"] // config.engine.tensor_parallel
        lower = "the model, or give engine.tensor_parallel more GPUs"
        share = config.engine.memory * gpu
        _check(f"{model}, an engine's share of the weights", weights, share, "engine.memory of a GPU", lower)
    lower = "learner.micro_batch_tokens, set checkpoint_activations, or give learner.ranks more GPUs"
    _check(f"{model}, a learner rank", rank, (1 - SPARE) * gpu, place, lower)
    return rank, ""


def with_room(
    config: Config, size: ModelSize, gpu: float | None, devices_of: Callable[[int], Devices]
) -> Devices:
    """The split with the fewest learner ranks, from the usual share on, that the memory of a GPU holds.

    `devices_of` assigns the GPUs for a number of ranks, 0 for the usual share; ConfigError: too many. The
    usual share where nothing is to be chosen, or where no number of ranks is enough: `check_fits` refuses.
    """
    usual = devices_of(0)
    chosen = config.learner.ranks or usual.world or usual.remote or config.engine.colocate
    if chosen or not usual.gpus or gpu is None:
        return usual
    for ranks in range(len(usual.learner), sum(map(len, usual.engines)) + len(usual.learner)):
        try:
            devices = devices_of(ranks)
        except ConfigError:
            break
        if rank_bytes(config, size, devices) <= (1 - SPARE) * gpu:
            fewer, needed = len(usual.learner), rank_bytes(config, size, usual) / GIB
            why = f"of {fewer}, each would need {needed:.1f} GiB; a GPU has {gpu / GIB:.1f}, and {SPARE:.0%} "
            why += "stay free"
            return replace(devices, why=why) if ranks > fewer else devices
    return usual


def stays_on_cpu(config: Config) -> bool:
    """Whether a model is too small for a GPU to be of use. With learner.ranks given it gets one."""
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
    slots = min(MOST_SLOTS, max(8, int(room) // 8 * 8))
    return replace(config, engine=replace(engine, slots=slots))


def kv_tokens(config: Config, size: ModelSize, gpu: float) -> int:
    """How many tokens' keys and values one vLLM engine holds on GPUs with so many bytes."""
    width, engine = 4 if config.model.dtype == "float32" else 2, config.engine
    room = engine.tensor_parallel * (engine.memory * gpu - ENGINE_WORK) - width * size.parameters
    return max(0, int(room / (2 * size.layers * size.kv_width * width)))


def rank_bytes(config: Config, size: ModelSize, devices: Devices) -> int:
    """What a learner rank holds at most."""
    return sum(estimate(config, size, devices).rank.values())


def known_size(path: str) -> ModelSize | None:
    """The size of a built-in model or a preset's, or of one on this machine."""
    if path in SIZES:
        return SIZES[path]
    return size_of(path) if Path(path, "config.json").is_file() else None


def describe(config: Config, devices: Devices, size: ModelSize | None) -> str:
    """Device split and memory estimate, as --dry-run prints them."""
    workers = sum(task.verifier.workers for task in config.tasks.values())
    others = f"{workers} verifier workers; new weights by {weight_push(config, devices)}"
    split = f"devices: {devices.describe()}; {others}"
    if size is None:
        return f"{split}\nmemory: {config.model.path} is not on this machine yet, so its size is not known"
    memory = estimate(config, size, devices)
    lines, total = [f"memory, for {size.parameters / 1e6:.4g} M parameters:"], 0
    for owner, count, sizes in (
        ("learner rank", len(devices.learner), memory.rank),
        ("engine", len(devices.engines), memory.engine),
        ("host", 1, memory.host),
    ):
        prefix = f"each {owner}: " if count > 1 else f"{owner}: "
        lines += [f"  {prefix + name:<48}{b / GIB:8.2f} GiB" for name, b in sizes.items() if count]
        total += count * sum(sizes.values())
    return "\n".join([split, *lines, f"  {'together, at most':<48}{total / GIB:8.2f} GiB"])


def _parameters(folder: Path) -> int:
    """Parameters in a folder's safetensors files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total


def _check(item: str, needed: float, available: float, place: str, lower: str) -> None:
    if needed > available:
        raise ConfigError(
            f"{item}: about {needed / GIB:.1f} GiB are needed and {place} has {available / GIB:.1f}, "
            f"{(needed - available) / GIB:.1f} too few; lower {lower}"
        )


def _ram() -> float:
    """Bytes of memory this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
