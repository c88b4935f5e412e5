"""The page's text: one file with its style and script, for the server or with all data in it.

As a command it writes the report of the runs in the folders that it is called with.
"""

import html
import json
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.scaling.layout import short_names
from trainer.scaling.reading.read import read_inputs
from trainer.scaling.report.charts import as_script
from trainer.scaling.report.page import page, resource, script_digest
from trainer.scaling.report.run import runs_of
from trainer.view.rollouts import NoGroupError, Query
from trainer.view.state import RunState
from trainer.view.tokens import group_view

EXPORTED_GROUPS, EXPORTED_BYTES = 200, 24_000_000  # at most in an exported file; runs have equal shares


def live_page(data: str = "null", scripts: Sequence[str] = ()) -> tuple[str, str]:
    """The page, and its Content-Security-Policy, which lets only its script run, and `scripts`."""
    template = (files("trainer.view") / "page.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    allowed = " ".join(f"'sha256-{script_digest(text)}'" for text in (script, *scripts))
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}; "
        "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'"
    )
    colours = re.split(r"^\* \{", resource("page.css"), maxsplit=1, flags=re.MULTILINE)[0]
    filled = {"/*colours*/": colours, "<!--policy-->": policy, "null/*data*/": data}
    return re.sub("|".join(map(re.escape, filled)), lambda match: filled[match[0]], template), policy


def report_page(folders: Sequence[Path]) -> str:
    """The report of the runs that have been evaluated; why there is none, if so."""
    try:
        measured = [str(folder) for folder in folders if (folder / "metrics.jsonl").is_file()]
        readings = [read_inputs([folder])[0] for folder in measured]
        evaluated = [r for r in readings if r.curve.evaluations]
        if not evaluated:
            return note("The curve begins with the first evaluation.")
        names = short_names([r.curve.name for r in evaluated])
        return page(runs_of({name: [r] for name, r in zip(names, evaluated, strict=True)}))
    except (ConfigError, OSError, KeyError) as e:
        return note(f"There is no curve yet: {e}")


def note(text: str) -> str:
    """A page with one sentence."""
    style = ":root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }"
    return f"<!doctype html><title>no curve</title><style>{style}</style><p>{html.escape(text)}</p>"


def export(runs: Sequence[RunState], out: Path) -> tuple[int, int]:
    """Write one self-contained file; returns how many groups are in it, and how many there are. A run has at
    least one, however large."""
    data: dict[str, Any] = {"runs": [], "rows": [], "groups": []}
    data["report"] = report_page([r.folder for r in runs])
    written, total = 0, 0
    for run in runs:
        while not run.rollouts.update(60.0):
            pass
        run.update()
        trained = [task for task in run.rollouts.tasks() if not task.startswith("held-out ")]
        data["runs"].append(run.view() | {"tasks": trained})
        rows = run.rollouts.page(Query(), 0, 1 << 40)["rows"]
        total += len(rows)
        shown, groups, size = list[dict[str, Any]](), dict[str, Any](), 0
        for row in _chosen(rows, EXPORTED_GROUPS // len(runs)):
            try:
                view = group_view(run.folder, *run.rollouts.record(row["id"]), whole=True)
            except NoGroupError:  # deleted meanwhile
                continue
            size += len(json.dumps(view))
            if shown and size > EXPORTED_BYTES // len(runs):
                break
            shown.append(row)
            groups[str(row["id"])] = view
        data["rows"].append(shown)
        data["groups"].append(groups)
        written += len(shown)
    data["total"] = total
    script = re.findall(r"<script>(.*?)</script>", data["report"], re.DOTALL)
    text, _ = live_page(as_script(data), script)
    out.write_text(text, encoding="utf-8")
    return written, total


def _chosen(rows: Sequence[Any], count: int) -> list[Any]:
    """Half of them the first, and half at even distances over the rest."""
    if len(rows) <= count:
        return list(rows)
    half = max(1, count // 2)
    rest = rows[half:]
    return [*rows[:half], *(rest[i * len(rest) // half] for i in range(half))]


if __name__ == "__main__":
    sys.stdout.buffer.write(report_page([Path(folder) for folder in sys.argv[1:]]).encode())
