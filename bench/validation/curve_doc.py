"""Runs the commands of docs/curve.md, one after the other, and puts their output below them.

python -m bench.validation.curve_doc              prints the page
python -m bench.validation.curve_doc --record     writes it over docs/curve.md
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import records
from bench.records import ROOT

DOCUMENT = ROOT / "docs" / "curve.md"
EXAMPLE = re.compile(r"<!-- example -->\n```python\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"```console\n\$ (.*?)\n.*?```", re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """The commands of a document, in their order."""
    return (block.group(1) for block in BLOCK.finditer(text))


def run(command: str, folder: Path) -> str:
    """The output of a command of the document; SystemExit if it fails."""
    python, *rest = shlex.split(command)
    assert python == "python", command
    process = subprocess.run(
        [sys.executable, *rest], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if process.returncode:
        raise SystemExit(f"$ {command}\n{process.stdout}{process.stderr}")
    return process.stdout.rstrip()


def prepare(text: str, folder: Path) -> None:
    """Write the example's files."""
    (example,) = EXAMPLE.findall(text)
    (folder / "example.py").write_text(example)
    run("python example.py", folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    parser = records.parser("validation.curve_doc", __doc__)
    parser.add_argument("--record", action="store_true", help="write over docs/curve.md")
    args = parser.parse_args(argv)
    text = DOCUMENT.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(text, folder)
        page = BLOCK.sub(lambda m: f"```console\n$ {m.group(1)}\n{run(m.group(1), folder)}\n```", text)
    if args.record:
        DOCUMENT.write_text(page)
    else:
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
