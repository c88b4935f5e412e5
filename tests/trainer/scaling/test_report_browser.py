"""The report in headless Chromium: opened from a file, hovered, filtered, on a phone, in the dark, on paper.

Skipped where there is no Chromium; SIGMOID_RL_REQUIRE_BROWSER=1 (.ci/run sets it) makes that a failure.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import browser
import pytest
from report_folder import EPISODE, HOSTILE, LAW, report_run, write_run

from trainer.scaling import Curve, EvalPoint
from trainer.scaling.report.page import page
from trainer.scaling.report.run import Run, run_of_folder

pytestmark = pytest.mark.slow

FIGURES = ("curves", "efficiency", "forecast", "train/pass_rate", "learner/entropy", "lag/mean")
PHONE = {"width": 375, "height": 800}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser with a fresh profile."""
    with browser.chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of one run and one of three, of which one is a table whose ceiling is not identified."""
    folder = tmp_path_factory.mktemp("reports")
    first, second = (run_of_folder(write_run(folder / f"{n}<b>", lr)) for n, lr in (("a", 1e-5), ("b", 2e-5)))
    slow = replace(LAW, C_mid=0.3)
    points = tuple(EvalPoint(i, 0.02 * i, float(slow.reward(0.02 * i)), 0.01) for i in range(1, 9))
    third = report_run(Curve("table", "core-hours", points, None))
    assert first.fit.identified and not third.fit.identified
    paths = {}
    many = [named(third, f"a recipe of a rather long name, seed {i}") for i in range(5)]
    low = (*points, *(EvalPoint(8 + j, 0.16 + j / 100, 0.11, 0.001) for j in range(1, 4)))
    fallen = report_run(Curve("fallen", "core-hours", low, None))
    assert not fallen.fit.predictable
    many += [named(fallen, f"fallen {i}") for i in range(4)]  # all names at one place
    for name, runs in {"one": [first], "three": [first, second, third], "many": [second, *many]}.items():
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(page(runs), encoding="utf-8")
    return paths


def named(run: Run, name: str) -> Run:
    """The same run by another name."""
    reading = replace(run.reading, curve=replace(run.curve, name=name))
    return replace(run, name=name, recipe=name, reading=reading)


@pytest.fixture
def opened(chromium: Any, reports: dict[str, Path]) -> Iterator[Any]:
    """Opens a report; afterwards: no console message, no error, no request but the file itself."""
    watched = browser.Watched(chromium)

    def opened(name: str, **options: Any) -> Any:
        tab = watched.open(reports[name].as_uri(), **options)
        if options.get("java_script_enabled", True):
            unfold(tab)
        return tab

    yield opened
    watched.close()
    assert watched.faults == []
    assert set(watched.requests) <= {p.as_uri() for p in reports.values()} and watched.requests


def unfold(tab: Any) -> None:
    """Open the efficiency plot, and wait until it is drawn."""
    if tab.locator('figure[data-chart="efficiency"]').count():
        tab.locator("details:has(figure) > summary").click()
        tab.wait_for_selector('figure[data-chart="efficiency"] svg')


def hover(tab: Any, figure: str, share: float) -> str:
    """The tip's text at a share of the chart's width."""
    chart = tab.locator(f'figure[data-chart="{figure}"] svg')
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    return str(tab.inner_text("#tip")) if tab.is_visible("#tip") else ""


def drawn(tab: Any, run: int) -> dict[str, int]:
    """How much of a run each chart shows."""
    parts = f"""x.querySelectorAll('svg g[data-run="{run}"]').length"""
    count = f"(all) => Object.fromEntries(all.map((x) => [x.dataset.chart, {parts}]))"
    return dict(tab.eval_on_selector_all("figure[data-chart]", count))


def test_every_chart_is_drawn_and_hovering_shows_its_values(opened: Any) -> None:
    tab = opened("one", viewport={"width": 1280, "height": 900})
    assert all(drawn(tab, 0)[f] > 0 for f in FIGURES)
    tip = hover(tab, "curves", 0.5)
    x, fit, low, high = (float(t) for t in re.findall(r"\d*\.\d+", tip)[:4])
    assert 0.2 < x < 0.3 and low < fit < high and fit == pytest.approx(float(LAW.reward(x)), abs=0.02)
    assert "measured" in tip
    tab.locator('input[value="log"]').check()
    assert "forecast" in hover(tab, "curves", 0.9)
    ticks = tab.locator('figure[data-chart="curves"] svg text').all_text_contents()
    assert {"eval/pass_rate", "compute, core-hours", "0.5", "0.01"} <= set(ticks)
    assert "B = 2." in hover(tab, "efficiency", 0.5) or "B = 1.9" in hover(tab, "efficiency", 0.5)
    assert re.search(r"step \d+\s+mean 0.5, largest 1", hover(tab, "lag/mean", 0.5))
    lane = tab.locator("[data-lanes] svg").first
    lane.scroll_into_view_if_needed()
    lane.hover(position={"x": 100, "y": 20})
    assert "idle 100%" in tab.inner_text("#tip")
    tab.mouse.move(5, 5)
    assert not tab.is_visible("#tip")


def test_a_run_hidden_is_hidden_in_every_chart_and_table(opened: Any) -> None:
    tab = opened("three", viewport={"width": 1280, "height": 900})
    before = drawn(tab, 1)
    assert all(before[f] > 0 for f in FIGURES)
    others = [drawn(tab, 0), drawn(tab, 2)]
    shown = '[data-run="1"]:not(svg *):visible'
    assert tab.locator(shown).count() > 5
    tab.locator("#filter input").nth(1).uncheck()
    assert set(drawn(tab, 1).values()) == {0} and [drawn(tab, 0), drawn(tab, 2)] == others
    assert tab.locator(shown).count() == 0
    assert "b<b>" not in hover(tab, "curves", 0.4) and "a<b>" in hover(tab, "curves", 0.4)
    tab.locator("#filter input").nth(1).check()
    assert drawn(tab, 1) == before and tab.locator(shown).count() > 5
    tab.click("#none")
    assert tab.locator("figure[data-chart] svg").count() == 0
    tab.click("#all")
    assert drawn(tab, 1) == before


def boxes(tab: Any, texts: str) -> list[dict[str, float]]:
    """Where elements lie in the window."""
    measure = "(all) => all.map((x) => x.getBoundingClientRect().toJSON())"
    return list(tab.eval_on_selector_all(texts, measure))


@pytest.mark.parametrize("width", [1280, 390])
def test_names_stand_at_the_ends_of_the_lines_within_the_chart_and_do_not_overlap(
    opened: Any, width: int
) -> None:
    for name, count in (("three", 3), ("many", 10)):
        tab = opened(name, viewport={"width": width, "height": 900})
        for axis in ("linear", "log"):
            tab.locator(f'input[value="{axis}"]').check()
            names = boxes(tab, 'figure[data-chart="curves"] .name text')
            (chart,) = boxes(tab, 'figure[data-chart="curves"] svg')
            assert len(names) == count
            assert all(chart["left"] <= n["left"] and n["right"] <= chart["right"] + 0.5 for n in names)
            assert all(chart["top"] <= n["top"] and n["bottom"] < chart["bottom"] - 25 for n in names)
            for i, p in enumerate(names):
                for q in names[:i]:
                    apart = p["right"] < q["left"] or q["right"] < p["left"]
                    assert apart or abs(p["top"] - q["top"]) > 11


def test_no_label_of_an_axis_is_cut(opened: Any) -> None:
    for width in (1280, 390, 340):
        tab = opened("one", viewport={"width": width, "height": 900})
        for text in boxes(tab, "svg.chart text"):
            assert text["left"] >= 0 and text["right"] <= width
        for figure in FIGURES:
            (chart,) = boxes(tab, f'figure[data-chart="{figure}"] svg')
            texts = boxes(tab, f'figure[data-chart="{figure}"] svg text')
            assert all(text["right"] <= chart["right"] + 0.5 for text in texts)


def test_the_chart_holds_the_whole_band_and_no_forecast_where_there_is_none(opened: Any) -> None:
    tab = opened("three", viewport={"width": 1280, "height": 900})
    for count in (3, 1):  # in the end the table alone, whose ceiling is not identified
        for run in (0, 1) if count == 1 else ():
            tab.locator("#filter input").nth(run).uncheck()
        for axis in ("linear", "log"):
            tab.locator(f'input[value="{axis}"]').check()
            (chart,) = boxes(tab, 'figure[data-chart="curves"] svg')
            bands = boxes(tab, 'figure[data-chart="curves"] .band')
            assert len(bands) == count and max(b["height"] for b in bands) > 100
            assert all(chart["top"] + 20 < b["top"] and b["bottom"] < chart["bottom"] - 30 for b in bands)
    tab.click("#all")
    lines = """[...document.querySelectorAll('figure[data-chart="curves"] path.line')].map(
        (x) => [x.parentNode.dataset.run, x.matches(".dashed"), x.matches(".level")])"""
    drawn = {tuple(x) for x in tab.evaluate(lines)}
    assert ("0", True, False) in drawn and ("0", False, True) in drawn
    assert {x for x in drawn if x[0] == "2"} == {("2", False, False)}
    assert re.search(r"table: forecast 0\.\d+ to 0\.\d+$", hover(tab, "curves", 0.7), re.M)


@pytest.mark.parametrize("name", ["one", "three"])
def test_on_a_phone_nothing_scrolls_sideways(opened: Any, name: str) -> None:
    tab = opened(name, viewport=PHONE, has_touch=True, is_mobile=True)
    tab.eval_on_selector_all("details", "(all) => all.forEach((d) => { d.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    wide = (
        "(all) => all.filter((x) => x.getBoundingClientRect().right > 376 && !x.closest('svg'))"
        ".map((x) => x.outerHTML.slice(0, 99))"
    )
    assert tab.eval_on_selector_all("body *", wide) == []
    smallest = tab.eval_on_selector_all(
        "body :not(svg *):not(sup)",
        "(all) => Math.min(...all.map((x) => parseFloat(getComputedStyle(x).fontSize)))",
    )
    assert smallest >= 12
    tab.locator('figure[data-chart="curves"] svg').tap()  # the finger is lifted, and the tip stays
    assert tab.is_visible("#tip") and tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    tab.locator("h1").tap()
    assert not tab.is_visible("#tip")


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, WCAG 2."""
    r, g, b = (int(x) / 255 for x in re.findall(r"\d+", colour)[:3])
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (r, g, b)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_dark_and_light_have_their_paper_and_readable_ink(opened: Any) -> None:
    papers = {}
    colour = "(x) => getComputedStyle(x)[x.closest('svg') ? 'fill' : 'color']"
    least = dict.fromkeys(("body", ".note", ".warn", ".injected pre", ".chart text"), 4.5)
    least |= dict.fromkeys((f".swatch.c{run}" for run in range(3)), 3.0)  # lines and marks
    for scheme in ("light", "dark"):
        tab = opened("three", color_scheme=scheme)
        papers[scheme] = luminance(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        for element, contrast in least.items():
            ink = luminance(tab.eval_on_selector(element, colour))
            light, dark = max(ink, papers[scheme]), min(ink, papers[scheme])
            assert (light + 0.05) / (dark + 0.05) >= contrast, (scheme, element)
    assert papers["light"] > 0.9 and papers["dark"] < 0.05


def test_on_paper_it_is_light_and_open_and_no_wider_than_the_sheet(opened: Any) -> None:
    tab = opened("three", color_scheme="dark", viewport={"width": 1280, "height": 900})
    shut = "document.querySelectorAll('details:not([open])').length"
    drawn = """document.querySelector('figure[data-chart="curves"] svg').viewBox.baseVal.width"""
    width = tab.evaluate(drawn)
    print_ = f"() => {{ window.shut = {shut}; window.drawn = {drawn}; }}"
    tab.evaluate(f"addEventListener('beforeprint', {print_})")
    assert tab.locator("details:not([open])").count() > 10
    assert tab.pdf(format="A4")[:5] == b"%PDF-"
    assert tab.evaluate("window.shut") == 0  # all open while printed
    assert tab.evaluate("window.drawn") <= 700  # and drawn for the sheet, so that text is not scaled down
    assert tab.locator("details:not([open])").count() > 10  # and as before afterwards
    assert tab.evaluate(drawn) == width > 1000
    tab.emulate_media(media="print", color_scheme="dark")
    tab.set_viewport_size({"width": 718, "height": 1040})  # A4 within its margins
    assert luminance(tab.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert not tab.is_visible("#filter")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 718


def test_hostile_text_does_nothing_and_is_shown(opened: Any) -> None:
    tab = opened("one")
    assert tab.evaluate("window.hacked") is None and tab.locator("img").count() == 0
    tab.locator(".samples summary").first.click()
    texts = tab.locator(".samples li pre").all_text_contents()
    assert texts[:4] == list(HOSTILE[:4])
    assert tab.title() == "a<b>"


def test_an_episode_is_shown_turn_by_turn_with_the_environments_words_set_apart(opened: Any) -> None:
    tab = opened("one", viewport={"width": 1280, "height": 900})
    tab.locator(".samples summary").first.click()
    episode = tab.locator(".samples li", has_text="environment 0.12 s").first
    begin, call, result, last = (turn["content"] for turn in EPISODE["turns"])
    cut = f"{result[:1000]} … (5,000 more characters)"
    assert episode.locator("pre").all_text_contents() == [begin, call, cut, last]
    assert episode.locator(".injected pre").all_text_contents() == [begin, cut]
    assert [box["left"] for box in boxes(tab, ".samples li:last-child > pre")[:2]] == [
        box["left"] - 32 for box in boxes(tab, ".samples li:last-child > .injected pre")[:2]
    ]
    assert episode.locator("small").all_text_contents() == [
        "environment", f"reward +0.25 · 5 tokens · calls add{HOSTILE[1]}", "tool", "reward -1 · 9 tokens",
        "error · reward -0.75 · 21 tokens · 2 turns · environment 0.12 s",
    ]  # fmt: skip
    assert episode.locator(".warn").all_text_contents() == [EPISODE["error"]]


def test_without_javascript_the_numbers_stand(opened: Any) -> None:
    tab = opened("one", java_script_enabled=False)
    assert "The charts need JavaScript" in tab.inner_text("header")
    assert "0.80" in tab.inner_text("#answers") and tab.locator("#fits").is_visible()
