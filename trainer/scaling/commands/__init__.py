"""The commands of `python -m trainer.scaling`, one module each, and how they write files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.jsonl import nan_to_null

PICTURES = (".png", ".svg", ".pdf")


def check_outputs(json_path: Path | None, picture: Path | None = None) -> None:
    """Refuse output files that cannot be written, before any work is done."""
    for path, endings in ((json_path, (".json",)), (picture, PICTURES)):
        if path and path.suffix not in endings:
            raise ConfigError(f"{path}: expected a name ending in {' or '.join(endings)}")
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")


def write_json(path: Path, content: Any) -> None:
    """What is unknown or infinite becomes null."""
    path.write_text(json.dumps(nan_to_null(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def as_typed(numbers: Sequence[float]) -> str:
    """Numbers as on a command line, for help texts."""
    return " ".join(f"{x:g}" for x in numbers)
