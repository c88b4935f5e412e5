"""LoRA's sum, and its files in PEFT's format, which peft, vLLM and others read.

    W = W0 + alpha / rank · B A        (arXiv 2106.09685, eq. 3, and §4.1 for the factor)

adapter_config.json         base model, rank, alpha, the names of the adapted layers
adapter_model.safetensors   base_model.model.LAYER.lora_A.weight (rank, in), .lora_B.weight (out, rank); FP32
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import ConfigError

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
INDEX = "model.safetensors.index.json"  # of a model in several files
# Settings of PEFT that change the sum, with the values under which it is the one above.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "use_rslora": (False, None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapters of a model."""

    base: str  # the model's folder or hub name
    alpha: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]  # A (rank, in) and B (out, rank) by the layer's name

    @property
    def rank(self) -> int:
        return len(next(iter(self.pairs.values()))[0])


def merged(
    base: Tensor,  # (out, in)
    a: Tensor,  # (rank, in) FP32
    b: Tensor,  # (out, rank) FP32
    scale: float,  # alpha / rank
) -> Tensor:
    """W0 + scale · B A in W0's type, summed in that of the adapters and rounded once."""
    return torch.addmm(base.to(a.dtype), b, a, alpha=scale).to(base.dtype)


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write the adapter's two files into a new folder."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.pairs}),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    tensors = {
        f"{PREFIX}{name}.lora_{letter}.weight": tensor.detach().cpu().contiguous()
        for name, pair in adapter.pairs.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def tensor_files(folder: str) -> dict[str, Path]:
    """The safetensors file of each tensor of the model in a folder: by its index, if it has one."""
    index = Path(folder, INDEX)
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: Path(folder, file) for name, file in weight_map.items()}
    files = dict[str, Path]()
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files


def push_metadata(adapter: Adapter, folder: str, dtype: str) -> dict[str, str]:
    """The facts that `pushed_weights` needs beside an adapter, whose base is in the folder.

    Empty where the model's files have other names than transformers: then whole weights are to be pushed."""
    if not {f"{name}.weight" for name in adapter.pairs} <= tensor_files(folder).keys():
        return {}
    return {"base": folder, "dtype": dtype, "scale": str(adapter.alpha / adapter.rank)}


def pushed_weights(path: str, device: torch.device, whole: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The weights in a file of the learner's: a whole model's, or of adapters alone the sums with their base,
    made on the device. `whole`: and then the base's other weights, as its files have them.

    Metadata of adapters give the base's folder, its type and the scale."""
    with safe_open(path, "pt") as file, ExitStack() as stack:
        metadata, names = file.metadata() or {}, list(file.keys())
        if "base" not in metadata:
            yield from ((name, file.get_tensor(name)) for name in names)
            return
        paths, dtype = tensor_files(metadata["base"]), getattr(torch, metadata["dtype"])
        adapted = {f"{n.removesuffix('.lora_A')}.weight" for n in names if n.endswith(".lora_A")}
        if lost := sorted(adapted - paths.keys()):
            raise ConfigError(
                f"{metadata['base']}: the base of the adapters has no {lost[0]}; expected the files with "
                "which the run began: put them back, then --resume"
            )
        opened = {p: stack.enter_context(safe_open(p, "pt")) for p in set(paths.values())}
        for name in sorted(paths if whole else adapted):
            weight = opened[paths[name]].get_tensor(name)
            if name in adapted:
                layer = name.removesuffix(".weight")
                a, b = (file.get_tensor(f"{layer}.lora_{letter}").to(device) for letter in "AB")
                weight = merged(weight.to(device, dtype), a, b, float(metadata["scale"]))
            yield name, weight


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder that this project or peft wrote; ConfigError if it is not plain LoRA."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{folder}: cannot be read as an adapter ({e}); expected {CONFIG}, {WEIGHTS}"
        ) from e
    if other := [key for key, values in PLAIN.items() if config.get(key, values[0]) not in values]:
        settings = ", ".join(f"{key} {config[key]!r}" for key in other)
        raise ConfigError(f"{folder}: {settings}; expected plain LoRA: merge it with peft's merge_and_unload")
    names = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors}
    try:
        pairs = {n: tuple(tensors.pop(f"{PREFIX}{n}.lora_{x}.weight") for x in "AB") for n in sorted(names)}
    except KeyError as e:
        raise ConfigError(
            f"{folder / WEIGHTS}: no tensor {e}; expected lora_A and lora_B of each layer"
        ) from e
    base, alpha = config["base_model_name_or_path"], float(config["lora_alpha"])
    return Adapter(base, alpha, pairs)  # type: ignore[arg-type]  # the tuples have two
