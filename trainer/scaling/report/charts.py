"""The numbers in the page's charts as one JSON object; page.js documents how they are drawn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from trainer.jsonl import nan_to_null
from trainer.scaling.curve.average import FURTHEST
from trainer.scaling.curve.fit import Estimate, Fit
from trainer.scaling.plot import LINEAR_REACH, reward_title, sampled, straighten
from trainer.scaling.report.run import Record, Run

TRAINING = (  # (title, metrics: the first is drawn solid, the second dashed)
    ("Pass rate in training", {"train/pass_rate": "pass rate"}),
    ("Prompts with a gradient", {"train/effective_prompts": "prompts"}),
    ("Entropy, nats", {"learner/entropy": "entropy"}),
    ("Truncated completions, share", {"train/truncated": "truncated"}),
    ("Length, tokens", {"train/length_mean": "mean", "train/length_max": "longest"}),
    ("Episodes, turns", {"environment/turns": "turns", "environment/tool_calls": "tool calls"}),
    (
        "Episodes that failed, share",
        {"environment/error": "failed", "environment/unscored": "without a reward"},
    ),
    ("Lag, weight versions", {"lag/mean": "mean", "lag/max": "largest"}),
    ("Ratio ρ = π_train / π_gen", {"ratio/mean": "mean", "ratio/max": "largest"}),
    ("Share of ρ beyond its bound", {"ratio/truncated": "beyond"}),
    ("KL to the generator (k3), nats", {"kl/k3": "k3"}),
    ("Gradient norm", {"learner/grad_norm": "norm"}),
    ("Engine, tokens/s", {"engine/tokens_per_s": "tokens/s"}),
    ("Learner, loss tokens/s", {"learner/tokens_per_s": "tokens/s"}),
)


def chart_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that is drawn, as valid JSON: six digits of each number; None: it is not finite."""
    longest = max((p.compute for r in runs for p in r.curve.points), default=0.0)
    steps = [step for r in runs if r.record for step in r.record.steps]
    recipes = list(dict.fromkeys(r.recipe for r in runs))
    logged = {name for step in steps for name, value in step.items() if value is not None}
    drawn = {
        "unit": runs[0].curve.unit,
        "reward": reward_title([r.reading.reward_column for r in runs]),
        "training": [{"title": title, "metrics": ms} for title, ms in TRAINING if not logged.isdisjoint(ms)],
        "evaluations": sorted({name for r in runs if r.record for name in r.record.evaluations}),
        "reach": LINEAR_REACH * longest,
        "recipes": recipes,
        "runs": [_run(r, longest) | {"recipe": recipes.index(r.recipe)} for r in runs],
    }
    return dict(json.loads(json.dumps(nan_to_null(drawn)), parse_float=lambda x: float(f"{float(x):.6g}")))


def as_script(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside <script>: without <, > and &, in ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def budgets(runs: Sequence[Run]) -> tuple[float, ...]:
    """The computes at which the rewards of all runs are forecast, so that they can be compared."""
    longest = max(run.fit.compute_range[1] for run in runs)
    return (2 * longest, FURTHEST * longest) if longest > 0 else ()


def whiskers(fits: Sequence[Fit]) -> dict[str, Any]:
    """The ceilings, or their ranges, on one scale with ticks, in percent of its width; None: unknown."""
    from matplotlib.ticker import MaxNLocator  # not needed for a single run

    known = [fit.A for fit in fits if fit.predictable]
    if not known:
        return {"ticks": [], "runs": [None] * len(fits)}
    low, high = min(A.low for A in known), max(A.high for A in known)
    margin = max(0.08 * (high - low), 0.01)
    low, high = low - margin, high + margin
    ticks = [x for x in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= x <= high]
    digits = max(len(f"{x:.6g}".partition(".")[2]) for x in ticks)

    def position(x: float) -> float:
        return round(100 * (x - low) / (high - low), 2)

    return {
        "ticks": [(position(x), f"{x:.{digits}f}") for x in ticks],
        "runs": [Estimate(*map(position, astuple(fit.A))) if fit.predictable else None for fit in fits],
    }


def _run(run: Run, longest: float) -> dict[str, Any]:
    curve, fit = run.curve, run.fit
    first, last = (curve.points[i].compute if curve.points else None for i in (0, -1))
    points = [(p.compute, p.pass_rate, p.pass_rate_se, p.step) for p in curve.evaluations]
    drawn: dict[str, Any] = {"name": run.name, "points": points, "first": first, "last": last}
    drawn |= {"curve": sampled(curve, fit, longest).tolist() if fit.predictable else []}
    drawn |= {"ceiling": None, "efficiency": None}
    if fit.identified:
        straight = straighten(curve, fit).tolist()
        drawn["ceiling"] = astuple(fit.A)
        drawn["efficiency"] = {"points": straight, "B": fit.B.value, "C_mid": fit.C_mid.value}
        drawn["efficiency"] |= {"left_out": len(curve.points) - len(straight)}
    return drawn | (_record(run.record, fit.predictable) if run.record else {})


def _record(record: Record, predictable: bool) -> dict[str, Any]:
    metrics = [m for _, ms in TRAINING for m in ms]
    series = {m: [s.get(m) for s in record.steps] for m in metrics}
    return {
        "steps": [s["step"] for s in record.steps],
        "series": {m: v for m, v in series.items() if any(x is not None for x in v)},
        "forecasts": record.forecasts * predictable,
        "evaluations": record.evaluations,
        "wall_s": record.wall_s,
        "lanes": [{"role": role, "shares": shares} for role, shares in record.lanes.items()],
    }
