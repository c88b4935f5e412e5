"""The trainer's own controller at the paper's sizes, in virtual time. [1 min]

  python -m bench pipeline.virtual_run     Qwen3-8B on eight H100 or H200, 48 prompts × 16, PipelineRL-8

Controller, engine pool and the engines' queue are the trainer's; the clock is virtual, so that hours pass in
seconds. Held beside it is the closed form: the slower side alone sets the pace. The speeds come from a model
of the hardware (docs/gpu.md), and none has been measured. `python -m bench pipeline` runs it for every split.
"""

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from bench.harness import Case, Row
from bench.pipeline.timed import Rates, Step, TimedEngine, TimedLearner, VirtualLoop, Workload
from bench.table import table
from trainer.cli import parse
from trainer.config import Config
from trainer.controller.context import RolloutContext
from trainer.controller.controller import Controller
from trainer.controller.data import Dataset
from trainer.controller.deadline import Deadline
from trainer.controller.rewards import Scored
from trainer.controller.sampler import Sampler
from trainer.engines.pool import EnginePool
from trainer.launcher.placement import Split
from trainer.types import Prompt

OPTIONS: dict[str, Any] = {}
PARALLEL = True
STEPS = 24  # that count, at the paper's sizes


@dataclass(frozen=True, slots=True)
class Scheme:
    """PipelineRL-k ("pipeline", k ≥ 0) or PPO-off-policy-k ("ppo", k ≥ 1)."""

    kind: Literal["pipeline", "ppo"]
    k: int

    def __post_init__(self) -> None:
        if self.k < (self.kind == "ppo"):
            raise ValueError(f"{self}: expected k of at least {int(self.kind == 'ppo')}")

    def __str__(self) -> str:
        return f"{'PipelineRL' if self.kind == 'pipeline' else 'PPO-off-policy'}-{self.k}"

    @property
    def flags(self) -> list[str]:
        """The options of the trainer."""
        if self.kind == "ppo":
            return ["--pipeline.scheme=ppo_off_policy", f"--pipeline.minibatches={self.k}"]
        return ["--pipeline.scheme=pipeline_rl", f"--pipeline.max_lag={self.k}"]

    @property
    def batches_open(self) -> int:
        """Batches whose groups start at version 0."""
        return self.k + 1 if self.kind == "pipeline" else self.k


@dataclass(frozen=True, slots=True)
class Outcome:
    """Speed, idle shares and lags of a run in the steps that count."""

    steps_per_hour: float
    learner_idle: float  # share of the time
    engine_idle: float  # share of the time in which an engine has no sequence
    lag: dict[int, float]  # share of the trained tokens by lag
    lag_mean: float  # over the trained tokens
    lag_max: int  # of the oldest token
    tokens: float  # of a batch, mean
    first_batch_s: float  # from the beginning to the first complete batch


class _Rewards:
    async def score(self, prompt: Prompt, text: str, tokens: int, step: int | None) -> Scored:
        return Scored(float(tokens % 2), "correct" if tokens % 2 else "wrong", {})


class _NoJournal:
    def record(self, *args: Any) -> None:
        """Writes nothing."""

    issued = finished = trained = learned = record


def run(
    work: Workload, rates: Rates, split: Split, scheme: Scheme, steps: int = STEPS, warm: int = -1
) -> Outcome:
    """A training in which `steps` optimizer steps count, after `warm` (−1: until the pipeline is full) and
    before the last ones, beside which no new groups start."""
    open_ = scheme.batches_open
    warm = 2 * open_ if warm < 0 else warm
    if scheme.kind == "ppo":  # whole rounds
        warm, steps = (-(-n // open_) * open_ for n in (warm, steps))
    total = warm + steps + (open_ if scheme.kind == "pipeline" else 0)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        config = _config(folder, work, scheme, total)
        return runner.run(_train(work, rates, split, config, warm, steps))


def _config(folder: str, work: Workload, scheme: Scheme, steps: int) -> Config:
    settings: dict[str, Any] = {
        "run-dir": folder, "engine.max_new_tokens": int(work.lengths.max()) // work.unit + 1,
        "pipeline.steps": steps, "pipeline.prompts_per_step": work.prompts, "pipeline.deadline_s": 1e9,
        "pipeline.completions_per_prompt": work.completions, "evaluation.samples": 1,
        "objective.zero_variance": "keep", "logging.checkpoint_every": 0, "logging.samples_per_step": 0,
    }  # fmt: skip
    if work.thinking:
        keys = ("lo", "hi", "answer_tokens")
        limits = {
            f"engine.interruption.{k}": n // work.unit for k, n in zip(keys, work.thinking, strict=True)
        }
        settings |= limits | {"engine.interruption.enabled": "true", "engine.interruption.end_marker": ""}
    config = parse([*scheme.flags, *(f"--{key}={value}" for key, value in settings.items())]).config
    return replace(config, evaluation=replace(config.evaluation, every=0))  # never, which a run cannot have


async def _train(
    work: Workload, rates: Rates, split: Split, config: Config, warm: int, steps: int
) -> Outcome:
    deadline = Deadline(config.pipeline.deadline_s)
    engines = [TimedEngine(f"engine-{i}", work, rates) for i in range(split.engine)]
    learner = TimedLearner(work, rates, split.learner, engines)
    prompts = tuple(Prompt(f"{i:05d}", "", (1,), "", {}) for i in range(work.prompts * 100))
    pool = EnginePool(engines, deadline.wait_for)  # type: ignore[arg-type]  # as much of a client as it needs
    rewards: Any = dict.fromkeys(config.tasks, _Rewards())
    ctx = RolloutContext(
        config, pool, rewards, lambda many: [""] * len(many), stop_ids=frozenset(), phrase_ids=(1,),
        deadline=deadline,
    )  # fmt: skip
    sampler = Sampler(prompts, config.pipeline, config.seed)
    stand_ins = cast(Any, learner), cast(Any, _NoJournal())
    begin: list[float] = []

    def emit(kind: str, data: dict[str, Any]) -> None:
        if kind == "training_begins":
            begin.append(asyncio.get_running_loop().time())

    await Controller(ctx, Dataset(prompts, prompts[:1]), sampler, *stand_ins, emit).run()
    counted = learner.steps[warm : warm + steps]
    before = learner.steps[warm - 1] if warm else Step(begin[0], begin[0], np.zeros(0, np.int64), 0.0)
    wall = counted[-1].end - before.end
    lag = np.concatenate([step.lag for step in counted])
    busy = counted[-1].engines_busy_s - before.engines_busy_s
    return Outcome(
        3600 * steps / wall,
        max(0.0, 1 - sum(step.end - step.start for step in counted) / wall),
        max(0.0, 1 - busy / split.engine / wall),
        {int(v): float(n) / len(lag) for v, n in zip(*np.unique(lag, return_counts=True), strict=True)},
        float(lag.mean()),
        int(lag.max()),
        work.unit * len(lag) / steps,
        learner.steps[0].start - begin[0],
    )


def lognormal_lengths(
    mean: float, p95: float, longest: int, count: int = 65_536, seed: int = 0
) -> NDArray[np.int64]:
    """(count,) lengths of a log-normal with this mean and 95th percentile, cut at `longest`."""
    z = 1.6449  # of the normal's 95th percentile
    # ln(p95/mean) = z·σ − σ²/2, whose smaller root is meant
    root = z * z - 2 * np.log(p95 / mean)
    if not (1 <= mean <= p95 and root >= 0):
        raise ValueError(
            f"no log-normal has mean {mean:g} and 95th percentile {p95:g}: expected a percentile of 1 to "
            f"{np.exp(z * z / 2):.2f} times the mean, and a mean of 1 or more"
        )
    sigma = z - float(np.sqrt(root))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


# ------------------------------------------------------------------------------------- the paper's sizes

PAPER = Workload(
    prompts=48, completions=16, lengths=lognormal_lengths(8_500, 20_000, 40_000),
    thinking=(10_000, 12_000, 500), unit=100,
)  # fmt: skip
"""Interrupted after the paper's 10,000 to 12,000 tokens; `lengths` are of completions that are not."""
LAG = 8


def paper_rates(slots: int, engines: int, engine_tokens_per_s: float, learner_tokens_per_s: float) -> Rates:
    """Rates of all engines together, their slots full, and of the whole learner."""
    step_s = slots * engines / engine_tokens_per_s
    return Rates(
        decode_step_s=step_s, decode_token_s=0, slots=slots, train_token_s=1 / learner_tokens_per_s, push_s=1
    )


# Modelled for Qwen3-8B at 16K; the learner at MFU .25 and .40 on two H200, at .40 on four and three H100.
SPEEDS = {  # name -> engines, tokens/s of all engines, seconds in which the learner takes 6.1 M tokens
    "H200, 2 + 6, MFU .25": (6, 17_000, 607),
    "H200, 2 + 6, MFU .40": (6, 17_000, 380),
    "H100, 4 + 4, MFU .40": (4, 8_200, 303),
    "H100, 3 + 5, MFU .40": (5, 10_250, 404),
}


def paper_run(name: str, steps: int = STEPS - 1) -> tuple[Outcome, float, float]:
    """A run at the paper's sizes, and the seconds that engines and learner need for a batch of its tokens."""
    engines, generated, learner_s = SPEEDS[name]
    rates = paper_rates(64, engines, generated, 6_100_000 / learner_s)
    out = run(PAPER, rates, Split(1, engines), Scheme("pipeline", LAG), steps, warm=1)
    return out, out.tokens / generated, out.tokens * rates.train_token_s


def measure(name: str) -> Row:
    """One of SPEEDS, run."""
    out, engines_s, learner_s = paper_run(name)
    times = {"engines_s": engines_s, "learner_s": learner_s, "step_s": 3600 / out.steps_per_hour}
    return times | asdict(out)


def cases(options: Namespace) -> Iterator[Case]:
    """Every machine."""
    for name in SPEEDS:
        yield name, partial(measure, name)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each machine."""
    lines = []
    for row in rows:
        times = (f"{row[key]:.0f}" for key in ("engines_s", "learner_s", "step_s", "first_batch_s"))
        idle = (f"{row[key]:.0%}" for key in ("learner_idle", "engine_idle"))
        lines.append([row["case"], *times, f"{row['lag_mean']:.2f} (≤ {row['lag_max']})", *idle])
    columns = ("GPUs, learner + engines", "engines s", "learner s", "step s", "first batch s", "lag")
    return table((*columns, "learner idle", "engines idle"), lines)
