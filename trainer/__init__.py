"""The reinforcement-learning trainer: launcher, controller, engines, learner, ledger, curve."""

import importlib.util
from pathlib import Path


def _check_namesake() -> None:
    """ImportError if the `kernels` that would be imported is not ours but PyPI's other package."""
    spec = importlib.util.find_spec("kernels")  # not imported: the launcher runs without torch
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "objectives.py").is_file():
        origin = "none" if spec is None else spec.origin
        raise ImportError(
            f"sigmoid-rl needs its own package `kernels`, found {origin}; if that is PyPI's package: "
            "pip uninstall kernels"
        )


_check_namesake()
