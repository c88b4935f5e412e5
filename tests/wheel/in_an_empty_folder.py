"""Promises of the wheel of sigmoid-rl: in an empty folder of a fresh environment its commands are all there.

`make test-wheel` runs this after the tests of the other wheel, without the checkout.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_curve.ipynb"
COMMAND = Path(sys.prefix) / "bin" / "sigmoid-rl"
SHORT = "--pipeline.steps 2 --pipeline.prompts_per_step 4 --data.held_out 16 --evaluation.samples 2"


def call(folder: Path, *words: str, seconds: float = 900.0) -> str:
    command = [COMMAND, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_checkout_is_not_on_the_path() -> None:
    spec = importlib.util.find_spec("trainer")
    assert spec and spec.origin and Path(spec.origin).is_relative_to(sys.prefix)


@pytest.mark.parametrize("name", ["evaluate", "serve", "sweep", "fit", "report", "doctor", "view", "merge"])
def test_commands_explain_themselves(name: str, tmp_path: Path) -> None:
    assert call(tmp_path, name, "--help").startswith("usage: ")


def test_it_trains_to_the_end_and_what_it_wrote_can_be_looked_at(tmp_path: Path) -> None:
    text = call(tmp_path, "train", *SHORT.split())
    run = tmp_path / "runs" / "demo-0"
    assert "held-out pass rate" in text and "what next" in text and (run / "report.html").is_file()
    assert json.loads((run / "ended.json").read_text())["by"] == "steps"
    assert "1 of" not in call(tmp_path, "doctor")
    call(tmp_path, "view", str(run), "--export", "page.html")
    assert "Reward over compute" in (tmp_path / "page.html").read_text()


def test_the_first_notebook_trains_forecasts_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for name, value in (("STEPS", "20"), ("OMP_NUM_THREADS", "1"), ("IPYTHONDIR", str(tmp_path / "ipython"))):
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=1200, coalesce_streams=True, resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("data" in output for output in outputs) == 2  # its pictures
    for run in (tmp_path / "first-curve" / name for name in ("scalerl", "grpo")):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines if "eval/pass_rate" in line] == list(range(21))
        assert json.loads((run / "ended.json").read_text())["by"] == "steps"
    printed = "\n".join(output.text for output in outputs if output.output_type == "stream")
    assert printed.count("evaluation at step 20:") == 2 and "the range." in printed
    assert "scalerl against grpo" in printed and (tmp_path / "first-curve" / "both.png").stat().st_size
