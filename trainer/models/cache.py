"""The folder of models that are downloaded or converted once, and how they get there."""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from trainer.config import ConfigError


def cache_folder() -> Path:
    """$SIGMOID_RL_CACHE, or sigmoid-rl under $XDG_CACHE_HOME, or under ~/.cache."""
    if folder := os.environ.get("SIGMOID_RL_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sigmoid-rl"


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """`folder`; if it is missing, `build` fills a temporary one that is then renamed: it is never partial.

    Of several processes one builds, and the others wait for it.
    """
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a killed process loses it
            try:
                if not folder.is_dir():
                    shutil.rmtree(temporary, ignore_errors=True)  # a killed process left it
                    temporary.mkdir()
                    build(temporary)
                    temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as e:
        problem = f"cannot write {folder}: {e.strerror or e}"
        raise ConfigError(f"{problem}; free some space, or set SIGMOID_RL_CACHE") from e
    return folder


def report_progress(text: str) -> None:
    """One line on stderr, since stdout is the run's."""
    print(f"model: {text}", file=sys.stderr, flush=True)
