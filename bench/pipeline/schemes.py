"""Steps per hour of PipelineRL-k and PPO-off-policy-k, measured: real runs on the same work, in turn.

  python -m bench.pipeline.schemes                            k = 2 and 8, one core for each side, 3 times
  python -m bench.pipeline.schemes --k 4 --repeats 5 -- --recipe demo --model.path smollm2-135m
  python -m bench.pipeline.schemes -- --engine.kind vllm      what follows -- goes to every run

The model is that of `--recipe tiny`, untrained: so every run has the same work. Its answers are wrong, of
random lengths, and stay so; they are kept in the loss, although they have no gradient.

Model, prompts, batch, seed and the number of steps that count are the same. Not counted are, of PipelineRL,
the k + 1 steps that fill its pipeline and the last k + 1, while no new groups start; of PPO-off-policy, the
first round. No evaluation falls into the steps that count.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench import records
from bench.measure import rounds_of
from bench.pipeline.virtual_run import Scheme
from bench.table import table
from trainer.jsonl import read_lines
from trainer.models import tiny

RESTING = ("idle", "start-up")  # states of a role


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, or the medians of several."""

    steps_per_hour: float
    learner_idle: float  # share of the time
    engine_idle: float
    lag_mean: float  # of the tokens, in steps
    lag_max: float
    tokens: float  # trained on in a step


def flags(scheme: Scheme) -> list[str]:
    """The options of the trainer."""
    if scheme.kind == "ppo":
        return ["--pipeline.scheme", "ppo_off_policy", "--pipeline.minibatches", str(scheme.k)]
    return ["--pipeline.scheme", "pipeline_rl", "--pipeline.max_lag", str(scheme.k)]


def window(scheme: Scheme, steps: int) -> tuple[int, int]:
    """The steps that count: those after the first number, up to the second."""
    return (scheme.k, steps) if scheme.kind == "ppo" else (scheme.k + 1, steps - scheme.k - 1)


def measure(folder: Path, first: int, last: int) -> Measured:
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
    return Measured(
        steps_per_hour=3600 * len(counted) / (ended - began),
        learner_idle=1 - busy["learner"] / (ended - began),
        engine_idle=1 - sum(engines) / len(engines) / (ended - began),
        lag_mean=sum(lag * n for lag, n in lags) / max(1, tokens),
        lag_max=max((lag for lag, _ in lags), default=0),
        tokens=tokens / len(counted),
    )


def median(runs: Sequence[Measured]) -> Measured:
    """The median of each figure."""
    return Measured(*(statistics.median(getattr(r, f.name) for r in runs) for f in fields(Measured)))


def train(folder: Path, model: Path, scheme: Scheme, steps: int, more: Sequence[str]) -> Measured:
    """One run in `folder`; SystemExit with its errors if it fails."""
    given: Mapping[str, Any] = {
        "--recipe": "tiny",
        "--model.path": model,
        "--run-dir": folder,
        "--pipeline.steps": steps,
        "--engine.threads": 1,
        "--learner.threads": 1,
        "--pipeline.prompts_per_step": 32,
        "--engine.max_new_tokens": 64,
        "--objective.zero_variance": "keep",
        "--evaluation.every": 10**6,
        "--evaluation.samples": 1,
        "--logging.checkpoint_every": 0,
        "--logging.tensorboard": "false",
    }
    argv = [sys.executable, "-m", "trainer.main", *(str(x) for pair in given.items() for x in pair)]
    done = subprocess.run([*argv, *flags(scheme), *more], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{scheme}: the run failed: {done.stderr.strip()[-2000:]}")
    return measure(folder, *window(scheme, steps))


def report(runs: Mapping[Scheme, Sequence[Measured]], ks: Sequence[int]) -> str:
    """The table, and the ratio of both schemes for each k: median and range over the repeats."""
    head = ["", "steps/h", "range", "learner idle", "engine idle", "lag mean", "lag max", "tokens/step"]
    rows = []
    for scheme, measured in runs.items():
        m, speeds = median(measured), [r.steps_per_hour for r in measured]
        speed = [f"{m.steps_per_hour:.0f}", f"{min(speeds):.0f}–{max(speeds):.0f}"]
        idle = [f"{m.learner_idle:.1%}", f"{m.engine_idle:.1%}"]
        rows.append([str(scheme), *speed, *idle, f"{m.lag_mean:.2f}", f"{m.lag_max:.0f}", f"{m.tokens:.0f}"])
    lines = [table(head, rows)]
    for k in ks:
        pairs = zip(runs[Scheme("pipeline", k)], runs[Scheme("ppo", k)], strict=True)
        ratios = [pipeline.steps_per_hour / ppo.steps_per_hour for pipeline, ppo in pairs]
        lines.append(
            f"k = {k}: PipelineRL makes {statistics.median(ratios):.2f} times the steps per hour "
            f"(from {min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs of runs)"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run everything in turn, print the table."""
    p = records.parser("pipeline.schemes", __doc__, repeats=3, steps=24)
    p.add_argument("--k", default="2,8", help="k of both schemes, comma-separated")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the record here, as JSON")
    p.add_argument("more", nargs="*", help="options of the trainer, after --")
    args = p.parse_args(argv)
    ks = [int(k) for k in args.k.split(",")]
    schemes = {str(s): s for k in ks for s in (Scheme("pipeline", k), Scheme("ppo", k))}
    runs: dict[Scheme, list[Measured]] = {scheme: [] for scheme in schemes.values()}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "untrained")
        tiny.make_model(tiny.SEED).save_pretrained(model)
        tiny.make_tokenizer().save_pretrained(model)
        for i, order in enumerate(rounds_of(list(schemes), args.repeats)):
            for name in order:
                scheme, run_dir = schemes[name], Path(folder, f"{name}-{i}")
                counted = -(-args.steps // scheme.k) * scheme.k
                steps = counted + scheme.k + (scheme.k + 2) * (scheme.kind == "pipeline")
                runs[scheme].append(train(run_dir, model, scheme, steps, args.more))
                last = runs[scheme][-1]
                load = os.getloadavg()[0]
                records.say(f"{name}, run {i + 1}: {last.steps_per_hour:.0f} steps/h, load {load:.1f}")
            if i + 1 < args.repeats:
                records.say(report(runs, ks))
    print(report(runs, ks))
    record = {str(scheme): [asdict(one) for one in measured] for scheme, measured in runs.items()}
    records.write(args.out, {"command": records.command("pipeline.schemes", argv), "runs": record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
