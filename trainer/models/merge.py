"""A whole model from a base and an adapter in PEFT's format.

  python -m trainer.models.merge runs/lora-0/checkpoints/step-000100/adapter merged
  python -m trainer.models.merge my-adapter merged --base ./my-base      the base lies elsewhere

The adapter is one of a run's checkpoints, or a plain LoRA that `peft` has saved.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cli import Parser, fail
from trainer.config import ConfigError
from trainer.models.lora import merged, read_adapter
from trainer.models.resolve import resolve_model


def merge(folder: Path, out: Path, base: str = "") -> None:
    """Write the model `base`, by default the one that the adapter names, with the adapter in its weights.

    Weights keep the base's type, and are rounded to it once. ConfigError if the two do not fit together."""
    if out.exists():
        raise ConfigError(f"{out}: exists already; give a new folder")
    adapter = read_adapter(folder)
    model_dir = resolve_model(base or adapter.base)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto", use_safetensors=True)
    weights = dict(model.named_parameters())
    for name, (a, b) in adapter.pairs.items():
        weight = weights.get(f"{name}.weight")
        if weight is None or weight.shape != (len(b), a.shape[1]):
            size = "no such layer" if weight is None else f"a weight of {tuple(weight.shape)}"
            raise ConfigError(
                f"{folder}: {name} is ({len(b)}, {a.shape[1]}), and {model_dir} has {size}; give its --base"
            )
        with torch.no_grad():
            weight.copy_(merged(weight, a, b, adapter.alpha / adapter.rank))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(out)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for what cannot be merged."""
    parser = Parser(
        prog="python -m trainer.models.merge", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "adapter", type=Path, help="folder with adapter_config.json, adapter_model.safetensors"
    )
    parser.add_argument("out", type=Path, help="new folder for the model")
    parser.add_argument(
        "--base", default="", help="model folder or name (default: the one the adapter names)"
    )
    try:
        options = parser.parse_args(argv)
        merge(options.adapter, options.out, options.base)
    except ConfigError as e:
        return fail(str(e), 2)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
