"""A user's own function `module:function(completion, answer, metadata) -> float`, as a kind of verifier."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from trainer.config import ConfigError
from trainer.types import CORRECT, Outcome, Verdict
from trainer.verifiers.verifier import OWN, Verifier


class Function(Verifier, kind=OWN):
    """The result of your function(completion, answer, metadata): 0 to 1, of which only 1 is a pass."""

    error: Outcome = "crash"
    function: Callable[[str, Any, dict[str, Any]], Any]

    def load(self) -> None:
        self.function = imported("verifier.kind", self.kind)

    def slow(self, completion: str, answer: Any, metadata: dict[str, Any]) -> Verdict:
        """A score of 1 is correct; a score below is a graded reward that counts as wrong in pass rates."""
        value = self.function(completion, answer, metadata)
        if not 0.0 <= (score := float(value)) <= 1.0:
            raise ValueError(f"the score is {value!r}, expected a number from 0 to 1")
        return CORRECT if score == 1.0 else Verdict(score, "wrong")


def imported(key: str, path: str) -> Callable[..., Any]:
    """The function `module:function` that the user named under a key of the config."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as e:  # the user's module may raise anything
        raise ConfigError(
            f"{key} {path}: cannot import it: {type(e).__name__}: {e}; the module must be "
            f"in the current folder or on sys.path ({len(sys.path)} entries)"
        ) from e
    if not callable(function):
        raise ConfigError(f"{key} {path}: {name} is {type(function).__name__}, expected a function")
    return function
