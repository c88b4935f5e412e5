"""Promise of every command: wrong use is one line that says what was expected, and exit code 2."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import command_in_current_folder
from simulated import falling, simulated, with_rewards, write

from trainer.scaling import Sigmoid

LAW = Sigmoid(R0=0.30, A=0.61, B=2.0, C_mid=2500)
SIZES = "across 1B=full.csv 3B=low.csv"
ASSUMED = "plan --c-mid 9 --r0 .3"
KERNEL = "predict full.csv --at 1 --kernel ours --measured-with"
WRONG = {
    "compare full.csv": "there is only one recipe",
    "fit full.csv --conf .8": "fit has no --conf .8",  # and not taken for --confidence
    "compare full.csv few.csv": "few.csv: there are fewer than 5 evaluations",
    "compare full.csv =few.csv": "expected NAME=RUN",
    "compare a=full.csv a=few.csv": "'a' names two groups",
    "compare full.csv steps.csv": "different units",
    "compare full.csv few.csv --at 0": "--at: 0 is out of range; expected above 0",
    "compare full.csv few.csv --plot x.txt": "expected a name ending in .png or .svg or .pdf",
    "compare x=full.csv y=full.csv": "expected each run once",
    "compare full.csv copy.csv": "expected each run once",
    "compare x=full.csv,low.csv y=copy.csv": "expected each run once",
    "compare x=full.csv,full.csv y=low.csv": "expected each run once",
    "across full.csv 3B=low.csv 8B=c.csv --size 9B": "full.csv: expected its size before it, as in 8B=full",
    "across small=full.csv 3B=low.csv 8B=c.csv --size 30B": "'small' is no size",
    "across 0B=full.csv 3B=low.csv 8B=c.csv --size 30B": "'0B' is no size",
    f"{SIZES} 8B=c.csv --size big": "'big' is no size",
    f"{SIZES} 8B=c.csv --size -3": "'-3' is no size",
    "across 1B=full.csv 1e9=low.csv 8B=c.csv --size 30B": "the sizes 1B and 1e9 are the same",
    f"{SIZES} 8B=c.csv --size 8000M": "the sizes 8B and 8000M are the same",
    f"{SIZES} 8B=full.csv --size 30B": "the same points twice",
    f"{SIZES} 8B=c.csv --size 30": "sizes from 30 to 8B; expected all in one",
    "across 1B=full.csv --size 30B": "can be used: 1; expected at least 3",
    f"{SIZES} --size 30B": "can be used: 1, without low.csv (t",
    f"{SIZES} 8B=steps.csv --size 30B": "different units",
    f"{SIZES} 8B=c.csv --size 30B --at 0": "--at: 0 is out of range",
    f"{SIZES} 8B=c.csv --size 30B --json x.txt": "ending in .json",
    "plan": "--c-mid and --r0",
    "plan --c-mid 9 --r0 .6": "expected 0 ≤ R0 < low",
    "plan --c-mid 0 --r0 .3": "--c-mid: 0 is out of range",
    "plan --c-mid inf --r0 .3": "--c-mid: inf is out of range",
    "plan --c-mid 1e305 --r0 .3": "--c-mid: 1e305 is out of range",
    "plan --c-mid 9 3 --r0 .3": "--c-mid 9 3: expected a compute above 0, or LOW HIGH",
    "plan --c-mid 1 2 3 --r0 .3": "--c-mid 1 2 3: expected a compute above 0, or LOW HIGH",
    f"{ASSUMED} --autocorrelation 1": "--autocorrelation: 1 is out of range",
    f"{ASSUMED} --evaluations 4": "--evaluations 4: expected 5 or more",
    f"{ASSUMED} --noise 0": "--noise: 0",
    f"{ASSUMED} --runs 2": "--runs: 2",
    f"{ASSUMED} --samples 8 --drop-before 2": "--samples, --drop-before: only for reading a pilot, and there",
    "plan falling.csv --autocorrelation .5": "--autocorrelation is for planning without a pilot",
    "plan falling.csv --c-mid 3": "--c-mid is for planning without a pilot",
    "plan falling.csv --a .5 .6": "--a is for planning without a pilot",
    "plan falling.csv --budgets 1": "--budgets 1: expected more than 1",
    "plan falling.csv": "fallen from its peak",
    "plan low.csv": "below the curve: a collapse, or a bad evaluation; evaluate it again",
    "plan few.csv few.csv": "fewer than 5",
    "plan jump.csv falling.csv": "a sigmoid does not describe this pilot",
    "plan jump.csv": "a sigmoid does not describe this pilot",
    "plan flat.csv": "it cannot be said when the reward will rise",
    "plan zeros.csv": "it cannot be said when the reward will rise",
    "plan unsure.csv": "error: unsure.csv: fit: R0's standard error is 5.0",
    "plan exact.csv": "give --noise",
    "predict full.csv": "give --at BUDGET",
    "predict few.csv --at 1": "few.csv: there are fewer than 5",
    "predict full.csv --at -1": "--at: -1 is out of range; expected above 0",
    "predict full.csv --reach 55": "--reach 55: expected a reward above 0, up to 1; for rewards",
    "predict full.csv --reach 55 --reward-range -1 1": "above -1, up to 1; the scale of --reward-range",
    "predict full.csv --at 1 --price 0": "--price: 0",
    "predict full.csv --at 1 --kernel ours": "need each other",
    "predict full.csv --at 1 --kernel-rates full.csv": "without --kernel",
    "predict steps.csv --at 1 --kernel ours --measured-with naive": "compute is in steps",
    f"{KERNEL} naive --model 9b": "--model '9b'",
    f"{KERNEL} peer --kernel-rates x.json": "expected the --out of `python -m bench kernels.compare`",
    "fit one.csv": "there is one point; expected several",
    "fit start.csv": "there is one point; expected several",
    "fit infinite.csv": "held out. Evaluations without a finite reward, which are left out: 1.",
    "fit late.csv": "compute. Computes with several evaluations, of which R is the mean: 1.",
    "fit alone.csv": "recognized as compute; add the steps, or the compute",
    "fit full.csv --json /nowhere/f.json": "there is no folder /nowhere",
    "fit full.csv --rewardcolumn x": "fit has no --rewardcolumn x; see python -m trainer.scaling fit --help",
    "fit full.csv --families --drop-before 14500": "4 points beyond R0; to compare families",
    "report full.csv steps.csv --out x.html": "different units",
    "report full.csv --out none/x.html": "there is no folder none",
    "report start.csv --r0 .2 --out x.html": "no evaluation",
    "report full.csv --out x.html --svg full.csv": "is a file",
    **{
        f"backtest full.csv --fit-until={place}": f"--fit-until {place}: expected a share such as 25%"
        for place in ("0", "-5%", "100%", "half", "inf")
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, which are named for what is wrong with them."""
    folder, compute = tmp_path_factory.mktemp("runs"), np.arange(500, 16_001, 500.0)
    full = simulated(LAW, compute, 0.005, 0)
    curves = {
        "full": full, "copy": full, "few": simulated(LAW, compute[:1], 0.005, 0),
        "low": with_rewards(simulated(LAW, compute[:16], 0.005, 1), {15: 0.35}),
        "c": simulated(LAW, compute, 0.005, 2), "falling": falling(),
        "flat": simulated(replace(LAW, A=0.3), compute, 0.0, None),
        "zeros": simulated(Sigmoid(0, 0, 1, 1), compute, 0.0, None),
        "exact": simulated(LAW, compute[:8], 0.0, None), "unsure": simulated(LAW, compute, 5.0, None),
    }  # fmt: skip
    for name, curve in curves.items():
        write(folder / f"{name}.csv", curve)
    write(folder / "steps.csv", full, compute="step")
    (folder / "jump.csv").write_text("gpu_hours,acc\n" + "\n".join(f"{i},{i // 9}" for i in range(10)))
    (folder / "one.csv").write_text("step,reward\n1,.2\n")
    (folder / "start.csv").write_text("step,reward\n0,.2\n")
    (folder / "infinite.csv").write_text("step,reward\n1,.2\n2,inf\n")
    (folder / "late.csv").write_text("gpu_hours,eval/accuracy\n1,.2\ninf,.3\n")
    (folder / "alone.csv").write_text("reward\n.2\n.3\n")
    (folder / "x.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("line", "says"), WRONG.items())
def test_wrong_use_is_one_line_and_exit_code_2(
    line: str, says: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    assert says in command_in_current_folder(capsys)(line, exit_code=2)
    assert not (runs / "x.html").exists()
