"""The page of `sigmoid-rl view` in Chromium: address, filters, tokens, keys, phone, and as a file."""

import re
from collections.abc import Iterator
from typing import Any

import browser
import pytest
from report_folder import HOSTILE
from view_run import opened, serving, write_view_run

from trainer.view.page import export

pytestmark = pytest.mark.slow


def expect(what: Any) -> Any:
    """Playwright's: it waits for what is expected."""
    from playwright.sync_api import expect

    return expect(what)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser with a fresh profile."""
    with browser.chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The address of a page of two runs, and of a file with one."""
    folder = tmp_path_factory.mktemp("view")
    runs = opened(write_view_run(folder / "a", tokens=300), write_view_run(folder / "b"))
    export(runs[1:], folder / "b.html")
    with serving(runs) as port:
        yield {"live": f"http://127.0.0.1:{port}/?token=secret", "file": (folder / "b.html").as_uri()}


@pytest.fixture
def visit(chromium: Any, pages: dict[str, str]) -> Iterator[Any]:
    """Opens a page; afterwards: no console message, no error, no request to elsewhere."""
    watched = browser.Watched(chromium)

    def visit(name: str, place: str = "", **options: Any) -> Any:
        tab = watched.open(pages[name] + place, **options)
        tab.wait_for_selector(".run")
        return tab

    yield visit
    watched.close()
    assert watched.faults == [] and watched.requests
    served = pages["live"].partition("?")[0], "file:", "data:"
    assert [url for url in watched.requests if not url.startswith(served)] == []


@pytest.mark.parametrize("name", ["live", "file"])
def test_from_the_table_to_a_token_and_back_by_its_address(visit: Any, name: str) -> None:
    tab = visit(name, viewport={"width": 1280, "height": 900})
    curve = tab.frame_locator("iframe").locator('figure[data-chart="curves"] svg .band')
    curve.first.wait_for()
    tab.click('[data-view="rollouts"]')
    tab.wait_for_selector("#rows tr")
    assert tab.locator("#rows tr").count() == 6
    tab.select_option('[name="task"]', "math")
    expect(tab.locator("#rows tr")).to_have_count(3)
    tab.fill('[name="text"]', "CALCULATE 3")
    expect(tab.locator("#rows tr")).to_have_count(1)
    tab.click("#rows a")
    tab.wait_for_selector("article")
    assert tab.locator("article").count() == 3 and "Group 3 · step 2" in tab.inner_text("#title")
    assert tab.locator("article").first.locator(".injected small").inner_text() == "tool"
    for colour in ("logprob", "advantage", "ratio", "entropy", "version"):
        tab.select_option("#colour", colour)
        expect(tab).to_have_url(re.compile(f"colour={colour}"))
        expect(tab.locator(".t.l1, .t.l2, .t.l3, .t.l4, .t.version").first).to_be_visible()
    tab.locator(".tokens").first.focus()
    tab.keyboard.press("ArrowRight")
    assert "entropy 1.5" in tab.inner_text("#tip") and "ratio 1.284" in tab.inner_text("#tip")
    tab.click("article:nth-child(2) h3 a")
    tab.wait_for_selector("article:nth-child(2).chosen")
    again = visit(name, tab.evaluate("location.hash"), viewport={"width": 1280, "height": 900})
    again.wait_for_selector("article:nth-child(2).chosen")
    assert "task=math" in again.url and again.locator("#colour").input_value() == "version"
    again.keyboard.press("Escape")
    again.wait_for_selector("#rows tr")
    again.keyboard.press("/")
    assert again.evaluate("document.activeElement.name") == "text"
    assert again.evaluate("window.hacked") is None and again.locator("img").count() == 0


def test_two_runs_and_long_completions_by_parts(visit: Any) -> None:
    tab = visit("live", "#view=rollouts&run=0&group=1", viewport={"width": 1280, "height": 900})
    assert tab.locator(".run").count() == 2
    tab.wait_for_selector("article")
    assert tab.inner_text("#prompt") == f"Calculate 1. {HOSTILE[1]}"
    tab.keyboard.press("j")  # the next one in the table
    expect(tab.locator("#title")).to_contain_text("Group 0 ")
    tab.select_option("#run", "1")
    tab.wait_for_selector("#rows tr")
    expect(tab).to_have_url(re.compile("run=1"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_scrolls_sideways(visit: Any, scheme: str) -> None:
    phone = {"viewport": {"width": 375, "height": 800}, "has_touch": True, "is_mobile": True}
    tab = visit("live", "#view=rollouts", color_scheme=scheme, **phone)
    tab.wait_for_selector("#rows tr")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    tab.locator("#rows a").first.tap()
    tab.wait_for_selector("article")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    tab.locator(".t").first.tap()
    assert "token 0" in tab.inner_text("#tip")
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
