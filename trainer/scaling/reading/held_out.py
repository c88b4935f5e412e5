"""Reads what N completions of each held-out prompt were worth in a run's evaluations: held_out.jsonl.

`python -m trainer.evaluate RUN --name NAME` writes one as well, in RUN/evaluations/NAME.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.jsonl import read_lines
from trainer.run_folder import EVALUATIONS, HELD_OUT
from trainer.scaling.curve.sigmoid import Array


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """One measure of N completions, over the evaluations of one task or set."""

    measure: str  # pass, maj or best
    compute: Array  # (evaluations,), ascending
    ns: tuple[int, ...]  # 1, 2, 4, …
    by_prompt: Array  # (evaluations, ns, prompts), from 0 to 1


def read_worth(folder: Path, name: str | None, compute: Mapping[int, float]) -> list[Worth]:
    """The measures of one task, set or later evaluation (None: the only task) at steps of known compute.

    Of a step that a resumed run evaluated again, the later line counts. ConfigError: there are none."""
    later = later_evaluation(folder, name)
    path = (later or (folder if folder.is_dir() else folder.parent)) / HELD_OUT
    if later and name:
        name = name.partition("/")[2]  # of a further set in it
    if not path.is_file():
        raise ConfigError(f"{folder} has no {HELD_OUT}; expected a run folder of a run that records it")
    lines = {(row["set"], row["step"]): row for row in read_lines(path)}
    names = list(dict.fromkeys(one for one, _ in lines))
    if (chosen := name or "") not in names:
        listed = ", ".join(filter(None, names)) or "only the run's task: leave it out"
        options = "(inference --set NAME, fit --reward-column eval/NAME/pass_rate)"
        asked = f"has no held-out prompts of {name}" if name else "has several tasks or sets"
        raise ConfigError(f"{folder} {asked}; expected one of: {listed} {options}")
    steps = [step for one, step in sorted(lines) if one == chosen and step in compute]
    steps.sort(key=lambda step: compute[step])
    rows = [lines[chosen, step] for step in steps]
    if not rows:
        raise ConfigError(f"{folder}: no evaluation of {HELD_OUT} is among those of its metrics.jsonl")
    measures = [measure for measure in ("pass", "maj", "best") if measure in rows[-1]]
    out = []
    for measure in measures:
        ns = tuple(sorted(map(int, rows[-1][measure])))
        sizes = {(tuple(sorted(map(int, row[measure]))), len(row[measure]["1"])) for row in rows}
        if len(sizes) > 1:
            raise ConfigError(f"{folder}: its evaluations have different prompts or evaluation.samples")
        values = [[row[measure][str(n)] for n in ns] for row in rows]
        at = np.array([compute[step] for step in steps])
        out.append(Worth(measure, at, ns, np.array(values, np.float64)))
    return out


def later_evaluation(path: Path, name: str | None) -> Path | None:
    """The folder of a run's later evaluation of this name, or NAME/SET; None if there is none."""
    folder = (path if path.is_dir() else path.parent) / EVALUATIONS / (name or "").partition("/")[0]
    return folder if name and folder.is_dir() else None


def completion_cost(path: Path, name: str) -> float | None:
    """Device-hours that an engine takes for a completion as long as those of a task or set were at last, at
    its pace in training; None if the run's files do not say."""
    folder = path if path.is_dir() else path.parent
    ledger, metrics = folder / "ledger.json", folder / "metrics.jsonl"
    if not (ledger.is_file() and metrics.is_file()):
        return None
    roles, rows = json.loads(ledger.read_text())["roles"], list(read_lines(metrics))
    engines = [role["states"] for key, role in roles.items() if key.startswith("engine")]
    seconds = sum(states.get("generate", 0.0) for states in engines)
    tokens = sum(row.get("train/rollout_tokens", 0) for row in rows)
    lengths = [row[key] for row in rows if (key := f"eval/{name}/mean_tokens".replace("//", "/")) in row]
    return seconds / 3600 / tokens * lengths[-1] if seconds and tokens and lengths else None
