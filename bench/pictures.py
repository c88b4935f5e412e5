"""Pictures of a real run as a user sees it: terminal, `sigmoid-rl view`, report, in Chromium. [1 min]

  python -m bench pictures runs/tiny-0             into build/pictures
  python -m bench pictures runs/tiny-0 --record    into docs/pictures, for README.md and docs/gallery.md

The terminal is that of the live view at the step in the middle of the run, drawn again from its metrics and
samples; the pages are opened as they are. Pictures have few colours, so that they stay small.
"""

import io
import json
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.harness import ROOT, Case, Row
from bench.table import table
from bench.viewer import Viewer, browser, chromium
from trainer.cli import parse
from trainer.config import ConfigError
from trainer.jsonl import read_lines
from trainer.launcher.terminal import LiveView

OPTIONS: dict[str, Any] = {
    "run": ((), "the folder of a finished run"),
    "to": (str(ROOT / "build" / "pictures"), "folder of the pictures"),
}
TRACKED = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1000, 1000  # of a window
COLOURS = 64


def cases(options: Namespace) -> Iterator[Case]:
    """One case for each thing that is looked at."""
    if len(options.run) != 1 or not Path(options.run[0], "metrics.jsonl").is_file():
        raise ConfigError("bench pictures: expected the folder of one run")
    chromium()
    run, folder = Path(options.run[0]), TRACKED if options.record else Path(options.to)
    folder.mkdir(parents=True, exist_ok=True)
    for take in (terminal, report, view):
        yield take.__name__, partial(_with_browser, take, run, folder)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The files and their sizes."""
    sizes = [[name, f"{size:,}"] for row in rows for name, size in row.items() if name != "case"]
    return table(["picture", "bytes"], sizes)


def _with_browser(take: Any, run: Path, folder: Path) -> Row:
    """Take the pictures, and make them small: bytes by name."""
    from PIL import Image

    with browser() as chrome:
        taken: dict[str, bytes] = take(run, chrome.new_page(viewport={"width": WIDTH, "height": HEIGHT}))
    for name, content in taken.items():
        image = Image.open(io.BytesIO(content)).convert("RGB")
        image.quantize(COLOURS, dither=Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)
    return {name: (folder / f"{name}.png").stat().st_size for name in taken}


def frame(run: Path, columns: int = 110, rows: int = 24) -> str:
    """The live view in the middle of the run, as SVG without fonts from elsewhere."""
    config = parse(["--resume", "--run-dir", str(run)]).config
    lines, samples = list(read_lines(run / "metrics.jsonl")), list(read_lines(run / "samples.jsonl"))
    middle = lines[-1]["step"] // 2
    lines = [line for line in lines if line["step"] <= middle]
    console = Console(width=columns, height=rows, record=True, file=io.StringIO(), force_terminal=True)
    unit = json.loads((run / "ledger.json").read_text())["unit"]
    shown = LiveView(config, unit, io.StringIO(), console)
    shown.began = time.monotonic() - lines[-1]["time"]
    for line in lines:
        shown.state.update(line, shown.began + line["time"])
    shown.sample([one for one in samples if one["step"] <= middle][-1])
    console.print(shown.render(), height=rows)
    return console.export_svg(title=f"sigmoid-rl train · {run.name}", font_aspect_ratio=0.61)


def terminal(run: Path, tab: Any) -> dict[str, bytes]:
    """The live view."""
    tab.set_content(f"<body style='margin:0;width:{WIDTH}px'>{frame(run)}</body>")
    return {"terminal": tab.locator("svg").screenshot()}


def report(run: Path, tab: Any) -> dict[str, bytes]:
    """The head of the report with its curve, the ledger's bands, and how the forecast of the end went on."""
    tab.goto((run / "report.html").resolve().as_uri())
    tab.locator('figure[data-chart="curves"] svg').wait_for()
    taken = {"report": tab.screenshot()}
    bands = tab.locator(".lanes").first
    bands.scroll_into_view_if_needed()
    forecast = tab.locator('figure[data-chart="forecast"]')
    return taken | {"ledger": bands.screenshot(), "forecast": forecast.screenshot()}


def view(run: Path, tab: Any) -> dict[str, bytes]:
    """The page of `sigmoid-rl view`: the run, and a group with its tokens by entropy."""
    with Viewer(run) as viewer:
        viewer.wait_for_index()
        tab.goto(viewer.page)
        tab.frame_locator("iframe").locator('[data-chart="curves"] .band').first.wait_for()
        taken = {"view": tab.screenshot()}
        tab.click('[data-view="rollouts"]')
        tab.fill('[name="step"]', "2")  # the newest groups may not be trained on yet
        tab.wait_for_timeout(1000)
        tab.click("#rows tr:nth-child(1) a")
        tab.wait_for_selector("article .t")
        tab.select_option("#colour", "entropy")
        tab.locator(".t.l1, .t.l2, .t.l3, .t.l4, .t.u").first.wait_for()
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": 480}
        return taken | {"rollouts": tab.screenshot(clip=clip)}
