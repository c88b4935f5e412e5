"""Checkpoints: a Hugging Face folder plus what a resume needs, whole or not at all.

model.safetensors config.json tokenizer.json ...   AutoModelForCausalLM.from_pretrained reads it
state/            learner: weights, AdamW's state, version, random state, by torch.distributed.checkpoint:
                  each rank writes its shards, and any number of ranks can read them
controller.json   the controller's state; main.py resumes by it
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config import ConfigError
from trainer.learner.ranks import Ranks
from trainer.learner.sharding import gathered, like, local
from trainer.run_folder import checkpoints

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, by parameter


def save(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    version: int,
    controller_state: dict[str, Any],
    ranks: Ranks,
) -> None:
    """Write the folder aside, then rename it; a failure leaves older checkpoints as they are.

    All ranks write into one folder: over several machines it must be a shared one.
    """
    final = Path(path)
    aside = final.with_name(f".{final.name}.part")
    try:
        if not ranks.rank:
            shutil.rmtree(aside, ignore_errors=True)  # a killed process left it
            aside.mkdir(parents=True)
        ranks.gather(None)  # the folder stands
        state = _state(weights, optimizer, version)
        dcp.save(state, checkpoint_id=aside / "state", no_dist=ranks.mesh is None)
        whole = {}
        for name, weight in weights.items():
            tensor = gathered(weight, torch.float32)
            if not ranks.rank:
                whole[name] = tensor.cpu()
        if not ranks.rank:
            model.save_pretrained(aside, state_dict=whole)
            tokenizer.save_pretrained(aside)
            (aside / "controller.json").write_text(json.dumps(controller_state))
            shutil.rmtree(final, ignore_errors=True)  # of the same version
            aside.rename(final)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as e:  # of any rank
        if not _no_space(e):
            raise
        raise ConfigError(
            f"no space left for the checkpoint {final}; older ones are whole: free space, then --resume"
        ) from e
    finally:
        if not ranks.rank:
            shutil.rmtree(aside, ignore_errors=True)


def load(
    path: str | Path, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> int:
    """Restore weights, the optimizer's moments and the random state; returns the version.

    The optimizer's settings stay as they are, since a resume may change them.
    """
    state = _state(weights, optimizer, 0)
    dcp.load(state, checkpoint_id=Path(path) / "state", no_dist=ranks.mesh is None)
    for i, (name, part) in enumerate(zip(weights, _parts(optimizer), strict=True)):
        moments = {moment: local(state[moment][name]) for moment in MOMENTS}
        optimizer.state[part] = {"step": state["steps"][i].to(part.device), **moments}
    torch.set_rng_state(state["rng"])
    return int(state["version"])


def _state(
    weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, version: int
) -> dict[str, Any]:
    """What is written, and with other values what is read into; before the first step moments are 0."""
    parts = _parts(optimizer)
    known = [optimizer.state.get(part, {}) for part in parts]

    def moments(moment: str) -> dict[str, Tensor]:
        of = [s[moment] if s else torch.zeros_like(p) for s, p in zip(known, parts, strict=True)]
        return {name: like(w, m.detach()) for (name, w), m in zip(weights.items(), of, strict=True)}

    return {
        "weights": {name: w.detach() for name, w in weights.items()},
        **{moment: moments(moment) for moment in MOMENTS},
        "steps": torch.tensor([float(s.get("step", 0)) for s in known]),
        "version": torch.tensor(version),
        "rng": torch.get_rng_state(),
    }


def _parts(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer steps: this rank's parts of the weights."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _no_space(error: BaseException) -> bool:
    """Whether the disk was full, in the words of the OS, of safetensors or of torch.save."""
    full = (errno.ENOSPC, errno.EDQUOT)
    words = (*(os.strerror(code) for code in full), "PytorchStreamWriter failed writing")
    return getattr(error, "errno", None) in full or any(w in str(error) for w in words)


def prune(run_dir: str | Path, keep: int) -> None:
    """Delete all but the newest `keep`, and what a killed process left half-written."""
    folders = checkpoints(run_dir)
    for old in folders[: max(0, len(folders) - keep)]:
        shutil.rmtree(old)
    for aside in (Path(run_dir) / "checkpoints").glob(".step-*"):
        shutil.rmtree(aside, ignore_errors=True)
