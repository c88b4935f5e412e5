"""Items of reasoning-gym tasks: `generate` makes them in a subprocess; `encode` and `decode` are for JSON.

The controller generates and encodes the items; the worker that scores them decodes. Several tasks draw from
Python sets, so their items depend on the interpreter's hash seed: the subprocess sets it to 0, for the same
items in every run. Several scorers distinguish tuples from lists, which JSON does not: `encode` marks them.
"""

import dataclasses
import difflib
import json
import os
import subprocess
import sys
from typing import Any

from trainer.config import ConfigError

DEADLINE_S = 600.0


def generate(task: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """All items of the task, encoded. `arguments`: the task's options with seed and size."""
    paths = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, task, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE_S,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"reasoning_gym:{task} took over {DEADLINE_S:g} s; lower data.size") from e
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines() or [f"exit {process.returncode}"]
        raise ConfigError(f"reasoning_gym:{task} with {arguments} cannot be generated: {lines[-1]}")
    reply = json.loads(process.stdout)
    if "error" in reply:
        raise ConfigError(reply["error"])
    items: list[dict[str, Any]] = reply["items"]
    return items


def encode(value: Any) -> Any:
    """The value for JSON, with tuples and non-string keys marked."""
    if isinstance(value, tuple):
        return {"__tuple__": [encode(v) for v in value]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: encode(v) for k, v in value.items()}
        return {"__dict__": [[encode(k), encode(v)] for k, v in value.items()]}
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, dict):
        if "__tuple__" in value:
            return tuple(decode(v) for v in value["__tuple__"])
        if "__dict__" in value:
            return {decode(k): decode(v) for k, v in value["__dict__"]}
        return {k: decode(v) for k, v in value.items()}
    return value


def _items(task: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The subprocess's reply: the items, or an error message."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return {"error": f"reasoning_gym:{task} needs the package: pip install 'reasoning-gym==0.1.25'"}
    if task not in DATASETS:
        close = ", ".join(difflib.get_close_matches(task, DATASETS, n=3)) or "basic_arithmetic, gsm_symbolic"
        return {"error": f"reasoning-gym has no task {task!r}; similar names: {close}"}
    try:
        dataset = reasoning_gym.create_dataset(task, **arguments)
    except (TypeError, AssertionError, ValueError) as e:
        known = ", ".join(f.name for f in dataclasses.fields(DATASETS[task][1]))
        return {"error": f"data.options for reasoning_gym:{task}: {e}; it takes {known}; given {arguments}"}
    return {"items": [encode(dataset[i]) for i in range(len(dataset))]}


if __name__ == "__main__":
    json.dump(_items(sys.argv[1], json.loads(sys.argv[2])), sys.stdout, default=str)
