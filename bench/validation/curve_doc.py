"""Runs the commands of docs/curve.md, and puts their output below them. [2 min]

python -m bench validation.curve_doc              prints the page
python -m bench validation.curve_doc --record     writes it over docs/curve.md
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Case, Row

OPTIONS: dict[str, Any] = {}
DOCUMENT = ROOT / "docs" / "curve.md"
EXAMPLE = re.compile(r"<!-- example -->\n```python\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"```console\n\$ (.*?)\n.*?```", re.DOTALL)


def run(command: str, folder: Path) -> str:
    """The output of a command of the document. RuntimeError: it fails."""
    python, *rest = shlex.split(command)
    assert python == "python", command
    process = subprocess.run(
        [sys.executable, *rest], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"$ {command}\n{process.stdout}{process.stderr}")
    return process.stdout.rstrip()


def page() -> Row:
    """The document with the outputs of its commands, on the files that its example writes."""
    text = DOCUMENT.read_text()
    (example,) = EXAMPLE.findall(text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "example.py").write_text(example)
        run("python example.py", folder)
        new = BLOCK.sub(lambda m: f"```console\n$ {m.group(1)}\n{run(m.group(1), folder)}\n```", text)
    return {"text": new}


def cases(options: Namespace) -> Iterator[Case]:
    """The page is one case."""
    yield "page", page


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The page."""
    return str(rows[0]["text"])


def publish(head: Row, rows: Sequence[Row]) -> None:
    """Write it."""
    DOCUMENT.write_text(describe(head, rows))
