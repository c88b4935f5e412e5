"""Reading and writing the files of a run: JSON lines that survive a crash, and files replaced as a whole.

A process can die in the middle of a line. So a reader leaves out a last line that does not end, and a writer
that opens the file again first cuts such a line off. What is written is always valid JSON, which has neither
NaN nor infinity: they become null.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trainer.config import ConfigError


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, without a half-written last line; ConfigError names a bad line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as e:
                raise ConfigError(
                    f"{path}, line {number}: not a JSON object ({e}); one object a line was expected: "
                    "repair or delete that line"
                ) from e


def open_to_append(path: Path) -> IO[str]:
    """The file, opened to append lines; a half-written last line is cut off first. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def append(file: IO[str], record: Mapping[str, Any]) -> None:
    """Write one line and flush it, so that a crash of this process loses no line that was written."""
    file.write(json.dumps(nan_to_null(record), ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def nan_to_null(value: Any, path: str = "", replaced: list[str] | None = None) -> Any:
    """The value as JSON can hold it: NaN and infinities as None, arrays as lists, keys as text.

    The keys of NaN and infinities are added to `replaced`, joined by dots.
    """
    if hasattr(value, "tolist"):  # NumPy and torch numbers and arrays
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        if replaced is not None:
            replaced.append(path)
        return None
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {str(k): nan_to_null(v, f"{prefix}{k}", replaced) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_null(v, f"{path}.{i}", replaced) for i, v in enumerate(value)]
    return value


def write_atomic(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader never sees half of it, not even after a crash."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
