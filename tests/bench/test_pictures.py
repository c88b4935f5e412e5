"""The promise of `python -m bench pictures`: small pictures of a run that show something."""

import json
from pathlib import Path

import browser
import pytest
from PIL import Image
from view_run import write_view_run

from bench import pictures
from bench.__main__ import main
from trainer.jsonl import read_lines
from trainer.scaling.report.page import page
from trainer.scaling.report.run import run_of_folder


@pytest.mark.slow
def test_terminal_page_report_and_ledger_of_a_run_are_drawn(tmp_path: Path) -> None:
    with browser.chromium():  # skips where there is none
        run, to = write_view_run(tmp_path / "run"), tmp_path / "pictures"
    lines = [line | {"time": float(line["step"])} for line in read_lines(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "report.html").write_text(page([run_of_folder(run)]))
    assert main(["pictures", str(run), f"--to={to}"]) == 0
    names = {"terminal", "report", "ledger", "forecast", "view", "rollouts"}
    assert {path.stem for path in to.iterdir()} == names
    for name in names:
        image = Image.open(to / f"{name}.png").convert("RGB")
        assert image.width > 500 and len(image.resize((200, 100)).getcolors(20_000)) > 5, name
        assert (to / f"{name}.png").stat().st_size < 100_000


def test_the_pictures_of_the_pages_are_there_and_small() -> None:
    root = pictures.ROOT
    text = "".join((root / name).read_text() for name in ("README.md", "docs/gallery.md"))
    shown = sorted(pictures.TRACKED.glob("*.png"))
    assert len(shown) >= 5 and all(f"pictures/{path.name}" in text for path in shown)
    assert sum(path.stat().st_size for path in shown) < 400_000
