"""The table of the built-in objectives, which configuration, learner, Triton backend and tests read.

Importing it does not import torch: the trainer's configuration reads the table where torch is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .sequence_objectives import GMPO, GSPO, M2PO, VESPO, ClipCov, KLCov, SequenceMIS, SequenceTIS
from .term import SequenceObjective
from .token_objectives import (
    CISPO,
    DAPO,
    DPPO,
    DPPOKL,
    DRPO,
    GRPO,
    REINFORCE,
    SAPO,
    SFT,
    TIS,
    DualClip,
    IcePop,
    NoReward,
)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """An objective that a configuration can name."""

    make: Callable[..., Any]  # makes it, with its own settings or the given ones
    settings: Mapping[str, str] = field(default_factory=dict)  # keys of a configuration, and its arguments
    triton: str | None = None  # its branch in `triton/terms.py`; without one, torch computes its terms

    @property
    def over_sequences(self) -> bool:
        """True if it is an objective over whole sequences."""
        return isinstance(self.make(), SequenceObjective)


_BOUND = {"max_ratio": "max_ratio"}
_CLIP = {"clip_low": "low", "clip_high": "high"}
_MASK = {"mask_low": "low", "mask_high": "high"}
OBJECTIVES = {
    "cispo": BuiltIn(CISPO, _BOUND, "truncated"),
    "tis": BuiltIn(TIS, _BOUND, "truncated"),
    "reinforce": BuiltIn(REINFORCE, triton="plain"),
    "grpo": BuiltIn(GRPO, _CLIP, "clip"),
    "ppo": BuiltIn(GRPO, _CLIP, "clip"),
    "dapo": BuiltIn(DAPO, _CLIP, "clip"),
    "dual_clip": BuiltIn(DualClip, _CLIP, "clip"),
    "gspo": BuiltIn(GSPO, _CLIP),
    "luspo": BuiltIn(GSPO, _CLIP),
    "gmpo": BuiltIn(GMPO, _CLIP),
    "icepop": BuiltIn(IcePop, _MASK, "mask"),
    "dppo": BuiltIn(DPPO, _CLIP),
    "dppo_kl": BuiltIn(DPPOKL, _CLIP),
    "drpo": BuiltIn(DRPO),
    "sapo": BuiltIn(SAPO, triton="gate"),
    "seq_tis": BuiltIn(SequenceTIS, _BOUND),
    "seq_mis": BuiltIn(SequenceMIS, _MASK),
    "vespo": BuiltIn(VESPO),
    "m2po": BuiltIn(M2PO),
    "clip_cov": BuiltIn(ClipCov, _CLIP),
    "kl_cov": BuiltIn(KLCov),
    "sft": BuiltIn(SFT),
    "none": BuiltIn(NoReward),
}
