"""The run's folder: claimed by one process at a time, never overwritten."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from trainer.config import ConfigError


def claim(run_dir: str, resume: bool) -> IO[str]:
    """Create or reopen the run folder and hold its lock; the lock ends with the returned file or process."""
    folder = Path(run_dir)
    if resume and not (folder / "config.yaml").is_file():
        raise ConfigError(f"--resume: {folder} holds no run (no config.yaml); give the --run-dir of one")
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is in use already; continue that run with --resume --run-dir {folder}, or "
            "give another --run-dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as e:
        raise ConfigError(
            f"cannot write the run folder {folder}: {e.strerror}; give another --run-dir"
        ) from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        raise ConfigError(
            f"{folder} is being written by another process; wait for it, or give another --run-dir"
        ) from e
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def write_atomic(path: Path, text: str) -> None:
    """Replace the file at once, so that a reader or a crash never meets half of it."""
    aside = path.with_suffix(path.suffix + ".part")
    aside.write_text(text)
    aside.replace(path)
