"""The server of `sigmoid-rl view` in a process of its own, and a browser to look at its page."""

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import ConfigError

TIMEOUT_S = 120.0


def chromium() -> str:
    """The path of Chromium. ConfigError: there is none."""
    if path := shutil.which("chromium"):
        return path
    raise ConfigError("there is no Chromium; Debian's package is `chromium`")


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield launched
        launched.close()


class Viewer:
    """The server of one run's page, which answers; a context that ends it."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "trainer.view", str(run)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout
        self.page = self.process.stdout.readline().strip()  # its address, with the token
        if not self.page:
            raise ConfigError(f"sigmoid-rl view {run} ended with exit code {self.process.wait()}")

    def __enter__(self) -> "Viewer":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGCONT)  # it may be stopped
        self.process.terminate()
        self.process.wait()

    def ask(self, path: str) -> bytes:
        """The answer to a request of the page."""
        address, _, token = self.page.partition("/?token=")
        request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read())

    def wait_for(self, ready: Any) -> None:
        """Ask until what the server says of the run is ready; TimeoutError if that takes too long."""
        end = time.monotonic() + TIMEOUT_S
        while not ready(json.loads(self.ask("/api/runs"))["runs"][0]):
            if time.monotonic() > end:
                raise TimeoutError(f"{self.page} is not ready")
            time.sleep(0.1)

    def wait_for_index(self) -> None:
        """Wait until the server has read the whole journal."""
        self.wait_for(lambda run: run["read"] == run["size"])
