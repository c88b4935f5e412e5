"""The promise of examples/runs: every script starts what its head says, with settings that exist."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "runs").glob("*.sh"))
CURVES = "curve_of_other_trainers.sh"  # reads finished runs: it has no --dry-run, and takes seconds


def run(script: Path, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The script in a copy of its folder, so that what it writes stays in `home`."""
    copied = shutil.copytree(script.parent, home / "examples" / "runs") / script.name
    env = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7" if "8gpu" in script.name else "",
    }
    return subprocess.run(["bash", copied, *args], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name != CURVES], ids=lambda s: s.stem)
def test_a_dry_run_of_every_script_accepts_its_settings(script: Path, tmp_path: Path) -> None:
    done = run(script, tmp_path, "--dry-run")
    assert done.returncode == 0 and "memory:" in done.stdout, done.stderr
    own = "note: recipe own: ScaleRL with the sizes of a first run; --recipe chooses another"
    vllm = "note: vLLM is not installed here: the run would be refused; --engine.kind torch does without"
    # None about settings that may not be meant:
    assert {*done.stderr.splitlines()} <= ({own, vllm} if "8gpu" in script.name else {own})


@pytest.mark.slow
def test_the_curve_of_a_table_is_fitted_predicted_and_drawn(tmp_path: Path) -> None:
    done = run(ROOT / "examples" / "runs" / CURVES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ceiling     A     0.6" in done.stdout and (tmp_path / "runs" / "curve.html").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_every_script_says_what_it_needs_and_stops_at_the_first_error(script: Path) -> None:
    text = script.read_text()
    head = text.partition("set -euo pipefail\n")[0]
    assert head != text and "Needs: " in head and "# Time: " in head
    assert os.access(script, os.X_OK) and script.name in (ROOT / "docs" / "measured.md").read_text()
