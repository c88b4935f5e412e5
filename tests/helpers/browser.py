"""Debian's Chromium, driven by Playwright; without it tests are skipped, or fail where it is required."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

START = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser with a fresh profile."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    why = "" if path else "there is no Chromium; Debian's package is `chromium`"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as e:
        why = f"{e}; pip install -r requirements/tests.txt"
    if why:
        if os.environ.get("SIGMOID_RL_REQUIRE_BROWSER") == "1":
            pytest.fail(f"SIGMOID_RL_REQUIRE_BROWSER=1, but {why}")
        pytest.skip(why)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=list(START))
        yield launched
        launched.close()


@dataclass
class Watched:
    """Pages of a browser, and what they said, met and asked for."""

    browser: Any
    contexts: list[Any] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # console messages and errors
    requests: list[str] = field(default_factory=list)  # addresses

    def open(self, address: str, **options: Any) -> Any:
        """A page with this address, in a context of its own with these options."""
        context = self.browser.new_context(**options)
        self.contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: self.faults.append(m.text))
        tab.on("pageerror", lambda e: self.faults.append(str(e)))
        tab.on("request", lambda r: self.requests.append(r.url))
        tab.goto(address)
        return tab

    def close(self) -> None:
        for context in self.contexts:
            context.close()
