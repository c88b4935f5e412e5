"""Promises of the cross-checks of `fit`: each that is asked for is in the text and in the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.scaling import Sigmoid
from trainer.scaling.__main__ import main
from trainer.scaling.curve.paper import PaperGrid, paper_fit

PAPER = Sigmoid(R0=0.30, A=0.61, B=1.92, C_mid=2542)  # Table 1 of 2510.13786; its R0 is not published
COMPUTE = np.arange(1500, 16001, 500.0)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    reward = PAPER.reward(COMPUTE) + np.random.default_rng(0).normal(0, 0.005, len(COMPUTE))
    lines = (f"{c},{r}" for c, r in zip(COMPUTE, reward, strict=True))
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["gpu_hours,val_reward", *lines]))
    return path


def fitted(table: Path, *argv: str) -> dict[str, Any]:
    out = table.parent / "fit.json"
    assert main(["fit", str(table), "--r0", "0.3", "--json", str(out), *argv]) == 0
    found: dict[str, Any] = json.loads(out.read_text())[str(table)]
    return found


def test_the_papers_procedure_replaces_ours(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fitted(table, "--procedure", "paper", "--paper-A", "0.5", "0.7", "0.01",
                   "--paper-c-mid", "100", "4000", "100")  # fmt: skip
    reward = np.loadtxt(table, delimiter=",", skiprows=1)[:, 1]
    same = paper_fit(COMPUTE, reward, 0.3, PaperGrid((0.5, 0.7, 0.01), (100, 4000, 100)))
    assert {k: found[k]["value"] for k in ("A", "B", "C_mid", "R0")} == {
        "A": same.A, "B": same.B, "C_mid": same.C_mid, "R0": 0.3,
    }  # fmt: skip
    assert found["procedure"] == "paper" and found["A"]["low"] is None and found["flags"] == []
    assert found["grid"] == {"A": [0.5, 0.7, 0.01], "C_mid": [100, 4000, 100], "spacing": "linear"}
    printed = capsys.readouterr().out
    assert f"A {same.A:.3f}, B {same.B:.2f}, C_mid {same.C_mid:,.0f} GPU-hours" in printed
    assert "ceiling" not in printed  # of our fit


def test_families_are_compared_when_asked_for(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fitted(table, "--families")
    printed = capsys.readouterr().out
    assert "ceiling     A" in printed and found["procedure"] == "ours" and found["A"]["low"] < 0.61
    names = [f["family"] for f in found["families"]]
    assert set(names) == {"sigmoid", "logistic", "power law", "log-power", "exponential"}
    rows = printed.split("parameters\n")[1].splitlines()[:5]  # the least error ahead comes first
    ahead = [float(row[13:].split()[0]) for row in rows]
    assert ahead == sorted(ahead) and {row[2:13].strip() for row in rows} == set(names)
    assert "+0.0" in next(row for row in rows if row.startswith("  sigmoid"))  # the best by AICc


def test_families_are_left_out_unless_asked_for(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "families" not in fitted(table)
    assert "Families" not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--profile"], ["--bootstrap", "300"]])
def test_flags_that_are_gone_are_an_error(
    table: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fit", str(table), *argv])
    assert f"fit has no {' '.join(argv)}; see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--procedure", "paper"], "needs R0: a point at compute 0, or --r0"),
        (["--procedure", "paper", "--r0", ".3", "--unit", "core-hours"], "set --paper-c-mid LOW HIGH N"),
        (
            ["--procedure", "paper", "--r0", ".3", "--paper-c-mid", "9", "3", "5"],
            "grid of C_mid is (9.0, 3.0",
        ),
        (["--procedure", "paper", "--r0", ".3", "--plot", "x.png"], "--plot shows the intervals of"),
        (["--drop-before", "14500", "--families"], "4 points beyond R0; to compare families"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    table: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(table), *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
