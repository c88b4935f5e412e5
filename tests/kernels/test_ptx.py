"""The Triton kernels' compiled code, run on the CPU: its results, and each of its barriers taken out.

`tests/helpers/ptx.py` says how PTX is run, `tests/helpers/ptx_cases.py` what.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]


@cache
def report(pattern: str, seeds: int, barriers: bool) -> dict[str, Any]:
    """The output of `tests/helpers/ptx_cases.py`: errors and removed barriers of each case."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )  # fmt: skip
    command = [sys.executable, ROOT / "tests/helpers/ptx_cases.py", pattern, str(seeds), str(int(barriers))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    cases: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return cases


def test_compiled_row_statistics_are_float64s_under_any_schedule_and_need_each_barrier() -> None:
    cases = report("^row_stats$", 4, True)
    assert [len(case["errors"]) for case in cases.values()] == [4]
    for name, case in cases.items():
        assert max(case["errors"]) < 1, name
        for kernel, removed in case["removed"].items():
            assert removed and set(removed) == {"race"}, (name, kernel, removed)
