"""Checkpoints: a Hugging Face folder plus what a resume needs, whole or not at all.

model.safetensors config.json tokenizer.json ...   AutoModelForCausalLM.from_pretrained reads it
optimizer.pt      learner: version, AdamW's state, random state
controller.json   the controller's state; main.py resumes by it
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config import ConfigError
from trainer.run_folder import checkpoints


def save(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    version: int,
    controller_state: dict[str, Any],
) -> None:
    """Write the folder aside, then rename it; a failure leaves older checkpoints as they are."""
    final = Path(path)
    aside = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        state = {"version": version, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, aside / "optimizer.pt")
        (aside / "controller.json").write_text(json.dumps(controller_state))
        shutil.rmtree(final, ignore_errors=True)  # of the same version
        aside.rename(final)
    except (OSError, RuntimeError, SafetensorError) as e:
        if not _no_space(e):
            raise
        raise ConfigError(
            f"no space left for the checkpoint {final}; older ones are whole: free space, then --resume"
        ) from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _no_space(error: Exception) -> bool:
    """Whether the disk was full, in the words of the OS, of safetensors or of torch.save."""
    full = (errno.ENOSPC, errno.EDQUOT)
    words = (*(os.strerror(code) for code in full), "PytorchStreamWriter failed writing")
    return getattr(error, "errno", None) in full or any(w in str(error) for w in words)


def load(path: str | Path, optimizer: torch.optim.Optimizer) -> int:
    """Restore the optimizer's moments and the random state; returns the version.

    Its settings stay as they are, since a resume may change them. The weights are the folder's own.
    """
    state = torch.load(Path(path) / "optimizer.pt", weights_only=True)
    for group, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        saved |= {name: value for name, value in group.items() if name != "params"}
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(state["version"])


def prune(run_dir: str | Path, keep: int) -> None:
    """Delete all but the newest `keep`, and what a killed process left half-written."""
    folders = checkpoints(run_dir)
    for old in folders[: max(0, len(folders) - keep)]:
        shutil.rmtree(old)
    for aside in (Path(run_dir) / "checkpoints").glob(".step-*"):
        shutil.rmtree(aside, ignore_errors=True)
