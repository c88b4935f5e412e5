"""Fused FP32-exact policy loss for language models: log-prob, ratio and loss without the logits."""

import importlib.metadata
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aggregation import Aggregation, token_weights
    from .backends import backend_info
    from .body import fused_add_rms_norm, fused_qk_norm_rope, rms_norm, rope_tables, swiglu
    from .check import NonFiniteError
    from .distillation import forward_kl, topk_logprob
    from .loss import PolicyLossOutput, policy_loss
    from .scoring import linear_logprob
    from .sequence_objectives import (
        GMPO,
        GSPO,
        M2PO,
        VESPO,
        ClipCov,
        KLCov,
        Masked,
        OutsideBand,
        OverSequences,
        SequenceMIS,
        SequenceTIS,
    )
    from .term import KL, Objective, SequenceObjective, Term
    from .token_objectives import (
        CISPO,
        DAPO,
        DPPO,
        DRPO,
        GRPO,
        REINFORCE,
        SAPO,
        SFT,
        TIS,
        Clip,
        DualClip,
        IcePop,
        NoReward,
    )

__all__ = [
    "CISPO", "DAPO", "DPPO", "DRPO", "GMPO", "GRPO", "GSPO", "KL", "M2PO", "REINFORCE", "SAPO", "SFT", "TIS",
    "VESPO", "Aggregation", "Clip", "ClipCov", "DualClip", "IcePop", "KLCov", "Masked", "NoReward",
    "NonFiniteError", "Objective", "OutsideBand", "OverSequences", "PolicyLossOutput", "SequenceMIS",
    "SequenceObjective", "SequenceTIS", "Term", "backend_info", "forward_kl", "fused_add_rms_norm",
    "fused_qk_norm_rope", "linear_logprob", "policy_loss", "rms_norm", "rope_tables", "swiglu",
    "token_weights", "topk_logprob",
]  # fmt: skip

_MODULES = (
    "aggregation", "backends", "body", "check", "distillation", "loss", "scoring", "sequence_objectives",
    "term", "token_objectives",
)  # fmt: skip
_ADVICE = (
    "one hides the other: pip uninstall kernels; or, for the loss alone, install the wheel of `make wheel` "
    "and import sigmoid_rl_kernels, which is the same and lives beside the other"
)


def _namesake() -> str | None:
    """Version of PyPI's other package `kernels`, if installed; transformers mistakes this package for it.

    None in the distribution sigmoid-rl-kernels, which has a name of its own.
    """
    try:
        if __name__ != "kernels":
            return None
        return importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None


def _warn_of_namesake() -> None:
    if version := _namesake():
        warnings.warn(
            f"the PyPI package `kernels` {version} is installed beside sigmoid-rl's `kernels`: {_ADVICE}",
            stacklevel=2,
        )


def __getattr__(name: str) -> Any:
    """A public name, from its module: torch is imported at first use, not with the table of objectives.

    ImportError if torch is missing, or if the name is one of the other package's.
    """
    if name in __all__:
        if importlib.util.find_spec("torch") is None:
            raise ImportError(
                "sigmoid-rl's `kernels` needs torch, which is missing: pip install '.[kernels]'"
            )
        modules = [vars(importlib.import_module(f".{module}", __name__)) for module in _MODULES]
        globals().update({x: module[x] for module in modules for x in __all__ if x in module})
        return globals()[name]
    submodule = importlib.util.find_spec(f"{__name__}.{name}") is not None  # `from kernels import adapters`
    version = None if name.startswith("__") or submodule else _namesake()
    if version is not None:
        raise ImportError(
            f"sigmoid-rl's `kernels` has no {name}; `kernels` {version} is installed too: {_ADVICE}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_warn_of_namesake()
