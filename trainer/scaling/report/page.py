"""The page: a template, filled in. Jinja2 escapes everything but our own style and script."""

import base64
import hashlib
import importlib.metadata
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer.jsonl import write_atomic
from trainer.scaling.comparability import incomparable, warnings
from trainer.scaling.compare import compare_fits, without_ranking
from trainer.scaling.layout import Block, amount
from trainer.scaling.plot import plot, reward_title
from trainer.scaling.reading.read import same_unit
from trainer.scaling.report.charts import as_script, budgets, chart_data, whiskers
from trainer.scaling.report.run import Run, by_recipe, fits_of, run_of_folder
from trainer.scaling.tables import parts
from trainer.scaling.text import answers, cautions, compute_for_most

COLOURS, MARKS = 7, 4  # as in page.css and page.js: repeated colours get another mark
LONGEST_TEXT, LONGEST_TURN = 4000, 400  # characters of a completion; at least so many of each turn


def write_report(run_dir: Path) -> None:
    """Write report.html into a run folder from the files in it."""
    write([run_of_folder(run_dir)], run_dir / "report.html")


def write(runs: Sequence[Run], out: Path, same_metric: bool = False, frontiers: Sequence[Block] = ()) -> Path:
    """Write the page of some runs."""
    write_atomic(out, page(runs, same_metric, frontiers))
    return out


def draw(runs: Sequence[Run], folder: Path, ending: str) -> list[Path]:
    """Write pictures of their curves, png or svg, into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    named = [(run.recipe, run.curve, run.fit) for run in runs]
    curves, efficiency = (folder / f"{name}.{ending}" for name in ("curves", "efficiency"))
    plot(named, curves, reward_title([run.reading.reward_column for run in runs]))
    plot(named, efficiency, panels="efficiency")
    return [curves, efficiency]


def page(runs: Sequence[Run], same_metric: bool = False, frontiers: Sequence[Block] = ()) -> str:
    """The HTML of one or many runs. ConfigError if their units of compute differ.

    `same_metric`: recipes are ranked whatever their rewards are called. `frontiers`: of a sweep's axes.
    """
    unit = same_unit([r.curve for r in runs])
    style, script = (resource(f"page.{ending}") for ending in ("css", "js"))
    ahead, names = budgets(runs), list(by_recipe(runs))
    views = [_view(i, r, names.index(r.recipe), ahead) for i, r in enumerate(runs)]
    template = environment().get_template("page.html")
    return template.render(
        title=title_of(runs),
        unit=unit,
        confidence=f"{runs[0].fit.confidence:.0%}",
        recipes=[
            {"name": name, "runs": [j for j, run in enumerate(runs) if run.recipe == name], **_look(i)}
            for i, name in enumerate(names)
        ],
        compared=compared(runs, same_metric),
        frontiers=frontiers,
        budgets=ahead,
        style=Markup(style),
        script=Markup(script),
        script_digest=Markup(script_digest(script)),
        data=Markup(as_script(chart_data(runs))),
        runs=views,
        whiskers=whiskers([r.fit for r in runs]) if len(runs) > 1 else None,
        forecasts=any(r.record and r.record.forecasts and r.fit.predictable for r in runs),
        method=resource("page.method.txt").strip().split("\n\n"),
        made=f"{date.today():%d %B %Y} by sigmoid-rl {version()}",
        differing=differing([r.record.config if r.record else None for r in runs]),
    )


def environment() -> Environment:
    """Templates that escape everything: those of this folder, and others that import them."""
    templates = Environment(
        loader=PackageLoader("trainer.scaling", "report"), autoescape=True, undefined=StrictUndefined,
        finalize=visible, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    templates.filters["amount"] = amount
    return templates


def compared(runs: Sequence[Run], same_metric: bool = False) -> dict[str, Any] | None:
    """The comparison of the recipes, by their runs that have a fit; None: there are not two of them."""
    fitted = fits_of([run for run in runs if run.fit.draws])
    if len(fitted) < 2:
        return None
    last = max(run.fit.compute_range[1] for run in runs)
    comparison = compare_fits(fitted, [last, *budgets(runs)])
    groups = {name: [run.reading for run in group] for name, group in by_recipe(runs).items()}
    comparison = without_ranking(comparison, incomparable(groups, same_metric))
    notes = [note for note in (*warnings(groups), comparison.incomparable) if note]
    notes += [f"{run.curve.name} is not compared: {run.fit.reasons}." for run in runs if not run.fit.draws]
    return {"warnings": notes, "parts": list(parts(comparison, runs[0].curve.unit, details=True))}


def visible(x: Any) -> Any:
    """Text with control characters, direction marks and lone surrogates spelled out."""
    if not isinstance(x, str) or isinstance(x, Markup):
        return x
    hidden = {c for c in x if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - {"\n", "\t"}
    return x.translate({ord(c): f"\\u{ord(c):04x}" for c in hidden})


def differing(configs: Sequence[str | None]) -> list[tuple[str, list[str]]]:
    """The settings that differ between the runs with a config: (name, value in each run)."""
    flat = [_flat(yaml.safe_load(config) or {}) if config else {} for config in configs]
    known = [settings for settings in flat if settings]
    keys = sorted({key for settings in known for key in settings} - {"run_dir"})
    rows = {key: [settings.get(key, "–") for settings in flat] for key in keys}
    return [(key, row) for key, row in rows.items() if len({f.get(key) for f in known}) > 1]


def _flat(x: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in x.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: str(value)}
    return flat


def title_of(runs: Sequence[Run]) -> str:
    """The run's name, or how many runs of how many recipes there are."""
    n, recipes = len(runs), len(by_recipe(runs))
    if n == 1:
        return runs[0].name
    if n == recipes:
        return f"{n} recipes, one run each"
    return f"{n} runs of {recipes} recipes" if recipes > 1 else f"{n} runs of one recipe"


def version() -> str:
    """The installed version of sigmoid-rl."""
    try:
        return importlib.metadata.version("sigmoid-rl")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _look(recipe: int) -> dict[str, int]:
    return {"colour": recipe % COLOURS, "mark": recipe // COLOURS % MARKS}


def _view(i: int, run: Run, recipe: int, ahead: Sequence[float]) -> dict[str, Any]:
    """The fields of a run, and what is said of it."""
    fit, record = run.fit, run.record
    return {field.name: getattr(run, field.name) for field in fields(run)} | {
        "index": i,
        **_look(recipe),
        "ahead": fit.along(ahead) if fit.predictable else [None] * len(ahead),
        "answers": answers(run.curve, fit),
        "cost": compute_for_most(fit) if fit.identified else None,
        "cautions": cautions(fit, run.curve.unit) if fit.predictable else "",
        "ledger": _ledger(record.ledger) if record and record.ledger else None,
        "samples": [sample_view(s) for s in record.samples] if record else [],
    }


def _ledger(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """Device-hours by role and state, largest first, and which of them count as C."""
    roles = {}
    for role, book in ledger["roles"].items():
        states = sorted(book["states"].items(), key=lambda item: -item[1])
        if total := sum(seconds for _, seconds in states):
            roles[role] = total / 3600, [(state, x / 3600, x / total) for state, x in states]
    return {**ledger["compute"], "unit": ledger["unit"], "roles": roles}


def sample_view(sample: Mapping[str, Any], shown: int | None = None) -> dict[str, Any]:
    """A line of samples.jsonl for `samples.html`, with so many completions (None: all)."""
    everything = sample["completions"]
    completions = [{**c, "text": _cut(c["text"], LONGEST_TEXT)} for c in everything[:shown]]
    for c in completions:
        if turns := c.get("turns"):  # of an episode
            most = max(LONGEST_TURN, LONGEST_TEXT // len(turns))
            c["turns"] = [
                {"reward": None, "tool_calls": (), **turn} | _turn_view(turn, most) for turn in turns
            ]
    right, more = sum(c["outcome"] == "correct" for c in everything), len(everything) - len(completions)
    counts = {"right": right, "count": len(everything), "more": more}
    return {"set": "", **sample, "completions": completions, **counts}


def _turn_view(turn: Mapping[str, Any], most: int) -> dict[str, Any]:
    sampled = turn["role"] == "assistant" and "tokens" in turn
    return {"content": _cut(turn["content"], most), "sampled": sampled}


def _cut(text: str, most: int) -> str:
    more = len(text) - most
    return text[:most] + (f" … ({more:,} more characters)" if more > 0 else "")


def script_digest(script: str) -> str:
    """The SHA-256 of a script as a Content-Security-Policy has it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def resource(name: str) -> str:
    """The text of a file in this folder."""
    return (files("trainer.scaling.report") / name).read_text(encoding="utf-8")
