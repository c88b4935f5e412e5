"""Fused FP32-exact policy loss for language models: log-prob, ratio and loss without the logits."""

import importlib.metadata
import warnings

from kernels.aggregation import Aggregation, token_weights
from kernels.backends import backend_info
from kernels.linear_logprob import linear_logprob
from kernels.objectives import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    KL,
    REINFORCE,
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
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "KL",
    "REINFORCE",
    "TIS",
    "Aggregation",
    "Clip",
    "DualClip",
    "IcePop",
    "Objective",
    "PolicyLossOutput",
    "SequenceObjective",
    "Term",
    "backend_info",
    "linear_logprob",
    "policy_loss",
    "token_weights",
]


def _warn_of_namesake() -> None:
    """PyPI has another distribution called `kernels`, for which transformers would take this package."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"the PyPI package `kernels` {version} is installed beside sigmoid-rl's `kernels`, and one hides the "
        "other; expected only sigmoid-rl's: pip uninstall kernels",
        stacklevel=2,
    )


_warn_of_namesake()
