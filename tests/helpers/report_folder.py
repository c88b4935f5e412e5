"""Runs for reports: a folder of a known sigmoid, whose texts are all hostile, and tables."""

import json
from itertools import accumulate
from pathlib import Path

import yaml

from trainer.scaling import Curve, Sigmoid, fit_curve
from trainer.scaling.forecast import backtest, error_at_2x
from trainer.scaling.reading.read import Reading
from trainer.scaling.report.run import Run

LAW = Sigmoid(R0=0.10, A=0.80, B=2.0, C_mid=0.05)
EVALUATED = tuple(0.02 * i for i in range(13))  # core-hours
HOSTILE = (
    "</script ><script>window.hacked = 1</script>",
    '"><img src="https://example.invalid/x.png" onerror="window.hacked = 2">',
    "<!--<script>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe\u2066\x1b[31m\x00",
    "\ud800 alone",  # in JSON: "\ud800"
    "x" * 300,
)
_CALL = {"type": "function", "function": {"name": f"add{HOSTILE[1]}", "arguments": "{}"}}
EPISODE = {
    "text": "all turns", "reward": -0.75, "outcome": "error", "tokens": 21, "count": 2, "tool_calls": 1,
    "seconds": 0.125, "error": f"step raised {HOSTILE[0]}",
    "turns": [
        {"role": "user", "content": f"begin {HOSTILE[0]}"},
        {"role": "assistant", "content": f"call {HOSTILE[1]}", "tokens": 5, "reward": 0.25,
         "tool_calls": [_CALL]},
        {"role": "tool", "content": HOSTILE[6] * 20},
        {"role": "assistant", "content": HOSTILE[6], "tokens": 9, "reward": -1.0},
    ],
}  # fmt: skip


def write_run(folder: Path, lr: float = 1e-5) -> Path:
    """Write metrics.jsonl and the other files as a finished run does."""
    folder.mkdir(parents=True)
    _lines(folder / "metrics.jsonl", [*_evaluations(), *_steps()])
    _lines(folder / "samples.jsonl", [_sample(step) for step in range(1, 31)])
    states = {
        "learner": {"idle": 60.0, "forward_backward": 60.0},
        "engine": {"generate": 119.0, HOSTILE[0]: 1.0},
    }
    spans = []
    for role, seconds in states.items():
        ends = list(accumulate(seconds.values(), initial=0.0))
        for state, start, end in zip(seconds, ends[:-1], ends[1:], strict=True):
            spans.append({"role": role, "state": state, "start": start, "end": end})
    _lines(folder / "timeline.jsonl", spans)
    ledger = {
        "unit": "core-hours",
        "roles": {role: {"devices": 1.0, "states": s, "seconds": s} for role, s in states.items()},
        "compute": {"total": 0.24, "evaluation": 0.01, "startup": 0.02},
    }
    (folder / "ledger.json").write_text(json.dumps(ledger))
    config = {"learner": {"lr": lr}, "data": {"template": HOSTILE[0], "chat": False}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def report_run(curve: Curve, recipe: str = "", column: str = "pass_rate", *notes: str) -> Run:
    """The run of a table."""
    reading = Reading(curve, "'core_hours'", repr(column), "'se'", column, notes)
    error = error_at_2x(backtest(curve))
    return Run(curve.name, recipe or curve.name, reading, fit_curve(curve), error, None)


def _evaluations() -> list[dict[str, object]]:
    rows = []
    for i, c in enumerate(EVALUATED):
        reward = float(LAW.reward(c)) + 0.004 * (-1) ** i
        row = {"step": 5 * i, "eval/pass_rate": reward, "eval/pass_rate_se": 0.005, "compute/total": c}
        if i > 5:
            ends = {"": 0.77, "_low": 0.77 - 0.1 / i, "_high": 0.77 + 0.1 / i}
            row |= {f"forecast/end{end}": value for end, value in ends.items()}
        rows.append(row)
    return rows


def _steps() -> list[dict[str, object]]:
    return [
        {
            "step": s, "train/pass_rate": s / 60, "learner/entropy": None if s == 30 else 2 - s / 40,
            "lag/mean": 0.5, "lag/max": 1.0, "ratio/mean": 1.0, "ratio/max": 1.5, "train/truncated": 0.0,
            "engine/tokens_per_s": 200.0, "learner/tokens_per_s": 90.0, "compute/total": 0.004 * s,
        }
        for s in range(1, 61)
    ]  # fmt: skip


def _sample(step: int) -> dict[str, object]:
    completions = [
        {"text": text, "reward": 1.0, "outcome": "correct" if i else HOSTILE[1], "tokens": 3}
        for i, text in enumerate(HOSTILE)
    ]
    texts = {"prompt": HOSTILE[step % len(HOSTILE)], "answer": HOSTILE[0]}
    return {"step": step, **texts, "completions": [*completions, EPISODE]}


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
