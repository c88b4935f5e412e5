"""The promises of examples/curve_from_arrays.py: it prints a fit, a comparison and a prediction."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = "import sys; from examples import curve_from_arrays as e; e.main(); print('torch' in sys.modules)"


def test_it_fits_compares_and_predicts_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    text = done.stdout
    assert "ceiling     A     0.6" in text and "The ceilings are different: A +0.09" in text, done.stderr
    low, high = map(float, re.findall(r"at 24,000 GPU-hours: (0\.\d+) to (0\.\d+)", text)[0])
    assert low < 0.3 + 0.31 / (1 + (2500 / 24_000) ** 2) < high  # the truth, by hand
    assert text.endswith("\nFalse\n")
