"""Runs the commands of docs/curve.md: `python tests/helpers/guide.py` puts the outputs below them."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "curve.md"
EXAMPLE = re.compile(r"<!-- example -->\n```python\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"```console\n\$ (.*?)\n.*?```", re.DOTALL)


def output(command: str, folder: Path) -> str:
    """What a command of the guide prints in `folder`. CalledProcessError: it fails."""
    python, *words = shlex.split(command)
    assert python == "python", command
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.check_output([sys.executable, *words], cwd=folder, env=environment, text=True).rstrip()


def main() -> None:
    """Write the page with the outputs of its commands, on the files that its example writes."""
    text = DOCUMENT.read_text()
    (example,) = EXAMPLE.findall(text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "example.py").write_text(example)
        output("python example.py", folder)
        new = BLOCK.sub(lambda m: f"```console\n$ {m.group(1)}\n{output(m.group(1), folder)}\n```", text)
    DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()
