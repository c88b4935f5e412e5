"""report.html of a run: one self-contained page from the files in the run folder."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.metrics import read

CHARTS = {  # metric -> title
    "train/pass_rate": "pass rate in training",
    "train/effective_prompts": "prompts with a gradient",
    "learner/entropy": "entropy, nats",
    "lag/mean": "lag, versions",
    "ratio/max": "largest ratio ρ",
    "train/truncated": "share truncated",
    "engine/tokens_per_s": "engine, tokens/s",
    "learner/tokens_per_s": "learner, loss tokens/s",
}
SAMPLES = 12
STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --dim: #66717e; --line: #d9dee4;
  --fill: #1f6feb; --paper: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #9aa5b1; --line: #39424e; --paper: #14181d } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
pre { overflow-x: auto; white-space: pre-wrap }
img { width: 100%; background: #fff; border-radius: 6px } svg { width: 100%; height: auto }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: 1rem }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem .75rem }
figcaption { color: var(--dim); font-size: .85rem } table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid var(--line) }
.n { text-align: right }
.bar { background: var(--fill); height: .6rem; border-radius: 3px }
.right { color: #2a9d57 } .wrong { color: #d1495b }
@media print { details { display: block } }
"""


def write_report(run_dir: Path) -> None:
    """Read the run's files, write report.html beside them. Everything a model wrote is escaped."""
    rows = read(run_dir / "metrics.jsonl")
    ledger = json.loads((run_dir / "ledger.json").read_text())
    parts = [f"<h1>{html.escape(run_dir.name)}</h1>", _summary(rows, ledger)]
    if (run_dir / "curve.png").is_file():
        picture = base64.b64encode((run_dir / "curve.png").read_bytes()).decode()
        parts.append(f'<img alt="Held-out pass rate over compute" src="data:image/png;base64,{picture}">')
    if (run_dir / "fit.txt").is_file():
        parts.append(f"<pre>{html.escape((run_dir / 'fit.txt').read_text())}</pre>")
    steps = [r for r in rows if "train/pass_rate" in r]
    charts = [
        _chart(title, [(r["step"], r[k]) for r in steps if r.get(k) is not None])
        for k, title in CHARTS.items()
    ]
    parts += ["<h2>Training</h2>", f'<div class="charts">{"".join(charts)}</div>']
    parts += ["<h2>Where the compute went</h2>", _ledger(ledger)]
    parts += ["<h2>Samples</h2>", _samples(run_dir)]
    config = html.escape(
        yaml.safe_dump(yaml.safe_load((run_dir / "config.yaml").read_text()), sort_keys=False)
    )
    parts.append(f"<details><summary>Configuration</summary><pre>{config}</pre></details>")
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(run_dir.name)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )
    (run_dir / "report.html").write_text(page)


def _summary(rows: Sequence[dict[str, Any]], ledger: dict[str, Any]) -> str:
    scores = [r for r in rows if "eval/pass_rate" in r]
    if not scores:
        return "<p>No evaluation was finished.</p>"
    first, last = scores[0], scores[-1]
    return (
        f"<p>Held-out pass rate <b>{first['eval/pass_rate']:.3f} → {last['eval/pass_rate']:.3f}</b> "
        f"(± {last['eval/pass_rate_se']:.3f}) in {last['step']} steps and "
        f"{last['compute/total']:.3g} {html.escape(ledger['unit'])}, evaluation apart.</p>"
    )


def _chart(title: str, points: Sequence[tuple[float, float]]) -> str:
    """A small line chart as inline SVG."""
    if len(points) < 2:
        return ""
    xs, ys = zip(*points, strict=True)
    low, high = min(ys), max(ys)
    span, width = (high - low) or 1.0, (xs[-1] - xs[0]) or 1.0
    path = " ".join(
        f"{'M' if i == 0 else 'L'}{300 * (x - xs[0]) / width:.1f} {80 - 76 * (y - low) / span:.1f}"
        for i, (x, y) in enumerate(points)
    )
    return (
        f'<figure><svg viewBox="0 -2 300 84" role="img" aria-label="{html.escape(title)}">'
        f'<path d="{path}" fill="none" stroke="var(--fill)" stroke-width="1.5"/></svg>'
        f"<figcaption>{html.escape(title)}: {ys[0]:.3g} → {ys[-1]:.3g} (from {low:.3g} to {high:.3g})"
        "</figcaption></figure>"
    )


def _ledger(ledger: dict[str, Any]) -> str:
    rows = []
    for role, book in ledger["roles"].items():
        if not book["devices"]:
            continue
        total = sum(book["states"].values())
        for state, seconds in sorted(book["states"].items(), key=lambda kv: -kv[1]):
            share = seconds / total if total else 0.0
            rows.append(
                f"<tr><td>{html.escape(role)}</td><td>{html.escape(state)}</td>"
                f'<td class="n">{seconds / 3600:.4f}</td><td class="n">{share:.1%}</td>'
                f'<td style="width:30%"><div class="bar" style="width:{share:.1%}"></div></td></tr>'
            )
    unit = html.escape(ledger["unit"])
    head = f'<tr><th>role</th><th>state</th><th class="n">{unit}</th><th class="n">share</th><th></th></tr>'
    return f"<table>{head}{''.join(rows)}</table>"


def _samples(run_dir: Path) -> str:
    path = run_dir / "samples.jsonl"
    samples = read(path)[-SAMPLES:] if path.is_file() else []
    items = []
    for sample in samples:
        completions = "".join(
            f'<li class="{"right" if c["outcome"] == "correct" else "wrong"}">'
            f"{html.escape(repr(c['text'])[1:-1])} "
            f"<small>{html.escape(c['outcome'])}, reward {c['reward']:g}</small></li>"
            for c in sample["completions"]
        )
        items.append(
            f"<details><summary>step {sample['step']}: {html.escape(sample['prompt'])}</summary>"
            f"<ul>{completions}</ul></details>"
        )
    return "".join(items) or "<p>None were kept.</p>"
