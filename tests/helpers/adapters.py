"""Random adapters on a model, as the learner pushes them, and the model that they make."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.config import LoraConfig
from trainer.learner.lora import adapted_layers, adapter_of, add_adapters, weights_for_engines
from trainer.learner.weight_file import WeightFiles
from trainer.models.lora import push_metadata, write_adapter


@dataclass(frozen=True)
class Pushed:
    alone: str  # file of the adapters
    whole: str  # file of all weights, with the sums
    model: PreTrainedModel  # transformers' own, FP32, with sums of float64


def push(
    folder: str, out: Path, dtype: str = "float32", rank: int = 4, targets: tuple[str, ...] = ()
) -> Pushed:
    """Adapt the model in `folder`, whose base is in `dtype`, and write both files into `out`; and, in PEFT's
    format as in a checkpoint, out/adapter."""
    out.mkdir(exist_ok=True)
    lm, plain = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    lora, kind = LoraConfig(rank=rank, alpha=10, targets=targets), getattr(torch, dtype)
    add_adapters(lm, kind, lora, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, layer in adapted_layers(lm).items():
            layer.lora_B.normal_(generator=generator, std=0.1)
            sum_ = layer.weight.double() + 10 / rank * layer.lora_B.double() @ layer.lora_A.double()
            plain.get_parameter(f"{name}.weight").copy_(sum_)
    adapter = adapter_of(lm, folder, lora)
    assert adapter is not None
    write_adapter(out / "adapter", adapter)
    trained = {n: w for n, w in lm.named_parameters() if w.requires_grad}
    metadata = push_metadata(adapter, folder, dtype)
    assert metadata
    alone = WeightFiles(str(out), 10**12, 1, torch.float32, metadata=metadata).write(trained, 1)
    whole = WeightFiles(str(out), 10**12, 1, kind).write(weights_for_engines(lm), 1)
    return Pushed(alone, whole, plain.eval())
