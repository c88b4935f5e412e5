"""Fused FP32-exact policy loss for language models: log-prob, ratio and loss without the logits."""

import importlib.metadata
import importlib.util
import warnings
from typing import NoReturn

if importlib.util.find_spec("torch") is None:
    raise ImportError("sigmoid-rl's `kernels` needs torch, which is missing: pip install '.[kernels]'")

from kernels.aggregation import Aggregation, token_weights
from kernels.backends import backend_info
from kernels.body import fused_add_rms_norm, fused_qk_norm_rope, rms_norm, rope_tables, swiglu
from kernels.check import NonFiniteError
from kernels.linear_logprob import linear_logprob
from kernels.objectives import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    KL,
    REINFORCE,
    SAPO,
    TIS,
    Clip,
    DualClip,
    IcePop,
    Objective,
    SequenceObjective,
    Term,
)
from kernels.policy_loss import PolicyLossOutput, policy_loss

__all__ = [
    "CISPO", "DAPO", "GRPO", "GSPO", "KL", "REINFORCE", "SAPO", "TIS", "Aggregation", "Clip", "DualClip",
    "IcePop", "NonFiniteError", "Objective", "PolicyLossOutput", "SequenceObjective", "Term", "backend_info",
    "fused_add_rms_norm", "fused_qk_norm_rope", "linear_logprob", "policy_loss", "rms_norm", "rope_tables",
    "swiglu", "token_weights",
]  # fmt: skip

_ADVICE = "one hides the other; only sigmoid-rl's may be installed: pip uninstall kernels"


def _namesake() -> str | None:
    """Version of PyPI's other package `kernels`, if installed; transformers mistakes this package for it."""
    try:
        return importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None


def _warn_of_namesake() -> None:
    if version := _namesake():
        warnings.warn(
            f"the PyPI package `kernels` {version} is installed beside sigmoid-rl's `kernels`: {_ADVICE}",
            stacklevel=2,
        )


def __getattr__(name: str) -> NoReturn:
    """An error that explains why a name of the other package is missing here."""
    version = None if name.startswith("__") else _namesake()
    if version is not None:
        raise ImportError(
            f"sigmoid-rl's `kernels` has no {name}; `kernels` {version} is installed too: {_ADVICE}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_warn_of_namesake()
