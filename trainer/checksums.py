"""Checksums of a checkpoint's files: a truncated or corrupt one is found before a resume trusts it."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.jsonl import write_atomic

NAME = "checksums.json"  # in the folder of a checkpoint


def write_checksums(folder: Path) -> None:
    """Write size and SHA-256 of each file in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != NAME]
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_sha256, files)
        content = {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(files, digests, strict=True)
        }
    write_atomic(folder / NAME, json.dumps(content, indent=1))


def damage(folder: Path) -> str:
    """What is wrong with the folder's files, or nothing; nothing, too, if an older version wrote it."""
    try:
        known = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        return ""
    except ValueError:
        return f"{NAME} is not readable"
    for name, file in known.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != file["bytes"]:
            return f"{name} has {size} bytes, {file['bytes']} were written"
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_sha256, [folder / name for name in known])
        for (name, file), digest in zip(known.items(), digests, strict=True):
            if digest != file["sha256"]:
                return f"{name} is corrupt: its SHA-256 differs"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
