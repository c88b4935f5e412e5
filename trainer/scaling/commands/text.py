"""How the commands write: shares, short names, and where files go."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError


def percent(p: float) -> str:
    """Of a share of draws, of which a few thousand say nothing beyond 99%."""
    return "under 1%" if p < 0.01 else "over 99%" if p > 0.99 else f"{p:.0%}"


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of paths: as many as tell them apart, without the file's ending where that does.

    Of runs that one file holds (`file: run`), the run's name where that does.
    """
    runs = [name.rpartition(": ")[2] for name in names]
    if all(": " in name for name in names) and len(set(runs)) == len(runs):
        return runs
    paths = [Path(name) for name in names]
    short = [
        path.stem if path.suffix in (".csv", ".jsonl", ".parquet", ".json") else path.name for path in paths
    ]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        if len(set(short)) == len(short):
            return short
        short = ["/".join(path.parts[-depth:]) for path in paths]
    return list(names)


def check_outputs(*outputs: tuple[Path | None, tuple[str, ...]]) -> None:
    """Before any work, so that a wrong name costs nothing: the folder there, the ending one of those."""
    for path, endings in outputs:
        if path and path.suffix not in endings:
            raise ConfigError(f"{path}: expected a name ending in {' or '.join(endings)}")
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")


def write_json(path: Path, content: Any) -> None:
    """What is unknown or infinite is null."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, tuple | list):
            return [plain(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    path.write_text(json.dumps(plain(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
