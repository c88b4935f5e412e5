"""Promises of `python -m trainer.scaling fit`: a curve with its flags, as text, JSON and picture."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from helpers.logs import write_csv
from simulated import PAPER, falling, simulated, write

from trainer.scaling import Sigmoid, fit


def write_curve(name: str, last: float = 16_000) -> str:
    c = np.linspace(500, last, 30)
    return str(write_csv(Path(name), {"gpu_hours": c.tolist(), "val_reward": PAPER.reward(c).tolist()}))


def test_it_fits_anyones_csv(command: Command) -> None:
    run = write_curve("theirs.csv")
    text = command(f"fit {run} --r0 0.3 --json fit.json --plot c.svg")
    result = text.json[run]
    for name, truth in (("A", 0.61), ("B", 1.92), ("C_mid", 2542), ("R0", 0.30)):
        assert set(result[name]) == {"value", "low", "high"}
        assert result[name]["value"] == pytest.approx(truth, rel=2e-3 if name == "A" else 0.02)
    assert result["at_2x"]["value"] == pytest.approx(float(PAPER.reward(32_000)), abs=1e-3)
    assert result["flags"] == [] and result["identified"] is True
    assert (result["unit"], result["R0_source"], result["points"]) == ("GPU-hours", "given", 30)
    assert result["compute_range"] == [500, 16_000]
    assert result["source"]["reward"] == "'val_reward'" and result["noise"] and result["data_hash"]
    keys = list(result)  # the answer comes first, the band last
    assert keys.index("identified") < keys.index("A") < keys.index("r2") < keys.index("source")
    assert keys[-1] == "band" and result["r2"] == pytest.approx(1) and result["source"]["notes"] == []
    of_a_run = list(fit(range(1, 7), [0.1, 0.2, 0.3, 0.4, 0.45, 0.5], R0=0.0).to_json())  # its fit.json
    assert of_a_run[0] == "identified" and of_a_run[-1] == "band"
    assert text.index("ceiling     A     0.61") < text.index("R(C) =") and "R² 1.000" in text
    assert "C: 'gpu_hours', in GPU-hours. R: 'val_reward'. Standard errors: none, estimated" in text.words
    assert Path("c.svg").stat().st_size > 1000
    assert max(map(len, text.splitlines())) <= 100


def test_the_level_and_the_limit_of_the_intervals_can_be_set(command: Command) -> None:
    run = write_curve("a.csv")
    for line in (f"fit {run}", f"predict {run} --at 20000"):
        text = command(f"{line} --json a.json --confidence 0.8 --within 1e-9 --r0 0.3")
        assert text.json[run]["confidence"] == 0.8 and text.json[run]["flags"] == ["wide"]
        assert "reaches further than 1e-09 from its value" in text.words


def test_a_reader_who_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does
    line = [sys.executable, "-m", "trainer.scaling", "fit", write_curve(f"{tmp_path}/a.csv")]
    line += ["--json", str(tmp_path / "fit.json")]  # written nonetheless
    done = subprocess.run(line, stdout=write_end, stderr=subprocess.PIPE, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
    assert (tmp_path / "fit.json").exists()


def test_ctrl_c_ends_it_without_a_traceback_and_the_loop_of_a_shell_with_it() -> None:
    """By the signal itself: a shell goes on after a program that ends with an exit code."""
    program = (
        "from trainer.scaling import __main__ as m; m.as_process(); import signal; signal.raise_signal(2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_two_runs_are_drawn_in_one_picture_and_three_are_a_table_with_details(command: Command) -> None:
    whole, short, fallen = write_curve("whole.csv"), write_curve("short.csv", 2500), Path("fallen.csv")
    inputs = f"{whole} {short} {write(fallen, falling())}"
    text = command(f"fit {inputs} --r0 0.3 --json fit.json")
    rows = {line.split()[0]: line for line in text.splitlines()[1:4]}
    assert re.match(r"whole +0\.61\d \(0\.\d{3}–0\.\d{3}\) +1\.9\d \(", rows["whole"])
    assert re.match(r"short +0\.\d{3}–(0|1)\.\d{3} ", rows["short"])  # a range alone
    assert re.match(r"fallen +– +– +– +0\.\d{3}", rows["fallen"])
    assert list(text.json) == inputs.split() and text.json[short]["compute_range"][1] == 2500
    assert "short: The ceiling A is not identified: " in text.words and "do not quote a value" in text.words
    assert "fallen: The ceiling A is not identified: the reward has fallen" in text.words
    assert f"{whole}, {short} C: 'gpu_hours', in GPU-hours. R: 'val_reward'." in text.words
    assert all(len(line) <= 79 for line in text.splitlines())
    assert command(f"fit {inputs} --r0 0.3 --details").count("R(C) = R0") == 3
    assert command(f"fit {whole} {short} --r0 0.3 --plot c.svg").count("R(C) = R0") == 2
    picture = Path("c.svg").read_text()
    assert "whole: A = " in picture and "short: A not identified" in picture


def test_of_a_run_that_has_fallen_nothing_is_forecast(command: Command) -> None:
    run = write(Path("fallen.csv"), falling())
    for line in (f"fit {run}", f"predict {run} --at 50000 --reach 0.5"):
        text = command(f"{line} --json f.json")
        result = text.json[run]
        assert "There is no forecast for such a run" in text.words and not result["identified"]
        assert "× the compute" not in text and "50,000" not in text
        assert result.get("at_2x") is None is result.get("at_10x") and not result.get("at")
        assert not result.get("reach")
        assert all(row[0] <= result["compute_range"][1] for row in result.get("band", ()))


def test_b_and_c_mid_are_ranges_where_they_are_determined_and_the_ceiling_is_not(command: Command) -> None:
    pilot = simulated(Sigmoid(0.30, 0.61, 2.0, 2542), np.arange(250.0, 4001, 250), 0.004, 3)
    vague = replace(pilot, points=pilot.points[:7])
    for curve, shown in ((pilot, True), (vague, False)):
        text = command(f"fit {write(Path('run.csv'), curve)}")
        assert "do not quote a value" in text.words and "ceiling     A" not in text
        assert bool(re.search(r"midpoint    C_mid \d,\d+ to \d,\d+ GPU-hours", text)) == shown
        assert ("  midpoint" in text) == shown
        assert re.search(r"efficiency  B     \d\.\d\d to \d\.\d\d\n", text)


def test_a_fit_that_assumes_a_sigmoid_against_the_points_says_so(command: Command) -> None:
    c = np.linspace(0, 8000, 33)
    capped = 0.3 + 0.3 * np.minimum(1, c / 3000) + np.random.default_rng(0).normal(0, 0.006, 33)
    run = write_csv(Path("cap.csv"), {"gpu_hours": c, "acc": capped, "acc_se": [0.006] * 33})
    plan = f"plan {run} --budgets 2 --evaluations 5 --runs 5"
    for line in (f"fit {run}", f"predict {run} --at 20000", plan):
        text = command(line).words
        assert "hard cap describes the points better than a sigmoid" in text and "assume" in text
        assert "efficiency" not in text
    assert "assumes a sigmoid" not in command(f"fit {write_curve('whole.csv')}").words


def test_the_evaluation_that_is_R0_is_not_counted(command: Command) -> None:
    for first, says in ((0, "from 9 evaluations after the start"), (1, "from 9 evaluations;")):
        c = range(first, 10)
        write_csv(Path("a.csv"), {"gpu_hours": c, "reward": [0.3 + 0.3 * x / (x + 4) for x in c]})
        assert says in command("fit a.csv").words


def test_families_are_compared_when_asked_for(command: Command) -> None:
    run = write_curve("a.csv")
    text = command(f"fit {run} --r0 0.3 --json fit.json --families")
    result = text.json[run]
    assert "ceiling     A" in text and result["identified"]
    rows = [re.split("  +", row.strip()) for row in text.split("parameters\n")[1].splitlines()[:5]]
    assert {row[0] for row in rows} == {f["family"] for f in result["families"]}
    assert {row[0] for row in rows} == {"sigmoid", "logistic", "power law", "log-power", "exponential"}
    ahead = [float(row[1]) for row in rows]  # the least error ahead comes first
    assert ahead == sorted(ahead) and next(row for row in rows if row[0] == "sigmoid")[2] == "+0.0"


def test_a_transient_is_left_out_when_asked_for(command: Command) -> None:
    run = simulated(PAPER, np.arange(250.0, 8001, 250), 0.003, 0)
    early = tuple(replace(p, pass_rate=p.pass_rate + 0.1 * np.exp(-p.compute / 500)) for p in run.points)
    write(Path("a.csv"), replace(run, points=early))
    assert "from 32 evaluations" in command("fit a.csv").words
    assert re.search(r"from (2\d|1\d) evaluations", command("fit a.csv --drop-early").words)
