"""The run's folder: claimed by one process at a time, never overwritten; what dead runs left is removed."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from trainer.config import ConfigError
from trainer.jsonl import write_atomic

SHARED = Path("/dev/shm")
CHECKSUMS = "checksums.json"  # in the folder of a checkpoint: of all its files
EVENTS = "events/controller.jsonl"  # what the record is made of, as the controller logs it
ENDED = "ended.json"  # in the folder of a run that is complete
EVALUATIONS, RESULTS = "evaluations", "results.jsonl"  # RUN/evaluations/NAME/results.jsonl
HELD_OUT = "held_out.jsonl"  # what N completions of each held-out prompt are worth, by evaluation
SET_KEYS = "set_keys.json"  # the keys of config.yaml that somebody has set: it names all of them
TOKENIZER = "tokenizer.json"  # of the model, in the folder of a run and of a checkpoint
ORIGIN = "origin.json"  # in the folder of a run that began from another one
PREFIX = f"sigmoid-rl-{os.getuid()}-"  # of folders in shared memory: of weights, vLLM, verifiers


def claim(run_dir: str, resume: bool) -> IO[str]:
    """Create or reopen the run folder and hold its lock; the lock ends with the returned file or process.

    A start that failed before the first prompt has no results to lose: the next start takes its folder. And a
    run that ended before its first checkpoint is resumed from its beginning.
    """
    folder = Path(run_dir)
    advice = f"continue that run with --resume --run-dir {folder}, or give another --run-dir"
    in_use = ConfigError(f"{folder} is in use already; {advice}")
    if resume and not (folder / "config.yaml").is_file():
        raise ConfigError(f"--resume: {folder} holds no run (no config.yaml); give the --run-dir of one")
    foreign = folder.is_dir() and any(folder.iterdir()) and not (folder / ".lock").exists()
    if not resume and (foreign or folder.is_file()):
        raise in_use
    lock = lock_folder(folder, "--run-dir")
    if not resume and (checkpoints(folder) or any(p.stat().st_size for p in folder.glob("journal/*"))):
        lock.close()
        raise in_use
    if resume:
        _check_begun(folder)
    if not any(folder.glob("checkpoints/[!.]*")):  # whole or damaged
        _set_aside(folder)
    if not resume:
        (folder / ORIGIN).unlink(missing_ok=True)
    (folder / ENDED).unlink(missing_ok=True)
    return lock


def lock_folder(folder: Path, option: str) -> IO[str]:
    """Make the folder, and hold its lock until the returned file or this process ends. `option` names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as e:
        raise ConfigError(f"cannot write {folder}: {e.strerror}; give another {option}") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        problem = f"{folder} is being written by another process"
        raise ConfigError(f"{problem}; wait for it, or give another {option}") from e
    return lock


def _check_begun(folder: Path) -> None:
    """ConfigError for a run that no resume can go on with."""
    start, advice = origin(folder), "begin it again, with another --run-dir"
    if replayed := start.get("replay"):
        raise ConfigError(f"--resume: {folder} is a replay of {replayed}; {advice}")
    if any(folder.glob("checkpoints/[!.]*")):
        return
    if run := start.get("run"):
        raise ConfigError(f"--resume: {folder} was to branch from {run}, whose checkpoint it lacks; {advice}")
    if (folder / ENDED).exists():
        raise ConfigError(f"--resume: {folder} holds a complete run whose checkpoints are gone; {advice}")


def _set_aside(folder: Path) -> None:
    """Move what a run without a checkpoint has recorded to before-N/, since it starts from its beginning."""
    files = ("metrics.jsonl", "samples.jsonl", HELD_OUT, "timeline.jsonl", "ledger.json")
    names = ("journal", "events", "tensorboard", *files)
    if present := [path for name in names if (path := folder / name).exists()]:
        aside = folder / f"before-{1 + len(list(folder.glob('before-*')))}"
        aside.mkdir()
        for path in present:
            path.rename(aside / path.name)


def record_end(run_dir: Path, by: str, max_compute: float, why: str = "") -> None:
    """Say in the folder that the run is complete: by "steps", "compute", "forecast", "guard" or "solved"."""
    write_atomic(run_dir / ENDED, json.dumps({"by": by, "max_compute": max_compute, "why": why}))


def end_of(run_dir: Path) -> dict[str, Any]:
    """The record of `record_end`; empty where the run was stopped before its end."""
    return _read(run_dir / ENDED)


def record_origin(run_dir: Path, where: dict[str, Any]) -> None:
    """Say in the folder from which run it began; `text` is for people."""
    write_atomic(run_dir / ORIGIN, json.dumps(where))


def origin(run_dir: str | Path) -> dict[str, Any]:
    """The record that `record_origin` wrote; empty if the run began by itself."""
    return _read(Path(run_dir, ORIGIN))


def set_keys(config: Path, keys: Iterable[str]) -> list[str]:
    """Those of a file's keys that somebody has set: all, unless a run has said otherwise beside it."""
    path = config.with_name(SET_KEYS)
    recorded = set(json.loads(path.read_text())) if path.is_file() else keys
    return [key for key in keys if key in recorded]


def devices_by_role(run: str) -> dict[str, float]:
    """The devices of each role that has any, by the ledger; empty for no run, or one without a ledger."""
    roles = _read(Path(run, "ledger.json")).get("roles", {}) if run else {}
    return {role: books["devices"] for role, books in roles.items() if books["devices"]}


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def complete(run_dir: Path, max_compute: float = 0.0) -> bool:
    """True if a run has ended by itself; one that ended at less compute than this one goes on."""
    end = end_of(run_dir)
    return bool(end) and (end["by"] != "compute" or 0 < max_compute <= end["max_compute"])


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in Path(run_dir).glob("checkpoints/step-*/controller.json"))


def copy_tokenizer(model: str, run_dir: str) -> None:
    """Put the model's tokenizer into the run's folder, to show tokens before there is a checkpoint. One that
    stands there may be another model's, of a start that failed."""
    copy = Path(run_dir, TOKENIZER)
    part = copy.with_suffix(".part")
    if (file := Path(model, TOKENIZER)).is_file():
        shutil.copyfile(file, part)
        part.replace(copy)


def kept_at(checkpoint: Path) -> float:
    """The compute at which it was written to be kept for good (`logging.keep_at`); 0 if it was not."""
    compute: float = _read(checkpoint / "controller.json").get("kept", 0.0)
    return compute


def checkpoint_at(run: str | Path, step: int, command: str) -> Path:
    """The checkpoint of a run's step; ConfigError, which begins with the command, if there is none."""
    by_step = {int(path.name.removeprefix("step-")): path for path in checkpoints(run)}
    if step not in by_step:
        others = f"it has those of {', '.join(map(str, by_step))}" if by_step else "it has none"
        raise ConfigError(f"{command}: {run} has no checkpoint of step {step}; {others}")
    return by_step[step]


def latest(run_dir: str | Path) -> Path | None:
    """The newest complete checkpoint."""
    return max(checkpoints(run_dir), default=None)


def write_checksums(folder: Path) -> None:
    """Write size and SHA-256 of each file in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    content = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, _digests(files), strict=True)
    }
    write_atomic(folder / CHECKSUMS, json.dumps(content, indent=1))


def damage(folder: Path, without: str = " ") -> str:
    """Say what is wrong with the folder's files; empty if nothing is, or if it has no checksums. Those whose
    names begin with `without` do not matter."""
    try:
        known = {k: v for k, v in _read(folder / CHECKSUMS).items() if not k.startswith(without)}
    except ValueError:
        return f"{CHECKSUMS} is not readable"
    for name, file in known.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != file["bytes"]:
            return f"{name} has {size} bytes, {file['bytes']} were written"
    digests = _digests([folder / name for name in known])
    for (name, file), digest in zip(known.items(), digests, strict=True):
        if digest != file["sha256"]:
            return f"{name} is corrupt: its SHA-256 differs"
    return ""


def _digests(files: list[Path]) -> list[str]:
    """The SHA-256 of each file; hashing releases the GIL."""

    def sha256(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(sha256, files))


def sweep(run_dir: Path) -> None:
    """Remove this user's folders in shared memory and under `run_dir` whose owner is dead."""
    for folder in (*shared().glob(f"{PREFIX}*"), *run_dir.glob(f"{PREFIX}*")):
        try:
            with (folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner is alive, or has not locked it yet


def shared() -> Path:
    """Shared memory, or the folder for temporary files where there is none that can be written."""
    return SHARED if os.access(SHARED, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def own_folder(where: Path) -> tuple[Path, IO[str]]:
    """A new folder of this process under `where`, and its lock; `sweep` may remove it once that is closed,
    as by the death of the process."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    aside = folder / "lock.part"
    lock = aside.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    aside.rename(folder / "lock")  # locked before another's sweep can find it
    return folder, lock
