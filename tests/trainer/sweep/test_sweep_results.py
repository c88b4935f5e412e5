"""Promises of a sweep's results: the paper's table, from kept curves as well, the verdicts, the cost."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import yaml

from trainer.sweep.__main__ import main

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
        row = {
            "step": i,
            "eval/pass_rate": reward + rng.gauss(0, SD),
            "eval/pass_rate_se": SD,
            "idle/engine": 0,
        }
        rows.append(
            row | {"compute/total": c, "compute/evaluation": 0.0, "compute/startup": 0.0, "time": 1.0}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compute = {"total": LAST, "evaluation": 0.25, "startup": 0.125}
    held = {"devices": 2, "wall_s": 5400, "states": {"idle": 10800}, "seconds": {"idle": 5400}}
    books = {
        "unit": "core-hours",
        "devices_total": 2,
        "wall_s": 5400,
        "compute": compute,
        "roles": {"learner": held},
    }
    (folder / "ledger.json").write_text(json.dumps(books))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": {"path": "tiny"}, "pipeline": {"steps": 24}})
    )
    (folder / "ended.json").write_text('{"by": "steps", "max_compute": 0}')
    (folder / "journal.jsonl").write_text("{}\n" * 10_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    asked = {
        "recipes": list(LAWS),
        "task": "addition",
        "seeds": 3,
        "budget": LAST,
        "rungs": [],
        "overrides": [],
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(asked | {"differing": {}}))
    (folder / "status.json").write_text(json.dumps({"wall_s": 7200.0}))
    for i, (name, law) in enumerate(LAWS.items()):
        for seed in range(3):
            write_run(folder / f"{name}-{seed}", law, 10 * i + seed)
    return folder


def test_the_table_has_the_papers_numbers_and_says_which_ceilings_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(folder)]) == 0
    out = capsys.readouterr().out
    results = json.loads((folder / "results.json").read_text())
    rows = {row["recipe"]: row for row in results["table"]}
    for name, (A, B, C_mid) in LAWS.items():
        row = rows[name]
        assert row["runs"] == 3 and not row["doubts"] and row["r2"] > 0.98
        for key, truth, most in (("A", A, 0.012), ("B", B, 0.25), ("C_mid", C_mid, 0.03)):
            assert row[key]["value"] == pytest.approx(truth, abs=most), (name, key)
            assert row[key]["low"] < row[key]["value"] < row[key]["high"]
        end = 0.2 + (A - 0.2) / (1 + (C_mid / LAST) ** B)
        assert row["reward"]["value"] == pytest.approx(end, abs=0.01)
    assert rows["grpo"]["common_A"] is None  # two ceilings differ: B is at each recipe's own
    assert "the ceiling is lower: grpo (-0.1" in out
    assert "standard deviation of 0.00" in out and "updated with 9 runs of 3 recipes" in out
    assert (
        "Cost of 9 of 9 runs: 21.6 of training, 2.25 of evaluation, 1.12 of start-up, in device-hours;" in out
    )
    assert "13:30 h of runs in 2:00 h" in out
    assert all((folder / name).stat().st_size for name in ("report.html", "curves.png", "efficiency.png"))
    best = results["budgets"][2]["standings"]
    assert sum(rank["best"] for rank in best) == pytest.approx(1, abs=0.01)
    assert next(rank["best"] for rank in best if rank["recipe"] == "grpo") < 0.01


def test_kept_curves_are_small_and_make_the_same_results(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    assert main(["table", str(folder), "--keep-curves", str(kept)]) == 0
    table = capsys.readouterr().out
    sizes = [sum(p.stat().st_size for p in run.iterdir()) for run in kept.iterdir() if run.is_dir()]
    assert len(sizes) == 9 and max(sizes) < 8_000
    assert main(["table", str(kept)]) == 0
    assert capsys.readouterr().out == table
    ours, theirs = (json.loads((f / "results.json").read_text()) for f in (folder, kept))
    assert ours["table"][0]["A"]["value"] == pytest.approx(theirs["table"][0]["A"]["value"], abs=1e-5)
    assert main(["--out", str(kept)]) == 2
    assert "holds kept curves only" in capsys.readouterr().err
    assert main(["table", str(folder), "--keep-curves", str(folder)]) == 2


def test_equal_ceilings_have_B_at_one_ceiling(folder: Path, tmp_path: Path) -> None:
    asked = yaml.safe_load((folder / "sweep.yaml").read_text()) | {"recipes": ["scalerl", "dapo"]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(asked))
    for name in ("scalerl", "dapo"):
        for seed in range(3):
            (tmp_path / f"{name}-{seed}").symlink_to(folder / f"{name}-{seed}")
    assert main(["table", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["table"]
    assert all(math.isclose(row["common_A"], 0.62, abs_tol=0.01) for row in rows)
    assert "B at A=0.6" in (tmp_path / "table.txt").read_text()


def test_runs_with_too_few_evaluations_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        "recipes": ["scalerl"],
        "task": "addition",
        "seeds": 2,
        "budget": 0.0,
        "rungs": [],
        "overrides": [],
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(asked | {"differing": {}}))
    assert main(["table", str(tmp_path)]) == 0
    assert "Left out, with fewer than 5 evaluations: scalerl-0, scalerl-1." in capsys.readouterr().out
