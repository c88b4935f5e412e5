"""Executes the notebooks of examples/; `python tests/helpers/notebooks.py FILE...` writes their outputs."""

import base64
import hashlib
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
WIDTH, COLOURS = 1050, 48  # of a committed picture: pixels, palette


def executed(path: Path, folder: Path) -> Any:
    """The notebook after every cell has run, in `folder`; CellExecutionError names the first that fails."""
    notebook = nbformat.read(path, as_version=4)
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / ".ipython")}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=600, coalesce_streams=True, resources=resources)
    with patch.dict(os.environ, settings):  # IPython asks for its folder here, too
        client.execute()
    return notebook


def code(notebook: Any) -> list[Any]:
    """Its code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """A hash of its code, which is written beside the outputs that it gave."""
    return hashlib.sha256("\0".join(cell.source for cell in code(notebook)).encode()).hexdigest()


def seconds(notebook: Any) -> float:
    """The time that the outputs took to be made."""
    return float(sum(cell.metadata["seconds"] for cell in code(notebook)))


def texts(cell: Any) -> str:
    """What a cell has printed."""
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def _smaller(picture: str) -> str:
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def write(path: Path) -> None:
    """Execute a notebook in an empty folder; write it with its outputs, pictures made small, and times."""
    from datetime import datetime

    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(path, Path(folder))
    for cell in code(notebook):
        times = cell.metadata.pop("execution")
        began, ended = (datetime.fromisoformat(times[f"iopub.status.{x}"]) for x in ("busy", "idle"))
        cell.metadata["seconds"] = round((ended - began).total_seconds(), 1)
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _smaller(output.data["image/png"])
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "sources": digest(notebook)}
    path.write_text(nbformat.writes(notebook) + "\n")
    print(f"{path}: {seconds(notebook):.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
