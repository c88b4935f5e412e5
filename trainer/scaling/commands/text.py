"""How the commands write: shares, and where files go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.fit import valid_json


def percent(p: float) -> str:
    """Of a share of draws, of which a few thousand say nothing beyond 99%."""
    return "under 1%" if p < 0.01 else "over 99%" if p > 0.99 else f"{p:.0%}"


def check_outputs(*outputs: tuple[Path | None, tuple[str, ...]]) -> None:
    """Before any work, so that a wrong name costs nothing: the folder there, the ending one of those."""
    for path, endings in outputs:
        if path and path.suffix not in endings:
            raise ConfigError(f"{path}: expected a name ending in {' or '.join(endings)}")
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")


def write_json(path: Path, content: Any) -> None:
    """What is unknown or infinite is null."""
    path.write_text(json.dumps(valid_json(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
