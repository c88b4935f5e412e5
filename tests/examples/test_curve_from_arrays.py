"""The promises of examples/curve_from_arrays.py: it prints a fit, a comparison and a prediction."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import curve_from_arrays

ROOT = Path(__file__).parents[2]


def test_it_fits_compares_and_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    curve_from_arrays.main()
    text = capsys.readouterr().out
    assert "ceiling     A     0.6" in text and "The ceilings are different: A +0.09" in text
    low, high = map(float, re.findall(r"at 24,000 GPU-hours: (0\.\d+) to (0\.\d+)", text)[0])
    assert low < 0.3 + 0.31 / (1 + (2500 / 24_000) ** 2) < high  # the truth, by hand


def test_it_needs_no_torch() -> None:
    code = "import sys; from examples import curve_from_arrays as e; e.main(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("\nFalse\n"), done.stderr
