"""The folder of models that are downloaded, converted or trained once, and how they get there."""

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
    """`folder`; if it is missing, `build` fills a temporary one that is then renamed: it is never partial."""
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        build(temporary)
        temporary.rename(folder)
    except OSError as e:
        if not folder.is_dir():  # otherwise another process has built it meanwhile
            raise ConfigError(
                f"cannot write {folder}: {e.strerror or e}; free some space, or set SIGMOID_RL_CACHE"
            ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def report_progress(text: str) -> None:
    """One line on stderr, since stdout is the run's."""
    print(f"model: {text}", file=sys.stderr, flush=True)
