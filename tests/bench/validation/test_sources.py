"""Promises of the comparison of sources: what is learned for a source is learned from the others alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.harness import Row
from bench.validation import sources
from trainer.scaling import Sigmoid
from trainer.scaling.simulate import simulated


def row(source: str, share: float, best: float, truth: float = 0.5, error: float = 0.0) -> Row:
    """A run whose forecast is off by the distance of the weight from `best`, and of e from `error`."""
    by_gain = [
        [[truth + abs(a - best), truth, 1.0, abs(a - best) + abs(e - error)] for e in sources.ERRORS]
        for a in sources.GAINS
    ]
    return {
        "source": source, "folder": source == "a", "run": "r", "share": share, "forecast": True,
        "truth": truth, "carried": 0.3, "by_gain": by_gain,
    }  # fmt: skip


def test_the_weight_of_a_source_is_the_mean_of_what_is_best_for_the_others_and_none() -> None:
    rows = [row(name, share, best) for name, best in (("a", 1.0), ("b", 2.0)) for share in sources.SHARES]
    assert sources.best(rows) == {"a": 1.0, "b": 2.0} and sources.learned(rows) == 1.0
    text = sources.describe({}, rows)
    lines = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    # a is forecast by half of b's weight, which is right for a; b by half of a's
    assert lines[2] == ["a", "25%", "1", "1", "1.00, 0.0", "0.000", "0.200", "0.00", "1.00", "0.0000"]
    assert lines[4][:6] == ["b", "25%", "1", "1", "0.50, 0.0", "1.500"]
    assert lines[8] == ["folders", "25%", "1", "1", "", "0.000", "0.200", "0.00", "1.00", "0.0000"]


def test_the_weight_that_is_printed_is_the_one_with_which_runs_are_forecast() -> None:
    rows = [row(name, share, 1.0) for name in "abc" for share in sources.SHARES]
    line = sources.describe({}, rows).splitlines()[2].split("|")
    assert [line[5].strip(), line[6].strip()] == ["0.75, 0.0", "0.250"]  # of 2/3, the nearest that was tried


@pytest.mark.filterwarnings("error")
def test_a_run_is_measured_by_every_weight() -> None:
    c = np.arange(0.0, 25.0)
    rising = simulated(Sigmoid(0.1, 0.8, 2.0, 4.0).reward, c, 0.0, 0.01)
    result = sources.measure("a", True, rising, 0.5)
    assert result["forecast"]
    assert result["truth"] == pytest.approx(np.mean([p.pass_rate for p in rising.points[17:]]))
    assert result["carried"] == pytest.approx(np.mean([p.pass_rate for p in rising.points[9:12]]))
    values = np.array(result["by_gain"])
    assert values.shape == (len(sources.GAINS), len(sources.ERRORS), 4)
    value, low, high, _ = np.moveaxis(values, 2, 0)
    assert (abs(value - result["truth"]) < 0.08).all() and (low <= value).all() and (value <= high).all()


def test_a_source_from_which_nothing_was_learned_is_forecast_as_every_run_is() -> None:
    rising = simulated(Sigmoid(0.1, 0.8, 2.0, 4.0).reward, np.arange(0.0, 25.0), 0.0, 0.01)
    result = sources.measure("a", True, rising, 0.5, shipped=True)
    *_, test = sources.held_out(rising, 0.5)
    assert test is not None and result["by_gain"][0][0][:3] == [
        test.level.predicted.value, test.level.predicted.low, test.level.predicted.high,
    ]  # fmt: skip
    text = sources.describe({"options": {"shipped": True}}, [result])
    assert "Weight of a gain, by" not in text
    assert text.splitlines()[2].split("|")[-2].strip() == "–"  # of 25 %
    assert float(text.splitlines()[3].split("|")[-2]) == pytest.approx(result["by_gain"][0][0][3], abs=1e-4)


def test_what_is_learned_is_written_with_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "POPULATION", tmp_path / "population.json")
    sources.publish({}, [row("tinker-cog", share, 3.0, error=0.4) for share in sources.SHARES])
    content = json.loads((tmp_path / "population.json").read_text())
    assert (content["gain"], content["gain_error"]) == (1.5, 0.2)
    assert content["sources"]["tinker-cog"]["runs"] == 1
    assert "tinker-cookbook" in content["sources"]["tinker-cog"]["from"]
    assert all(name in content["made by"] for name in sources.ORIGINS)
