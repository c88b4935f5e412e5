"""Promises of a sweep's results: the paper's table, from kept curves as well, the verdicts, the cost."""

import gzip
import json
import random
import re
import shutil
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from trainer.accounting.run_account import run_dtype
from trainer.config import ConfigError
from trainer.jsonl import read_lines
from trainer.run_folder import complete
from trainer.scaling.report import page
from trainer.sweep.__main__ import main
from trainer.sweep.progress import progress
from trainer.sweep.results import read
from trainer.sweep.spec import Run, load

pytestmark = pytest.mark.slow
LAWS = {"scalerl": (0.62, 2.0, 0.4), "dapo": (0.62, 2.0, 0.4), "grpo": (0.50, 2.0, 0.4)}
SD, POINTS, LAST = 0.004, 24, 2.4


def write_run(folder: Path, law: tuple[float, float, float], seed: int) -> None:
    """A run folder with what the results read, and some of what they do not."""
    rng, (A, B, C_mid) = random.Random(seed), law
    A += (-0.004, 0.0, 0.004)[seed % 10]
    folder.mkdir(parents=True)
    rows = []
    for i in range(POINTS + 1):
        c = LAST * i / POINTS
        reward = 0.2 + (A - 0.2) / (1 + (C_mid / c) ** B) if c else 0.2
        rows.append({"step": i, "train/reward": 0.1, "compute/total": c})
        compute = {"total": c, "flops": 1e12 * c, "evaluation": 0.0, "startup": 0.0}
        row = {"step": i, "eval/pass_rate": reward + rng.gauss(0, SD), "eval/pass_rate_se": SD, "time": 1.0}
        rows.append(row | {"idle/engine": 0} | {f"compute/{key}": value for key, value in compute.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compute = {"total": LAST, "evaluation": 0.25, "startup": 0.125}
    role = {"devices": 2, "wall_s": 5400, "states": {"idle": 10800}, "seconds": {"idle": 5400}}
    books = {"unit": "core-hours", "devices_total": 2, "wall_s": 5400, "compute": compute}
    books |= {"roles": {"learner": role}}
    (folder / "ledger.json").write_text(json.dumps(books))
    config = {
        "model": {"path": f"{folder.parent}/my-model", "dtype": "float32"},
        "pipeline": {"steps": 24, "scheme": "pipeline_rl"},
    }
    config |= {"run_dir": str(folder), "evaluation": {"sets": {"mine": [f"{folder.parent}/mine.jsonl"]}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "ended.json").write_text('{"by": "steps", "max_compute": 0}')
    (folder / "journal").mkdir()
    (folder / "journal" / "000000.jsonl").write_text("{}\n" * 10_000)


def write_sweep(folder: Path, recipes: list[str], seeds: int, budget: float, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    asked = {"recipes": recipes, "task": "addition", "seeds": seeds, "budget": budget, "rungs": []}
    asked |= {"overrides": [f"--model.path={folder}/my-model"], "differing": {}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(asked | more))
    (folder / "status.json").write_text(json.dumps({"wall_s": 7200.0, "errors": {"dapo-0": f"see {folder}"}}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep after `table --keep-curves`; its name holds what would end an input on the command line."""
    folder = tmp_path_factory.mktemp("sweep") / "lr@unit=hours,seeds=3"
    write_sweep(folder, ["scalerl", "dapo", f"{folder.parent}/recipes/grpo.yaml"], 3, LAST)
    for i, (name, law) in enumerate(LAWS.items()):
        for seed in range(3):
            write_run(folder / f"{name}-{seed}", law, 10 * i + seed)
    assert main(["table", str(folder), "--keep-curves", str(folder.parent / "kept")]) == 0
    return folder


def test_the_results_have_the_recipes_numbers_and_say_which_ceilings_differ(folder: Path) -> None:
    out = " ".join((folder / "table.txt").read_text().split())
    listed = tomllib.loads((folder / "runs.toml").read_text())["recipe"]  # for the other commands
    assert listed == {name: {"runs": [f"{name}-{seed}" for seed in range(3)]} for name in LAWS}
    results = json.loads((folder / "results.json").read_text())
    for name, (A, B, C_mid) in LAWS.items():
        recipe = results["recipes"][name]
        assert len(recipe["runs"]) == 3 and not recipe["doubts"] and results["r2"][name] > 0.98
        for key, truth, most in (("A", A, 0.012), ("B", B, 0.25), ("C_mid", C_mid, 0.03)):
            assert recipe[key]["value"] == pytest.approx(truth, abs=most), (name, key)
            assert recipe[key]["low"] < recipe[key]["value"] < recipe[key]["high"]
    pairs = {(pair["a"], pair["b"]): pair["verdict"] for pair in results["pairs"]}
    assert pairs["scalerl", "grpo"] == pairs["dapo", "grpo"] == "different"
    assert re.search(
        r"scalerl against grpo Reward .*?: scalerl is ahead by .*? The ceilings differ: A \+0\.1", out
    )
    ahead = {(pair["a"], pair["b"]): pair["ahead"] for pair in results["pairs"]}
    assert ahead == {("scalerl", "dapo"): "", ("scalerl", "grpo"): "scalerl", ("dapo", "grpo"): "dapo"}
    assert results["end"]["compute"] == LAST and results["spread_over_seeds"]["reward"]["high"] < 0.015
    errors = results["error_at_2x"]
    assert len(errors) == 9 and "scalerl-0" in errors and max(map(abs, errors.values())) < 0.1
    for says in (
        "R², mean over runs: scalerl 0.9",
        f"at twice its compute: {np.median(np.abs(list(errors.values()))):.3f}, median of 9 runs.",
        "standard deviation of 0.00",
        "updated with 9 runs of 3 recipes",
        "Cost of 9 of 9 runs: 21.6 of training, 2.25 of evaluation, 1.12 of start-up, in device-hours;",
        "13:30 h of runs in 2:00 h",
    ):
        assert says in out
    assert all((folder / name).stat().st_size for name in ("report.html", "curves.png", "efficiency.png"))
    assert [budget["compute"] / LAST for budget in results["budgets"]] == pytest.approx([0.25, 0.5, 1, 2])
    best = results["budgets"][2]["standings"]
    assert sum(rank["best"] for rank in best) == pytest.approx(1, abs=0.01)
    assert next(rank["best"] for rank in best if rank["recipe"] == "grpo") < 0.01


def test_kept_curves_are_small_and_hold_the_same_curves(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = folder.parent / "kept"
    sizes = {path.name: path.stat().st_size for path in kept.iterdir()}
    assert set(sizes) - {"runs.toml"} == {"curves.csv.gz", "ledger.json", "sweep.yaml", "status.json"}
    assert sizes["curves.csv.gz"] < 12_000
    ours, theirs = (
        {name: [reading.curve.points for reading in of] for name, of in read(load(f))[0].items()}
        for f in (folder, kept)
    )
    assert ours == theirs and list(ours) == list(LAWS)
    assert run_dtype(kept / "curves.csv.gz" / "dapo-0") == "float32"  # for predict --kernel-rates
    assert main(["--out", str(kept)]) == 2
    assert "holds kept curves only" in capsys.readouterr().err


def test_the_curves_are_kept_in_another_folder_than_the_sweeps(folder: Path, tmp_path: Path) -> None:
    write_sweep(tmp_path, ["scalerl"], 1, LAST)
    assert main(["table", str(tmp_path), "--keep-curves", str(tmp_path)]) == 2
    assert main(["table", str(tmp_path), "--keep-curves", str(folder / "scalerl-0")]) == 2
    (tmp_path / "study" / "recipes").mkdir(parents=True)  # the sweep's own
    assert main(["table", str(tmp_path), "--keep-curves", str(tmp_path / "study")]) == 0


def test_a_report_that_fails_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise ConfigError("no page can be made")

    write_sweep(tmp_path, ["grpo"], 2, LAST)
    shutil.copytree(folder / "grpo-0", tmp_path / "grpo-0")
    monkeypatch.setattr(page, "write", fails)
    assert main(["table", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: no page can be made\n"
    assert "Left out, with fewer than 5 evaluations: grpo-1." in (tmp_path / "table.txt").read_text()


def test_the_results_can_be_on_flops(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = shutil.copytree(folder.parent / "kept", tmp_path / "kept")
    groups, _ = read(load(kept), "compute/flops")
    curves = [reading.curve for of in groups.values() for reading in of]
    assert {curve.unit for curve in curves} == {"FLOPs"}
    assert [curve.points[-1].compute for curve in curves] == pytest.approx([1e12 * LAST] * 9)
    assert main(["table", str(kept), "--compute-column", "compute/flip"]) == 2  # the command passes it on
    assert "compute/flip" in capsys.readouterr().err
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    assert main(["table", str(kept), "--compute-column", "compute/flops"]) == 0
    table = capsys.readouterr().out
    assert "FLOPs" in table and {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert main(["table", str(kept), "--compute-column", "compute/flops", "--write"]) == 0
    assert (kept / "table.txt").read_text() == table and (kept / "curves.png").stat().st_size


def test_no_path_of_this_machine_is_kept(folder: Path) -> None:
    kept = {path.name: path.read_bytes() for path in (folder.parent / "kept").iterdir()}
    kept["curves.csv.gz"] = gzip.decompress(kept["curves.csv.gz"])
    assert not any(str(folder.parent).encode() in content for content in kept.values())
    asked = yaml.safe_load((folder.parent / "kept" / "sweep.yaml").read_text())
    assert asked["recipes"] == ["scalerl", "dapo", "grpo.yaml"]
    assert asked["overrides"] == ["--model.path=my-model"]
    readings = [reading for of in read(load(folder.parent / "kept"))[0].values() for reading in of]
    assert {(r.settings["model"], r.curve.unit) for r in readings} == {("my-model", "core-hours")}


def test_a_sweep_without_a_curve_names_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path, ["scalerl"], 2, 0.0)
    assert main(["table", str(tmp_path)]) == 0
    assert "Left out, with fewer than 5 evaluations: scalerl-0, scalerl-1." in capsys.readouterr().out


@pytest.mark.parametrize(("column", "unit"), [("compute/total", 1.0), ("compute/flops", 1e12)])
def test_the_frontier_names_the_best_value_at_each_budget_and_those_not_told_from_it(
    axes: Path, column: str, unit: float
) -> None:
    assert main(["table", str(axes), "--compute-column", column]) == 0
    results = json.loads((axes / "results.json").read_text())["axes"]
    assert list(results) == ["learner.lr", "pipeline.prompts_per_step"]
    lr, prompts = results.values()
    budgets = [LAST * unit / 2**i for i in (4, 3, 2, 1, 0)]  # from the first evaluation, at LAST / 24
    assert [row["compute"] for row in lr] == pytest.approx(budgets)
    for row in lr:
        c, truth = row["compute"] / unit, {}
        for value, (A, B, C_mid) in LR.items():
            truth[value] = 0.2 + (A - 0.2) / (1 + (C_mid / c) ** B)
            assert row["rewards"][value]["value"] == pytest.approx(truth[value], abs=0.012)
        if abs(truth["0.001"] - truth["0.0003"]) > 0.03:
            assert row["best"] == [max(truth, key=lambda value: truth[value])]
    assert lr[0]["best"] == ["0.001"] and lr[-1]["best"] == ["0.0003"]  # they cross
    assert all(set(row["best"]) == {"64", "256"} for row in prompts)  # twins, but for their seeds
    text = (axes / "table.txt").read_text()
    assert re.search(r"frontier over learner.lr .*:\n\S+ +0.0003 +0.001 +best\n", text)
    assert re.search(r"\n\S+ +\S+ +\S+ +(64 or 256|256 or 64)\n", text)
    assert (axes / "frontier.png").stat().st_size > 10_000
    report = (axes / "report.html").read_text()
    assert "Efficient frontier over learner.lr" in report and "<td>256 or 64</td>" in report.replace(
        "64 or 256", "256 or 64"
    )


def test_values_whose_rewards_are_not_the_same_metric_have_no_frontier_and_no_ranking(tmp_path: Path) -> None:
    """The held-out score with each of two verifiers does not say which is better to train with."""
    write_sweep(tmp_path, ["scalerl"], 2, LAST, vary={"verifier.kind": ["math", "exact"]})
    for i, kind in enumerate(("math", "exact")):
        for seed in range(2):
            run = tmp_path / f"scalerl-kind_{kind}-{seed}"
            write_run(run, LR["0.001"], 10 * i + seed)
            config = yaml.safe_load((run / "config.yaml").read_text()) | {"verifier": {"kind": kind}}
            (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["table", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert "rewards are of different scorers" in results["incomparable"]
    assert results["axes"] == {} and not (tmp_path / "frontier.png").exists()


LR = {"0.001": (0.45, 2.0, 0.15), "0.0003": (0.62, 2.0, 0.4)}


@pytest.fixture(scope="module")
def axes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over learning rates whose curves cross, and batches that do not matter."""
    folder, seed = tmp_path_factory.mktemp("axes"), 0
    prompts = ("64", "256")
    vary = {"learner.lr": list(LR), "pipeline.prompts_per_step": list(prompts)}
    write_sweep(folder, ["scalerl"], 2, LAST, vary=vary)
    for (lr, law), n in product(LR.items(), prompts):
        for i in range(2):
            write_run(folder / f"scalerl-lr_{lr}-prompts_per_step_{n}-{i}", law, 10 * (seed := seed + 1) + i)
    return folder


def test_paired_axes_are_one_and_several_recipes_are_one_too(tmp_path: Path) -> None:
    vary = {"learner.lr": ["1.0", "2.0"], "pipeline.steps": ["3", "4"]}
    write_sweep(tmp_path, ["grpo", "scalerl"], 1, LAST, vary=vary, zip=True)
    first, second = load(tmp_path).axes.items()
    assert first == (
        "learner.lr, pipeline.steps",
        {
            f"{r}-lr_{lr}-steps_{n}": f"{lr}, {n}"
            for r in ("grpo", "scalerl")
            for lr, n in (("1.0", "3"), ("2.0", "4"))
        },
    )
    assert second[0] == "recipe" and set(second[1].values()) == {"grpo", "scalerl"}


def test_a_sweep_goes_on_from_kept_curves_where_its_runs_are_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine, another sitting: two runs are trained, and all are kept again."""
    kept = shutil.copytree(folder.parent / "kept", tmp_path / "kept")
    ledgers = json.loads((kept / "ledger.json").read_text())
    ledgers["runs"]["dapo-2"]["ended"] = {}  # it was stopped amid its steps
    rung = {"by": "compute", "max_compute": LAST / 4, "why": ""}
    for name in ("dapo-1", "grpo-0"):  # halving has stopped grpo at that rung; dapo is to go on
        ledgers["runs"][name]["ended"] = rung
    stopped = {"grpo": {"share": 0.25, "probability": 0.0}}
    (kept / "status.json").write_text(json.dumps({"stopped": stopped, "decided": [0.25]}))
    (kept / "ledger.json").write_text(json.dumps(ledgers))
    table = gzip.decompress((kept / "curves.csv.gz").read_bytes()).decode()
    table = re.sub(r",(data|held-out set|samples per prompt|scorer)(?=[,\n])", r",invented \1", table)
    header, *rows = table.splitlines()
    other = "eval/other/pass_rate"  # a set that only some evaluations had
    table = "\n".join([f"{header},{other}", *(f"{row},{'0.5' * (i % 2)}" for i, row in enumerate(rows)), ""])
    (kept / "curves.csv.gz").write_bytes(gzip.compress(table.encode()))
    trained = list[str]()

    def train(runs: list[Run], compute: float, *rest: Any) -> None:
        for run in runs:
            if not complete(run.folder, compute):
                trained.append(run.name)
                shutil.copytree(folder / run.name, run.folder)

    monkeypatch.setattr("trainer.sweep.__main__.train", train)
    monkeypatch.setattr("trainer.sweep.__main__.write_results", lambda *_: "")
    asked = yaml.safe_load((kept / "sweep.yaml").read_text())
    asked |= {"task": "arithmetic", "recipes": ["scalerl", "dapo", "grpo"]}
    (kept / "sweep.yaml").write_text(yaml.safe_dump(asked))
    words = ["scalerl", "dapo", "grpo", "--task", "arithmetic", "--seeds", "3", "--budget", str(LAST)]
    words += ["--out", str(tmp_path / "new"), "--keep-curves", str(kept), "--", "--model.path=my-model"]
    before = read(load(kept))[0]
    assert main(words) == 0 and trained == ["dapo-1", "dapo-2"], capsys.readouterr().err
    again = read(load(kept))[0]
    for name in LAWS:
        assert [r.curve.points for r in again[name]] == [r.curve.points for r in before[name]]
    shown, whole = progress(tmp_path / "new" / "scalerl-0"), progress(folder / "scalerl-0")
    assert (shown.step, shown.compute) == (whole.step, whole.compute)
    again = [row.get(other) for row in read_lines(tmp_path / "new" / "scalerl-0" / "metrics.jsonl")]
    assert again[:4] == [None, 0.5, None, 0.5]
    assert yaml.safe_load((tmp_path / "new" / "scalerl-2" / "config.yaml").read_text())["seed"] == 2
    assert main([*words[:-1], "--model.path=another"]) == 2
    assert "its overrides is" in capsys.readouterr().err
    table = table.replace("my-model", "older-model")
    (kept / "curves.csv.gz").write_bytes(gzip.compress(table.encode()))
    words[words.index("--out") + 1] = str(tmp_path / "third")
    assert main(words) == 2
    assert "scalerl-0 was trained with model older-model, not my-model" in capsys.readouterr().err
