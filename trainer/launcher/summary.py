"""The end of a run: writes the fit, the picture of the curve and the report, and sums the run up as text."""

import json
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.accounting.ledger import Ledger
from trainer.config import Config
from trainer.jsonl import read_lines, write_atomic
from trainer.launcher.advice import advise_run
from trainer.launcher.terminal_plot import clock
from trainer.launcher.what_next import what_next
from trainer.run_folder import origin
from trainer.scaling import EvalPoint, Fit, curve_of, explain, plot_curve
from trainer.scaling.forecast import backtest, error_at_2x
from trainer.scaling.report.page import write_report
from trainer.scaling.text import describe_backtest


def finish(
    config: Config, points: Sequence[EvalPoint], fit: Fit | None, ledger: Ledger, memory: tuple[float, float]
) -> str:
    """Write fit.json, curve.png and report.html into the run folder; returns the summary to print.

    `memory` is what a learner rank held at most, and what was expected, in GB."""
    run_dir, text = Path(config.run_dir), "no evaluation was finished, so there is no curve yet"
    if fit is not None:
        test = backtest(curve_of(run_dir.name, ledger.unit, points))
        content = {"error_at_2x": error_at_2x(test)} | fit.to_json()
        write_atomic(run_dir / "fit.json", json.dumps(content, indent=1))
        plot_curve(points, fit, run_dir / "curve.png", ledger.unit, run_dir.name)
        text = "\n".join(filter(None, (explain(fit, ledger.unit), describe_backtest(test, ledger.unit))))
        write_atomic(run_dir / "fit.txt", text)
        try:
            write_report(run_dir)
        except Exception as e:  # the run is complete, and its summary must be printed whatever this error is
            traceback.print_exc()
            again = f"python -m trainer.scaling report {run_dir} --out {run_dir}/report.html"
            problem = f"report.html could not be written ({e!r})"
            text += f"\n\n{problem}. The run is complete; try again with {again}"
    samples = not config.objective.supervised  # else engines are idle, as they should be
    advice = advise_run(ledger.to_json(), ledger.idle_shares(), config).text if samples else ""
    advice = advice and f"While it trained: {advice}"
    best = max(points, key=lambda p: p.pass_rate).step if fit and "falling" in fit.flags else None
    text = f"{text}\n\n{what_next(config, best)}"
    return summary_text(run_dir, points, ledger, text, advice, memory)


FILES = {
    "curve.png": "the fitted curve",
    "report.html": "the same with all numbers, self-contained",
    "metrics.jsonl": "one object a line: every step, every evaluation",
    "held_out.jsonl": "what N completions of each held-out prompt are worth",
    "samples.jsonl": "prompts and completions with their rewards",
    "ledger.json": "device-seconds by role and state",
    "tensorboard": "events for TensorBoard",
    "checkpoints": "for --resume, and for AutoModelForCausalLM.from_pretrained",
}


def summary_text(
    run_dir: Path,
    points: Sequence[EvalPoint],
    ledger: Ledger,
    fit: str,
    advice: str,
    memory: tuple[float, float],
) -> str:
    """The pass rate from start to end, where the compute went, the fit, the advice, and the files."""
    books, compute = ledger.to_json(), ledger.compute()
    lines = [f"{run_dir.name}: {clock(books['wall_s'])} of wall time", ""]
    if text := origin(run_dir).get("text"):
        lines.append(text)
    if points:
        score = [f"{p.pass_rate:.3f} ± {p.pass_rate_se:.3f} (step {p.step})" for p in (points[0], points[-1])]
        lines.append("held-out pass rate  " + " → ".join(score[: len(points)]))
    if rewards := graded(run_dir):
        lines.append("held-out reward     " + " → ".join(f"{r:.3f}" for r in (rewards[0], rewards[-1])))
    others = f"{compute.evaluation:.4g} for evaluation, {compute.startup:.4g} for start-up and end"
    lines.append(f"compute             {compute.total:.4g} {ledger.unit}, and {others}")
    if memory[0]:
        memory_text = f"{memory[0]:.3g} GB at most on a rank, {memory[1]:.3g} GB estimated"
        lines.append(f"learner's memory    {memory_text}")
    lines += ["", *_compute_table(books), "", *textwrap.wrap(advice, 100), "", fit.strip(), ""]
    lines.append(f"files in {run_dir}")
    lines += [f"  {name:<14} {content}" for name, content in FILES.items() if (run_dir / name).exists()]
    return "\n".join(lines)


def graded(run_dir: Path) -> list[float]:
    """The held-out rewards of a scorer with grades, whose mean says more than the pass rate; else none."""
    rows = list(read_lines(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").is_file() else []
    rows = [r for r in rows if None not in (r.get("eval/mean_reward"), r.get("eval/pass_rate"))]
    pairs = [(row["eval/mean_reward"], row["eval/pass_rate"]) for row in rows]
    plain = all(min(abs(r - p), abs(r - (2 * p - 1))) < 1e-6 for r, p in pairs)  # 0 or 1, or −1 or 1
    return [] if plain else [r for r, _ in pairs]


def _compute_table(books: Mapping[str, Any]) -> list[str]:
    """Device-hours by state, a column for each role that holds devices; idle and the sum come last."""
    roles = {name: r["states"] for name, r in books["roles"].items() if r["devices"]}
    sums = {name: sum(states.values()) for name, states in roles.items()}
    order = {state: -s for states in roles.values() for state, s in states.items()}
    states = sorted(order, key=lambda state: (state == "idle", order[state]))
    rows = [f"{books['unit'] + ', of all':<18}" + "".join(f"{name:>18}" for name in roles)]
    for state in states:
        cells = [(r.get(state, 0.0), sums[name]) for name, r in roles.items()]
        shares = (f"{s / 3600:>11.4f} {s / total:>6.1%}" if s else f"{'–':>11}{'':7}" for s, total in cells)
        rows.append(f"  {state:<16}" + "".join(shares))
    rows.append(f"  {'all':<16}" + "".join(f"{s / 3600:>11.4f}{'':7}" for s in sums.values()))
    return [row.rstrip() for row in rows]
