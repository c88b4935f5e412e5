"""Promises of `python -m trainer.scaling fit`: a curve and its flags, or one clear line of error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated import falling, simulated, write

from trainer.scaling import Sigmoid, fit
from trainer.scaling.__main__ import main
from trainer.scaling.layout import short_names

PAPER = Sigmoid(R0=0.30, A=0.61, B=1.92, C_mid=2542)  # Table 1 of 2510.13786; its R0 is not published


def write_curve(path: Path, last: float = 16_000, header: str = "gpu_hours,val_reward") -> Path:
    c = np.linspace(500, last, 30)
    rows = zip(c, PAPER.reward(c), strict=True)
    path.write_text(f"{header}\n" + "".join(f"{x},{r}\n" for x, r in rows))
    return path


def test_it_fits_anyones_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, picture = write_curve(tmp_path / "theirs.csv"), tmp_path / "fit.json", tmp_path / "c.svg"
    assert main(["fit", str(path), "--r0", "0.3", "--json", str(out), "--plot", str(picture)]) == 0
    result = json.loads(out.read_text())[str(path)]
    for name, truth in (("A", 0.61), ("B", 1.92), ("C_mid", 2542), ("R0", 0.30)):
        assert set(result[name]) == {"value", "low", "high"}
        assert result[name]["value"] == pytest.approx(truth, rel=0.02)
    assert result["flags"] == [] and result["identified"] is True
    assert (result["unit"], result["R0_source"], result["points"]) == ("GPU-hours", "given", 30)
    assert result["compute_range"] == [500, 16_000]
    assert result["source"]["reward"] == "'val_reward'" and result["noise"] and result["data_hash"]
    keys = list(result)  # the answer comes first, the band last
    assert keys.index("identified") < keys.index("A") < keys.index("r2") < keys.index("source")
    assert keys[-1] == "band" and result["r2"] == pytest.approx(1) and result["source"]["notes"] == []
    of_a_run = list(
        fit([1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.45, 0.5], R0=0.0).to_json()
    )  # its fit.json
    assert of_a_run[0] == "identified" and of_a_run[-1] == "band"
    text = capsys.readouterr().out
    assert text.index("ceiling     A") < text.index("R(C) =") and "R² 1.000" in text
    assert (
        "C: 'gpu_hours', in GPU-hours. R: 'val_reward'. Standard errors: none, estimated from the residuals."
        in " ".join(text.split())
    )
    assert "ceiling     A     0.61" in text and picture.stat().st_size > 1000
    assert max(map(len, text.splitlines())) <= 100


def test_the_level_and_the_limit_of_the_intervals_can_be_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_curve(tmp_path / "a.csv"), tmp_path / "a.json"
    options = ["--confidence", "0.8", "--within", "1e-9", "--r0", "0.3"]
    for command in ("fit", "predict"):
        ahead = ["--at", "20000"] if command == "predict" else []
        assert main([command, str(path), "--json", str(out), *options, *ahead]) == 0
        result = json.loads(out.read_text())[str(path)]
        assert result["confidence"] == 0.8 and result["flags"] == ["wide"]
        assert "reaches further than 1e-09 from its value" in " ".join(capsys.readouterr().out.split())


def test_several_inputs_are_fitted_and_drawn_in_one_picture(tmp_path: Path) -> None:
    a, b = write_curve(tmp_path / "a.csv"), write_curve(tmp_path / "b.csv", 8000)
    out = tmp_path / "fit.json"
    assert main(["fit", str(a), str(b), "--json", str(out), "--plot", str(tmp_path / "c.svg")]) == 0
    result = json.loads(out.read_text())
    assert list(result) == [str(a), str(b)] and result[str(b)]["compute_range"][1] == 8000
    text = (tmp_path / "c.svg").read_text()
    assert "a: A = " in text and "b: A = " in text


def test_runs_of_one_file_are_called_by_their_own_names() -> None:
    assert short_names(["a/chart.csv: grpo", "a/chart.csv: cispo"]) == ["grpo", "cispo"]
    assert short_names(["a/chart.csv: grpo", "b/chart.csv: grpo"]) != ["grpo", "grpo"]
    assert short_names(["a/one.csv", "a/two.csv"]) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("step,reward\n1,.2\n", [], "there is one point; expected several"),
        ("step,reward\n0,.2\n", [], "there is one point; expected several"),
        ("step,reward\n1,nan\n2,x\n", [], "row 2: 'reward' is 'x'; expected a number"),
        ("step,reward\n1,.2\n2,.3\n", ["--json", "/nowhere/f.json"], "there is no folder /nowhere"),
        ("step,reward\n1,.2\n2,.3\n", ["--plot", "c.txt"], "expected a name ending in .png or .svg or .pdf"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    text: str, options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.csv").write_text(text)
    assert main(["fit", str(tmp_path / "x.csv"), *options]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and err.startswith("error: ")


def test_a_reader_who_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does
    command = [sys.executable, "-m", "trainer.scaling", "fit", str(write_curve(tmp_path / "a.csv"))]
    command += ["--json", str(tmp_path / "fit.json")]  # written nonetheless
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
    assert (tmp_path / "fit.json").exists()


def test_a_run_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, other = write_curve(tmp_path / "a.csv"), write_curve(tmp_path / "c.csv", last=8_000)
    copy = tmp_path / "copy.csv"
    copy.write_text(a.read_text())
    for inputs in (
        [f"x={a}", f"y={a}"],
        [a, copy],
        [f"x={a},{other}", f"y={copy}"],
        [f"x={a},{a}", f"y={other}"],
    ):
        assert main(["compare", *map(str, inputs)]) == 2
        err = capsys.readouterr().err
        assert "expected each run once" in err and str(a) in err and err.count("\n") == 1


def test_three_runs_are_a_table_and_their_details_are_to_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, short = write_curve(tmp_path / "whole.csv"), write_curve(tmp_path / "short.csv", 2500)
    fallen = write(tmp_path / "fallen.csv", falling())
    inputs = [str(whole), str(short), fallen]
    assert main(["fit", *inputs, "--r0", "0.3"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line for line in text.splitlines()[1:4]}
    assert re.match(r"whole +0\.61\d \(0\.\d{3}–0\.\d{3}\) +1\.9\d \(", rows["whole"])
    assert re.match(r"short +0\.\d{3}–(0|1)\.\d{3} ", rows["short"])  # a range alone
    assert re.match(r"fallen +– +– +– +0\.\d{3}", rows["fallen"])
    joined = " ".join(text.split())
    assert "short: The ceiling A is not identified: " in joined and "do not quote a value" in joined
    assert "fallen: The ceiling A is not identified: the reward has fallen" in joined
    assert f"{whole}, {short} C: 'gpu_hours', in GPU-hours. R: 'val_reward'." in joined
    assert all(len(line) <= 79 for line in text.splitlines() if str(tmp_path) not in line)
    assert main(["fit", *inputs, "--r0", "0.3", "--details"]) == 0
    details = capsys.readouterr().out
    assert details.count("R(C) = R0") == 3 and main(["fit", *inputs[:2], "--r0", "0.3"]) == 0
    assert capsys.readouterr().out.count("R(C) = R0") == 2


def test_of_a_run_that_has_fallen_nothing_is_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write(tmp_path / "fallen.csv", falling()), tmp_path / "fit.json"
    assert main(["fit", run, "--json", str(out)]) == 0
    text, result = capsys.readouterr().out, json.loads(out.read_text())[run]
    assert "There is no forecast for such a run" in " ".join(text.split()) and "× the compute" not in text
    assert result["at_2x"] is None is result["at_10x"]
    assert max(row[0] for row in result["band"]) <= result["compute_range"][1]


def test_b_and_c_mid_are_ranges_where_they_are_determined_and_the_ceiling_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pilot = simulated(Sigmoid(0.30, 0.61, 2.0, 2542), np.arange(250.0, 4001, 250), 0.004, 3)
    vague = replace(pilot, points=pilot.points[:7])
    for curve, shown in ((pilot, True), (vague, False)):
        assert main(["fit", write(tmp_path / "run.csv", curve)]) == 0
        text = capsys.readouterr().out
        assert "do not quote a value" in " ".join(text.split()) and "ceiling     A" not in text
        assert bool(re.search(r"midpoint    C_mid \d,\d+ to \d,\d+ GPU-hours", text)) == shown
        assert ("  midpoint" in text) == shown
        assert re.search(r"efficiency  B     \d\.\d\d to \d\.\d\d\n", text)


def test_a_fit_that_assumes_a_sigmoid_against_the_points_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c = np.linspace(0, 8000, 33)
    capped = 0.3 + 0.3 * np.minimum(1, c / 3000) + np.random.default_rng(0).normal(0, 0.006, 33)
    rows = "".join(f"{x},{r},0.006\n" for x, r in zip(c, capped, strict=True))
    (tmp_path / "cap.csv").write_text(f"gpu_hours,acc,acc_se\n{rows}")
    run = str(tmp_path / "cap.csv")
    plan = ["plan", run, "--budgets", "2", "--evaluations", "5", "--runs", "5"]
    for command in (["fit", run], ["predict", run, "--at", "20000"], plan):
        assert main(command) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "hard cap describes the points better than a sigmoid" in text and "assume" in text
        assert "efficiency" not in text
    assert main(["fit", str(write_curve(tmp_path / "whole.csv"))]) == 0
    assert "assumes a sigmoid" not in " ".join(capsys.readouterr().out.split())


def test_an_unknown_option_names_the_command_and_its_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(tmp_path / "a.csv"), "--rewardcolumn", "x"]) == 2
    says = "fit has no --rewardcolumn x; see python -m trainer.scaling fit --help"
    assert says in capsys.readouterr().err


def test_the_evaluation_that_is_R0_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{c},{0.3 + 0.3 * c / (c + 4)}" for c in range(10)]
    (tmp_path / "a.csv").write_text("\n".join(["gpu_hours,reward", *rows]) + "\n")
    assert main(["fit", str(tmp_path / "a.csv")]) == 0
    assert "from 9 evaluations after the start" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "a.csv").write_text("\n".join(["gpu_hours,reward", *rows[1:]]) + "\n")
    assert main(["fit", str(tmp_path / "a.csv")]) == 0
    assert "from 9 evaluations;" in " ".join(capsys.readouterr().out.split())


def test_families_are_compared_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_curve(tmp_path / "a.csv"), tmp_path / "fit.json"
    assert main(["fit", str(path), "--r0", "0.3", "--json", str(out), "--families"]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())[str(path)]
    assert "ceiling     A" in printed and result["identified"]
    rows = [re.split("  +", row.strip()) for row in printed.split("parameters\n")[1].splitlines()[:5]]
    assert {row[0] for row in rows} == {f["family"] for f in result["families"]}
    assert {row[0] for row in rows} == {"sigmoid", "logistic", "power law", "log-power", "exponential"}
    ahead = [float(row[1]) for row in rows]  # the least error ahead comes first
    assert ahead == sorted(ahead) and next(row for row in rows if row[0] == "sigmoid")[2] == "+0.0"
    assert main(["fit", str(path), "--families", "--drop-before", "14500"]) == 2
    assert "3 points beyond R0; to compare families" in capsys.readouterr().err


def test_a_transient_is_left_out_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = simulated(PAPER, np.arange(250.0, 8001, 250), 0.003, 0)
    early = tuple(replace(p, pass_rate=p.pass_rate + 0.1 * np.exp(-p.compute / 500)) for p in run.points)
    path, points = write(tmp_path / "a.csv", replace(run, points=early)), []
    for more in ([], ["--drop-early"]):
        assert main(["fit", path, *more]) == 0
        points.append(
            int(re.findall(r"from (\d+) evaluations", " ".join(capsys.readouterr().out.split()))[0])
        )
    assert points[0] == 32 > points[1]
