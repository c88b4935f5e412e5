"""Runs the commands of docs/curve.md, one after the other, and writes what they print below them.

python -m bench.validation.curve_doc
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.measure import ROOT

DOCUMENT = ROOT / "docs" / "curve.md"
EXAMPLE = re.compile(r"<!-- example -->\n```python\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"```console\n\$ (.*?)\n.*?```", re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """The commands of a document, in their order."""
    return (found.group(1) for found in BLOCK.finditer(text))


def run(command: str, folder: Path) -> str:
    """What a command of the document prints there. Its failure is an error."""
    python, *rest = shlex.split(command)
    assert python == "python", command
    done = subprocess.run(
        [sys.executable, *rest], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"$ {command}\n{done.stdout}{done.stderr}")
    return done.stdout.rstrip()


def prepare(text: str, folder: Path) -> None:
    """The example's files."""
    (example,) = EXAMPLE.findall(text)
    (folder / "example.py").write_text(example)
    run("python example.py", folder)


def main() -> None:
    """Fill the document in."""
    text = DOCUMENT.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(text, folder)
        DOCUMENT.write_text(
            BLOCK.sub(lambda m: f"```console\n$ {m.group(1)}\n{run(m.group(1), folder)}\n```", text)
        )


if __name__ == "__main__":
    main()
