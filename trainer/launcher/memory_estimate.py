"""What a run will hold in memory, estimated before anything is loaded (--dry-run), and whether it fits.

Sizes are read from a model's files, without torch: `--dry-run` and the check at the start take no time.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Config, ConfigError
from trainer.gpus import smallest_gpu_memory
from trainer.launcher.placement import Devices, weight_push
from trainer.models.resolve import BUILT_IN

GIB = 2**30
LOGITS_CHUNK = 128 << 20  # bytes of one chunk of logits in the loss
PROMPT_TOKENS = 128  # assumed of a prompt, for the KV cache
NAMES = {  # of config.json, and as GPT-2 has them
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "feed_forward": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True, slots=True)
class Size:
    """A model, as far as memory is concerned."""

    parameters: int
    layers: int
    hidden: int
    feed_forward: int  # numbers a token takes there; of a mixture, those of the experts that see it
    kv_width: int
    vocabulary: int


SIZES = {
    "smollm2-135m": Size(134_515_008, 30, 576, 1536, 192, 49_152),
    "tiny": Size(162_112, 3, 64, 192, 64, 27),
}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by what they hold: of one learner rank, of one engine, and beside them."""

    rank: dict[str, int]
    engine: dict[str, int]
    beside: dict[str, int]


def size_of(folder: str | Path) -> Size:
    """The size of the model in a folder, from its config and the headers of its weight files."""
    config = json.loads(Path(folder, "config.json").read_text())
    config |= config.get("text_config") or {}
    values = {name: next((config[key] for key in keys if config.get(key)), 0) for name, keys in NAMES.items()}
    heads = values.pop("heads")
    head = config.get("head_dim") or values["hidden"] // max(1, heads)
    if experts := config.get("num_experts_per_tok"):
        values["feed_forward"] = experts * (config.get("moe_intermediate_size") or values["feed_forward"])
    values["feed_forward"] = values["feed_forward"] or 4 * values["hidden"]
    kv_width = head * (config.get("num_key_value_heads") or heads)
    return Size(parameters=_parameters(Path(folder)), kv_width=kv_width, **values)


def need(config: Config, size: Size, devices: Devices) -> Need:
    """What one rank, one engine and the rest will hold."""
    width = 2 if config.model.dtype == "bfloat16" else 4
    engine, learner, ranks = config.engine, config.learner, len(devices.learner)  # nodes hold copies
    tokens = PROMPT_TOKENS + engine.longest_completion()
    saved = size.hidden if learner.checkpoint_activations else 12 * size.hidden + 4 * size.feed_forward
    own = size.parameters // ranks
    rank = {
        "weights, FP32": 4 * own,
        "gradients, FP32": 4 * own,
        "AdamW's two moments, FP32": 8 * own,
        "activations of a micro-batch": 4 * size.layers * saved * learner.micro_batch_tokens,
        "a chunk of logits": max(LOGITS_CHUNK, 4 * size.vocabulary),
    }
    parts = {
        "weights": width * size.parameters,
        f"KV cache (prompts of {PROMPT_TOKENS} tokens)": (
            2 * size.layers * size.kv_width * width * engine.slots * tokens
        ),
    }
    if engine.kind == "torch":
        head = 8 * size.vocabulary * size.hidden * config.model.fp32_head  # FP32 head alone
        parts["linear layers again, packed"] = 4 * size.parameters if width == 4 else head
    files = config.pipeline.max_lag + 3 if weight_push(config, devices) == "file" else 0
    beside = {"published weights (at most)": width * size.parameters * files}
    if engine.colocate:
        asleep = 12 * size.parameters + width * size.parameters * len(devices.engines)
        beside["what is asleep, in the host's memory"] = asleep
    return Need(rank, parts, beside)


def check_fits(config: Config, model_dir: str, devices: Devices) -> str:
    """ConfigError, with by how much, if the model cannot fit: before any of it is loaded.

    Where that cannot be told, the reason in a line; otherwise an empty text.
    """
    size = size_of(model_dir)
    n = need(config, size, devices)
    rank, engine = sum(n.rank.values()), sum(n.engine.values())
    what = f"model.path {config.model.path}: {size.parameters / 1e9:.3g} G parameters"
    if not devices.gpus:
        all_ = rank * len(devices.learner) + engine * len(devices.engines) + sum(n.beside.values())
        _fits(
            what, all_, _ram(), "this machine", "pipeline.max_lag, learner.micro_batch_tokens or engine.slots"
        )
        return ""
    memory = smallest_gpu_memory()
    if memory is None:
        return "nvidia-smi does not tell the GPUs' memory: whether the model fits is not checked"
    share = config.engine.memory * memory
    weights = n.engine["weights"] // config.engine.tensor_parallel
    if devices.engines:
        lower = "the model, or give engine.tensor_parallel more GPUs"
        _fits(f"{what}, an engine's share of the weights", weights, share, "engine.memory of a GPU", lower)
    lower = "learner.micro_batch_tokens, set checkpoint_activations, or give learner.ranks more GPUs"
    _fits(f"{what}, a learner rank", rank, memory, "a GPU", lower)
    return ""


def known_size(path: str) -> Size | None:
    """The size of a built-in model, or of one on this machine."""
    if path in BUILT_IN:
        return SIZES[path]
    return size_of(path) if Path(path, "config.json").is_file() else None


def describe(config: Config, devices: Devices, size: Size | None) -> str:
    """Device split and memory estimate, for a person."""
    split = (
        f"devices: {devices.describe()}; {config.verifier.workers} verifier workers; new weights by "
        f"{weight_push(config, devices)}"
    )
    if size is None:
        return f"{split}\nmemory: {config.model.path} is not on this machine yet, so its size is not known"
    n = need(config, size, devices)
    sides = (("learner rank", len(devices.learner), n.rank), ("engine", len(devices.engines), n.engine))
    lines, total = [f"memory, for {size.parameters / 1e6:.4g} M parameters:"], 0
    for who, count, parts in (*sides, ("", 1, n.beside)):
        each = f"each {who}: " if count > 1 else f"{who}: " if who else ""
        lines += [f"  {each + name:<48}{b / GIB:8.2f} GiB" for name, b in parts.items() if count]
        total += count * sum(parts.values())
    return "\n".join([split, *lines, f"  {'together, at most':<48}{total / GIB:8.2f} GiB"])


def _parameters(folder: Path) -> int:
    """Numbers in a folder's safetensors files; of older formats, half their bytes (taken for 16 bits)."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total or sum(path.stat().st_size for path in folder.glob("pytorch_model*.bin")) // 2


def _fits(what: str, needed: float, there: float, where: str, lower: str) -> None:
    if needed > there:
        raise ConfigError(
            f"{what}: about {needed / GIB:.1f} GiB are needed and {where} has {there / GIB:.1f}, "
            f"{(needed - there) / GIB:.1f} too few; lower {lower}"
        )


def _ram() -> float:
    """Bytes of memory this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
