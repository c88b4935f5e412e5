"""The promises of the notebooks of examples/: the outputs in them are of their cells, and come again.

tests/wheel/in_an_empty_folder.py executes first_curve.ipynb, from the wheel.
"""

import base64
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="nbclient is missing: requirements/examples.txt")

import nbformat
from notebooks import ROOT, code, digest, executed, seconds, texts

FIRST, CURVES = (ROOT / "examples" / f"{name}.ipynb" for name in ("first_curve", "curves"))
AGAIN = "write it again: python tests/helpers/notebooks.py {}"


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize(
    ("path", "limit"), [(FIRST, 300), (CURVES, 60)], ids=lambda x: getattr(x, "stem", None)
)
def test_the_outputs_are_of_these_cells_small_and_made_in_time(path: Path, limit: float) -> None:
    notebook = read(path)
    assert notebook.metadata["sources"] == digest(notebook), AGAIN.format(path)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert seconds(notebook) < limit and path.stat().st_size < 400_000
    text = path.read_text()
    assert "/tmp" not in text and "/root" not in text and str(ROOT) not in text
    outputs = [output for cell in code(notebook) for output in cell.outputs if "data" in output]
    pictures = [base64.b64decode(o.data["image/png"]) for o in outputs if "image/png" in o.data]
    assert len(pictures) == 2 and all(picture.startswith(b"\x89PNG") for picture in pictures)


def words(text: str) -> tuple[list[str], list[float]]:
    """A text's words without its numbers, and the numbers, which differ a little between CPUs."""
    number = r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?"
    return re.sub(number, "#", text).split(), [float(x.replace(",", "")) for x in re.findall(number, text)]


@pytest.mark.slow
def test_the_notebook_of_logs_prints_what_it_shows(tmp_path: Path) -> None:
    shown, now = (code(notebook) for notebook in (read(CURVES), executed(CURVES, tmp_path)))
    for before, after in zip(shown, now, strict=True):
        (said, numbers), (says, expected) = words(texts(after)), words(texts(before))
        assert said == says and numbers == pytest.approx(expected, rel=0.05, abs=0.02), AGAIN.format(CURVES)
    assert "data:" in (tmp_path / "report.html").read_text()
