"""Lookup of the objective and the penalties of `kernels` that the settings name."""

import importlib
import math

import torch

from kernels import KL, Masked, Objective, OutsideBand, SequenceObjective
from kernels.check import check_term
from trainer.config import ConfigError, ObjectiveConfig


def make_objective(config: ObjectiveConfig) -> Objective | SequenceObjective:
    """The objective that the settings name. ConfigError if it is the user's own and cannot be called."""
    objective, kind, bounds = _unmasked(config), config.sequence_mask, config.loss_settings
    if kind == "none":
        return objective
    high = math.inf if kind == "negative" else bounds["mask_high"]
    rule = OutsideBand(bounds["mask_low"], high, mean=kind != "product", negative=kind == "negative")
    return Masked(objective, rule)


def _unmasked(config: ObjectiveConfig) -> Objective | SequenceObjective:
    if config.built_in is None:
        return _own(config.loss)
    fields, values = config.built_in.settings, config.loss_settings
    settings = {fields[key]: x for key, x in values.items() if key in fields}
    objective: Objective | SequenceObjective = config.built_in.make(**settings)
    return objective


def make_kl(config: ObjectiveConfig) -> KL | None:
    """The penalty in the loss on sampled tokens; None if there is none, or if it is elsewhere."""
    kl = config.kl
    sampled = kl.coefficient and kl.place == "loss" and not kl.top_k
    return KL(kl.coefficient, kl.estimator) if sampled else None


def _own(name: str) -> Objective:
    """The function named module:function, tried on two tokens."""
    module, _, function = name.partition(":")
    try:
        objective: Objective = getattr(importlib.import_module(module), function)
        check_term(objective(*torch.full((3, 2), -1.0)), 2)
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        raise ConfigError(
            f"objective.loss {name}: {e}; expected a module that can be imported here, and in it a function "
            "of (logp, logprobs_gen, advantages) that returns a kernels.Term"
        ) from e
    return objective
