"""Promises of the report: it answers first, it is true to the run's files, and no text breaks out of it."""

import json
import math
import re
from dataclasses import replace
from datetime import date
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Command
from report_folder import EVALUATED, HOSTILE, LAW, report_run, write_run
from simulated import with_rewards, write

from trainer.accounting.ledger import Ledger
from trainer.config import Config
from trainer.jsonl import read_lines
from trainer.launcher.summary import finish
from trainer.messages import Spans
from trainer.scaling import Curve, EvalPoint, Sigmoid, curve_of, fit_curve
from trainer.scaling.comparability import warnings
from trainer.scaling.compare import compare_fits
from trainer.scaling.curve.families import B_RANGE, MAX_REACH
from trainer.scaling.forecast import backtest, error_at_2x
from trainer.scaling.layout import short_names
from trainer.scaling.plot import straighten
from trainer.scaling.report.charts import budgets, chart_data, whiskers
from trainer.scaling.report.page import differing, page, title_of, write_report
from trainer.scaling.report.run import MAX_STEPS, Run, averaged, by_recipe, evenly_chosen, lanes_of
from trainer.scaling.report.run import run_of_folder as read_folder
from trainer.scaling.tables import parts, seed_sentence
from trainer.scaling.text import answers, cautions


class Parsed(HTMLParser):
    """The tags, attributes and text of a page, as a browser would split them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "action", "data")]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._inside == "script" else self.texts).append(data)


def shown(runs: list[Run]) -> str:
    """The text of their page."""
    return " ".join("".join(Parsed(page(runs)).texts).split())


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run folder, to be read only."""
    return read_folder(write_run(tmp_path_factory.mktemp("ours") / "run"))


@cache
def a_run(law: Sigmoid = LAW, n: int = 13, name: str = "a", fallen: float = 0) -> Run:
    """A run up to evaluation `n` of EVALUATED, that loses `fallen` in its last third."""
    rewards = [float(law.reward(c)) - fallen * max(0, i - 8) / 4 for i, c in enumerate(EVALUATED)]
    points = tuple(EvalPoint(i, EVALUATED[i], rewards[i], 0.005) for i in range(n))
    return report_run(Curve(name, "core-hours", points[1:], points[0]))


def test_the_first_screen_says_how_high_how_certain_and_at_what_cost() -> None:
    run = a_run()
    high, sure, cost = answers(run.curve, run.fit)
    assert high.short == f"{run.fit.A.value:.3f}" and float(high.short) == pytest.approx(0.80, abs=0.01)
    assert sure.short == f"{run.fit.A.low:.3f} to {run.fit.A.high:.3f}"
    assert cost.short.endswith("core-hours")  # of nine tenths of the rise: (C/C_mid)^B = 9, so 3 C_mid
    assert float(cost.short.split()[0]) == pytest.approx(0.15, rel=0.03)


def test_of_a_ceiling_that_is_not_identified_the_range_is_shown_and_no_value() -> None:
    run = a_run(replace(LAW, A=0.763, C_mid=0.3))
    A = run.fit.A
    assert not run.fit.identified and run.fit.predictable
    high, sure, cost = answers(run.curve, run.fit)
    assert high.short == f"{A.low:.2f} to {A.high:.2f}" and sure.short == "not identified"
    assert run.fit.reasons in sure.meaning
    assert cost.short == "cannot be said" and "command plan" in cost.meaning
    (whisker,) = whiskers([run.fit])["runs"]
    assert whisker is not None and 0 < whisker.low < whisker.high < 100
    assert chart_data([run])["runs"][0]["ceiling"] is None
    two = shown([run, a_run(name="b")])
    assert two.count(f"{A.low:.2f} to {A.high:.2f}") >= 2 and f"{A.value:.3f}" not in two
    assert f"{run.fit.at_2x.value:.3f} (" not in two


def test_too_few_points_have_no_range_either() -> None:
    run = a_run(n=4)
    high, sure, _ = answers(run.curve, run.fit)
    assert high.short == "unknown" and "fewer than 5 evaluations" in sure.meaning
    assert "Evaluate more often" in sure.meaning and whiskers([run.fit])["runs"] == [None]


def test_a_run_that_has_fallen_has_no_forecast_anywhere() -> None:
    fallen = a_run(fallen=0.4, name="fallen")
    assert fallen.fit.draws is not None and not fallen.fit.predictable
    high, sure, _ = answers(fallen.curve, fallen.fit)
    assert high.short == "no forecast" and "has fallen" in sure.meaning and "fix that" in sure.meaning
    drawn = chart_data([fallen])["runs"][0]
    assert drawn["curve"] == [] and drawn["ceiling"] is None and drawn["efficiency"] is None
    for runs in ([fallen], [fallen, a_run()]):
        text = shown(runs)
        assert "no sigmoid, so no forecast" in text and "no sigmoid describes the run" in text
        for x in (fallen.fit.A, fallen.fit.at_2x, fallen.fit.at_10x):
            assert not {f"{v:.{d}f}" for v in (x.value, x.low, x.high) for d in (2, 3)} & set(text.split())
    assert "Only runs whose ceiling is identified" not in page([fallen])  # nor an empty efficiency plot


def test_a_low_last_evaluation_is_to_be_repeated() -> None:
    run = a_run()
    run = report_run(with_rewards(run.curve, {11: 0.5}))
    high, sure, cost = answers(run.curve, run.fit)
    assert high.short == "unknown" and "below the curve" in sure.meaning
    assert "If it is a bad evaluation, A could be anywhere" in sure.meaning and "wice" not in cost.meaning
    assert "Evaluate the last checkpoint again" in sure.meaning
    assert "1 point is an outlier and counts for little." in cautions(run.fit, run.curve.unit)


def test_what_forecasts_a_fallen_run_had_is_not_drawn(ours: Run) -> None:
    assert chart_data([ours])["runs"][0]["forecasts"]
    down = replace(ours, fit=a_run(fallen=0.4).fit)
    assert chart_data([down])["runs"][0]["forecasts"] == []
    assert 'data-chart="forecast"' in page([ours]) and 'data-chart="forecast"' not in page([down])


def test_rewards_are_forecast_at_budgets_that_all_runs_have_in_common() -> None:
    long, short = a_run(), a_run(n=9, name="b")
    assert budgets([long, short]) == pytest.approx((2 * 0.24, 10 * 0.24))
    text = shown([short, long])
    assert set(re.findall(r"(?<!in )reward at ([\d.]+) core-hours", text)) == {"0.48", "2.4"}
    assert "wice the compute" not in text
    for run in (short, long):
        e = run.fit.at(0.48)
        assert (f"{e.value:.3f}" if run.fit.identified else f"{e.low:.2f} to {e.high:.2f}") in text


def test_the_title_counts_runs_and_recipes() -> None:
    a, b, c = (a_run(name=name) for name in "abc")
    assert title_of([a]) == "a" and title_of([a, b, c]) == "3 recipes, one run each"
    assert title_of([a, b, replace(c, recipe="b")]) == "3 runs of 2 recipes"
    assert title_of([b, replace(c, recipe="b")]) == "2 runs of one recipe"


def test_runs_of_one_recipe_have_one_colour_and_are_shown_together() -> None:
    runs = [replace(a_run(name=name), recipe=recipe) for name, recipe in (("x", "r"), ("y", "s"), ("z", "r"))]
    data = chart_data(runs)
    assert data["recipes"] == ["r", "s"] and [run["recipe"] for run in data["runs"]] == [0, 1, 0]
    text = page(runs)
    assert 'value="0 2"' in text and 'value="1"' in text
    assert "c2" not in re.findall(r"swatch (c\d)", text)


@cache
def seeds() -> list[Run]:
    """Two recipes of two runs, a fallen run, one of too few points, and a pilot."""
    rng = np.random.default_rng(0)
    runs = []
    for recipe, law in {"high": replace(LAW, A=0.83), "low": replace(LAW, A=0.6)}.items():
        for seed in "12":
            run = a_run(law, name=f"{recipe}{seed}")
            noisy = [replace(p, pass_rate=p.pass_rate + rng.normal(0, 0.004)) for p in run.curve.points]
            runs.append(report_run(replace(run.curve, points=tuple(noisy)), recipe))
    pilot = a_run(replace(LAW, C_mid=0.12, B=1.2), n=8, name="pilot")  # up to 0.14
    return [*runs, a_run(fallen=0.4, name="fallen"), a_run(n=4, name="few"), pilot]


@pytest.mark.slow
def test_the_page_says_what_compare_says() -> None:
    runs = seeds()
    words = shown(runs)
    with_fit = by_recipe([run for run in runs if run.fit.draws])
    fitted = {name: [(run.curve, run.fit) for run in group] for name, group in with_fit.items()}
    comparison = compare_fits(fitted, [0.24, 0.48, 2.4])
    assert comparison.pairs[0].verdict == "different" and len(comparison.pairs) == 6
    blocks = list(parts(comparison, "core-hours", details=True))
    for says in (text for block in blocks for text in (block.title, *block.notes)):
        assert says in words
    for cell in (cell.replace(" to ", "–") for block in blocks for row in block.rows[1:] for cell in row):
        assert all(word.strip("()") in words for word in cell.split())
    for says in warnings({r.name: [r.reading] for r in runs}):
        assert says in words
    assert "few is not compared: there are fewer than 5 evaluations" in words
    at_budgets = next(x for x in blocks if x.title.startswith("Reward at a budget"))
    assert at_budgets.rows[0] == ("recipe", "0.24", "0.48", "2.4")
    rows = {row[0]: row[1:] for row in at_budgets.rows}
    assert "fallen" not in rows  # it has no forecast
    assert ["±" in cell for cell in rows["pilot"]] == [True, False, False]  # up to twice its data
    verdict, priors = (words.index(text) for text in ("The ceilings differ:", seed_sentence(comparison)))
    assert verdict < priors


@pytest.mark.slow
def test_one_recipe_is_not_compared() -> None:
    high = seeds()[:2]
    for runs in (high, [*high, a_run(n=4, name="few")]):
        assert "Which recipe is better" not in page(runs)


def test_the_page_says_what_was_read_when_and_by_which_version() -> None:
    first = report_run(a_run().curve, "", "val/math", "One evaluation was NaN and is left out.")
    other = report_run(a_run(name="b").curve, "", "val/code")
    text = shown([first, other])
    assert "The rewards are of different columns" in text
    for says in (str(first.reading), *first.reading.notes, first.fit.data_hash, "sigmoid-rl"):
        assert says in text
    assert f"{date.today():%B %Y}" in text
    assert chart_data([first])["reward"] == "val/math"
    assert "different columns" in chart_data([first, other])["reward"]


def test_r_squared_and_the_error_at_twice_the_compute_stand_beside_the_fit() -> None:
    run = a_run()
    error, text = error_at_2x(backtest(run.curve)), page([run])
    assert error is not None and f'<td data-label="error at 2×">{error:+.3f}</td>' in text
    assert f"{run.fit.r2:.3f}" in text and "does not show that the curve is a sigmoid" in text
    assert '<td data-label="error at 2×">–</td>' in page([replace(run, error_at_2x=None)])


def test_the_method_is_explained_alike_on_the_page_and_in_the_docs() -> None:
    words = shown([a_run()])
    docs = (Path(__file__).parents[3] / "docs" / "curve.md").read_text(encoding="utf-8")
    method = " ".join(docs.partition("## The method, for statisticians")[2].split())
    source = (files("trainer.scaling.report") / "page.method.txt").read_text(encoding="utf-8")
    for text in (" ".join(paragraph.split()) for paragraph in source.split("\n\n")):
        assert text in words and text in method
    low, high = B_RANGE
    assert f"{low:g} to {high:g}" in method and f"{MAX_REACH:g} times the last" in method


def test_ceilings_lie_on_one_scale() -> None:
    a, b = a_run().fit, a_run(replace(LAW, A=0.6)).fit
    both = whiskers([a, b])
    first, second = both["runs"]
    assert first is not None and second is not None and first.value and second.value
    assert 0 < second.low < second.value < second.high < first.low < first.value < first.high < 100
    (x, low), (y, high) = both["ticks"][0], both["ticks"][-1]
    assert 0 <= x < y <= 100 and 2 <= len(both["ticks"]) <= 5
    scale = (float(high) - float(low)) / (y - x)  # reward in a percent
    assert float(low) + scale * (first.value - x) == pytest.approx(a.A.value, abs=1e-4)


def test_the_efficiency_plot_by_hand() -> None:
    run = a_run()
    R0, A = run.fit.R0.value, run.fit.A.value
    half, five_sixths = EvalPoint(1, 1.0, (R0 + A) / 2, 0.1), EvalPoint(2, 2.0, R0 + (A - R0) * 5 / 6, 0.5)
    curve = replace(run.curve, points=(half, five_sixths, EvalPoint(3, 3.0, 0.99, 0.1)))
    line = straighten(curve, run.fit)
    (_, half_way, low, high), (compute, value, _, above) = line.tolist()  # the third is above A
    assert (half_way, compute, value) == (pytest.approx(0, abs=1e-9), 2.0, pytest.approx(math.log(5)))
    assert math.isinf(above) and low < 0 < high < math.inf


def test_lanes_of_a_long_run_agree_with_a_sum_over_its_spans() -> None:
    rng = np.random.default_rng(0)
    cuts = np.cumsum(rng.exponential(3.0, 2001))
    states = rng.choice(["a", "b", "c"], 2000)
    spans = [
        {"role": "learner", "state": str(s), "start": float(x), "end": float(y)}
        for s, x, y in zip(states, cuts[:-1], cuts[1:], strict=True)
    ]
    (shares_of,) = lanes_of(spans).values()
    edges = np.linspace(0, cuts[-1], 121)
    for state, shares in shares_of.items():
        spent = np.zeros(120)
        for owner, start, end in zip(states, cuts[:-1], cuts[1:], strict=True):
            if owner == state:
                spent += np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None)
        assert shares == pytest.approx((spent / np.diff(edges)).tolist(), abs=1e-9)


def test_long_series_are_averaged_and_keep_their_largest() -> None:
    steps = [
        {"step": i, "lag/mean": 1.0, "lag/max": float(i == 500), "learner/loss": None} for i in range(900)
    ]
    rows = averaged(steps)
    assert len(rows) == MAX_STEPS
    assert np.mean([r["step"] for r in rows]) == pytest.approx(449.5)
    assert max(r["lag/max"] for r in rows) == 1.0 and all("learner/loss" not in r for r in rows)


def test_samples_are_of_the_whole_run() -> None:
    assert [s["step"] for s in evenly_chosen([{"step": i} for i in range(100)], 4)] == [0, 33, 66, 99]


def test_runs_are_called_by_their_own_names(tmp_path: Path) -> None:
    assert short_names(["a/chart.csv: grpo", "a/chart.csv: cispo"]) == ["grpo", "cispo"]
    assert short_names(["a/chart.csv: grpo", "b/chart.csv: grpo"]) != ["grpo", "grpo"]
    assert short_names(["a/one.csv", "a/two.csv"]) == ["one", "two"]
    for name in ("a/seed", "b/seed"):
        (tmp_path / name).mkdir(parents=True)
    names = [str(tmp_path / n) for n in ("a/seed", "b/seed", "curve.csv")]
    assert short_names(names[:2]) == ["a/seed", "b/seed"]
    assert short_names(names[1:]) == ["seed", "curve"]


def test_settings_that_differ_are_found() -> None:
    a, b = "run_dir: x\nlearner: {lr: 1.0e-5, eps: 1.0}\n", "run_dir: y\nlearner: {lr: 2.0e-5, eps: 1.0}\n"
    assert differing([a, None, b]) == [("learner.lr", ["1e-05", "–", "2e-05"])]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>&run")
    write_report(folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert parsed.tags.count("script") == 2 and len(parsed.scripts) == 2
    assert "img" not in parsed.tags and not parsed.handlers
    shown = "".join(parsed.texts)
    for hostile in (*HOSTILE[:4], folder.name):
        assert hostile in shown
    assert "\\u202e" in shown and "\\ud800" in shown and "\\u001b" in shown
    assert not set("\u202e\u2066\x1b\x00") & set(text)
    assert not set("<>&") & set(parsed.scripts[0])
    drawn = json.loads(parsed.scripts[0])["runs"][0]
    assert drawn["name"] == folder.name and HOSTILE[0] in drawn["lanes"][1]["shares"]


def test_the_page_names_nothing_that_lies_elsewhere(ours: Run) -> None:
    text = page([ours])
    assert Parsed(text).links == [] and not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_the_page_shows_the_numbers_of_the_run(ours: Run) -> None:
    folder, run = Path(ours.curve.name), ours
    drawn = chart_data([run])["runs"][0]
    rows = list(read_lines(folder / "metrics.jsonl"))
    evaluated = [[r["compute/total"], r["eval/pass_rate"]] for r in rows if "eval/pass_rate" in r]
    assert [p[:2] for p in drawn["points"]] == pytest.approx(np.array(evaluated), rel=1e-5)
    assert drawn["series"]["train/pass_rate"] == pytest.approx([s / 60 for s in range(1, 61)], rel=1e-5)
    assert drawn["series"]["learner/entropy"][29] is None and drawn["series"]["lag/max"] == [1.0] * 60
    assert len(drawn["forecasts"]) == len([r for r in rows if "forecast/end" in r]) == 7
    curve = np.array(drawn["curve"])
    assert curve[:, 1] == pytest.approx([run.fit.at(c).value for c in curve[:, 0]], rel=1e-4)
    assert "<b>0.24</b> core-hours count" in page([run]) and "50.0%" in page([run])


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    again = {"step": 60, "train/pass_rate": 0.123, "compute/total": 0.25}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    record = read_folder(folder).record
    assert record is not None and [s["step"] for s in record.steps] == list(range(1, 61))
    assert record.steps[-1]["train/pass_rate"] == 0.123


def test_a_run_that_only_measured_R0_is_reported_without_what_it_has_not_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("ledger.json", "timeline.jsonl", "samples.jsonl"):
        (folder / name).unlink()
    first = (folder / "metrics.jsonl").read_text().split("\n")[0]
    (folder / "metrics.jsonl").write_text(first + "\n")
    write_report(folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    for says in ("The ceiling A is not identified", "no ledger.json", "No samples were kept"):
        assert says in text


def test_the_command_writes_the_page_and_the_pictures_of_folders_and_tables(command: Command) -> None:
    write_run(Path("mine"))
    write(Path("theirs.csv"), a_run(replace(LAW, A=0.6)).curve, "core_hours")
    command("report mine theirs.csv --out out.html --svg pictures")
    assert "2 recipes, one run each" in Path("out.html").read_text(encoding="utf-8")
    assert sorted(p.name for p in Path("pictures").iterdir()) == ["curves.svg", "efficiency.svg"]


@pytest.mark.slow
def test_the_command_takes_seeds_and_the_level_of_the_intervals(command: Command) -> None:
    for name, A in (("a", 0.8), ("b", 0.79), ("c", 0.6)):
        write(Path(f"{name}.csv"), a_run(replace(LAW, A=A)).curve, "core_hours")
    command("report good=a.csv,b.csv c.csv --out out.html --confidence 0.5 --within 1e-9")
    html = Path("out.html").read_text(encoding="utf-8")
    text = "".join(Parsed(html).texts)
    for says in ("3 runs of 2 recipes", "good: a", "good: b", "50% interval", "reaches further than 1e-09"):
        assert says in text
    assert 'data-chart="curves"' in html and 'id="fits"' in html
    for part in ("Where the compute went", "<h2>Samples", "<h2>Training", "<h2>Configuration"):
        assert part not in html  # a table has the curve alone


def test_a_run_does_not_fail_by_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "samples.jsonl").write_text("not JSON\n")
    config = Config(run_dir=str(folder))
    run = a_run()
    ledger = Ledger({"learner": 1.0, "engine": 1.0}, "core-hours", 0.0, None)
    for role in ledger.devices:
        ledger.add(Spans(role, (("start-up", 0.0, 1.0), ("idle", 1.0, 9.0))))
    ledger.begin_training(1.0)
    summary = finish(
        config, run.curve.evaluations, fit_curve(curve_of("", "", run.curve.evaluations)), ledger, (1, 2)
    )
    assert "report.html could not be written" in summary and "samples.jsonl" in summary
    assert (folder / "fit.json").is_file() and not (folder / "report.html").exists()
    assert "Traceback" in capsys.readouterr().err
