"""Steps per hour of PipelineRL-k and PPO-off-policy-k: real runs on the same work, in turn. [5 min]

  python -m bench pipeline.schemes                   k = 2 and 8, one core for each side, 3 times
  python -m bench pipeline.schemes --k 4 --rounds 5 --more "--recipe demo --model.path smollm2-135m"
  python -m bench pipeline.schemes --more "--engine.kind vllm"    options of the trainer, for every run

The model is that of `--recipe tiny`, untrained: so every run has the same work. Its answers are wrong, of
random lengths, and stay so; they are kept in the loss, although they have no gradient.

Model, prompts, batch, seed and the number of steps that count are the same. Not counted are, of PipelineRL,
the k + 1 steps that fill its pipeline and the last k + 1, while no new groups start; of PPO-off-policy, the
first round. No evaluation falls into the steps that count.
"""

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Case, Row, by_round, grouped, in_turns, median_and_range
from bench.pipeline.virtual_run import Scheme
from bench.table import table
from trainer.jsonl import read_lines
from trainer.models import tiny

OPTIONS: dict[str, Any] = {
    "k": ("2,8", "k of both schemes, comma-separated"),
    "rounds": (3, "runs of each"),
    "steps": (24, "steps that count"),
    "more": ("", "options of the trainer"),
}
RECORD = "schemes-cpu.jsonl"
FORMS = {"learner_idle": ".1%", "engine_idle": ".1%", "lag_mean": ".2f", "lag_max": ".0f", "tokens": ".0f"}
RESTING = ("idle", "start-up")  # states of a role


def window(scheme: Scheme, steps: int) -> tuple[int, int]:
    """The steps that count: those after the first number, up to the second."""
    return (scheme.k, steps) if scheme.kind == "ppo" else (scheme.k + 1, steps - scheme.k - 1)


def measured(folder: Path, first: int, last: int) -> Row:
    """The steps after `first`, up to `last`, of a run that was never resumed."""
    rows = {r["step"]: r for r in read_lines(folder / "metrics.jsonl") if "train/wait_s" in r}
    began, ended = rows[first]["time"], rows[last]["time"]
    busy: dict[str, float] = {}
    for span in read_lines(folder / "timeline.jsonl"):
        inside = min(span["end"], ended) - max(span["start"], began)
        if inside > 0 and span["state"] not in RESTING:
            busy[span["role"]] = busy.get(span["role"], 0.0) + inside
    engines = [seconds for role, seconds in busy.items() if role.startswith("engine")]
    counted = [rows[step] for step in range(first + 1, last + 1)]
    lags = [(int(lag), n) for row in counted for lag, n in row["lag/histogram"].items()]
    tokens = sum(n for _, n in lags)
    return {
        "steps_per_hour": 3600 * len(counted) / (ended - began),
        "learner_idle": 1 - busy["learner"] / (ended - began),  # share of the time
        "engine_idle": 1 - sum(engines) / len(engines) / (ended - began),
        "lag_mean": sum(lag * n for lag, n in lags) / max(1, tokens),  # of the tokens, in steps
        "lag_max": max((lag for lag, _ in lags), default=0),
        "tokens": tokens / len(counted),  # trained on in a step
    }


def train(scheme: Scheme, steps: int, more: Sequence[str]) -> Row:
    """One run of an untrained model. RuntimeError with its errors: it failed."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name) / "run", Path(name) / "untrained"
        tiny.make_model(tiny.SEED).save_pretrained(model)
        tiny.make_tokenizer().save_pretrained(model)
        settings: Mapping[str, Any] = {
            "--recipe": "tiny", "--model.path": model, "--run-dir": folder, "--pipeline.steps": steps,
            "--engine.threads": 1, "--learner.threads": 1, "--pipeline.prompts_per_step": 32,
            "--engine.max_new_tokens": 64, "--objective.zero_variance": "keep",
            "--evaluation.every": 10**6, "--evaluation.samples": 1, "--logging.checkpoint_every": 0,
            "--logging.tensorboard": "false",
        }  # fmt: skip
        argv = [sys.executable, "-m", "trainer.main", *(str(x) for pair in settings.items() for x in pair)]
        done = subprocess.run([*argv, *scheme.flags, *more], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{scheme}: the run failed: {done.stderr.strip()[-150:]}")
        row = measured(folder, *window(scheme, steps))
    return {"kind": scheme.kind, "k": scheme.k, "load": os.getloadavg()[0]} | row


def cases(options: Namespace) -> Iterator[Case]:
    """Every scheme, once a round."""
    ks = [int(k) for k in options.k.split(",")]
    schemes = {str(s): s for k in ks for s in (Scheme("pipeline", k), Scheme("ppo", k))}

    def measure(name: str) -> Row:
        scheme = schemes[name]
        counted = -(-options.steps // scheme.k) * scheme.k
        steps = counted + scheme.k + (scheme.k + 2) * (scheme.kind == "pipeline")
        return train(scheme, steps, shlex.split(options.more))

    return in_turns(list(schemes), options.rounds, measure)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The table, and the ratio of both schemes for each k: median and range over the rounds."""
    lines, speeds = [], dict[tuple[Any, int], dict[str, float]]()
    for (kind, k), group in grouped(rows, "kind", "k").items():
        speeds[kind, k] = by_round(group, "steps_per_hour")
        means = (format(statistics.median(row[key] for row in group), form) for key, form in FORMS.items())
        lines.append([str(Scheme(kind, k)), median_and_range(speeds[kind, k].values(), ".0f"), *means])
    columns = ["", "steps/h (range)", "learner idle", "engine idle", "lag mean", "lag max", "tokens/step"]
    text = [table(columns, lines)]
    for k in dict.fromkeys(k for _, k in speeds):
        pipeline, ppo = (speeds.get((kind, k), {}) for kind in ("pipeline", "ppo"))
        if ratios := [speed / ppo[i] for i, speed in pipeline.items() if i in ppo]:
            text.append(
                f"k = {k}: PipelineRL makes {median_and_range(ratios)} times the steps per hour in "
                f"{len(ratios)} pairs of runs"
            )
    return "\n".join(text)
