"""What the controller and the launcher cost at the paper's sizes, without a GPU: does it grow with the run?

  python -m bench pipeline.scale                            2,000 steps of 48 × 16, 9,984 in flight
  python -m bench pipeline.scale --steps 40 --tokens 12000  completions as long as the paper's

Controller, sampler, engine client, journal, ledger, metrics and view are the trainer's. An engine in another
process answers each request at once, a completion a message; the learner's steps take no time. So the CPU
time of this process is what a completion costs the controller: its request, its message, its reward, its
place in a batch and in the journal. At the end the journal is read as a resume reads it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from bench.harness import Case, Row
from bench.table import table
from trainer.config import Config
from trainer.controller import journal as journal_of
from trainer.controller.controller import Controller
from trainer.controller.data import Dataset
from trainer.controller.deadline import Deadline
from trainer.controller.journal import Journal, replay
from trainer.controller.rewards import Scored
from trainer.controller.rollout import RolloutContext
from trainer.controller.sampler import Sampler
from trainer.engines.backend import read_messages
from trainer.engines.pool import EnginePool
from trainer.engines.protocol import EngineClient
from trainer.launcher.placement import assign
from trainer.launcher.recorder import Recorder
from trainer.launcher.terminal import make_view
from trainer.messages import Ack, Event, Ready, Spans, StepDone, UpdateWeights
from trainer.types import Columns, Completion, Prompt, Request, TrainBatch

OPTIONS: dict[str, Any] = {"steps": (2000, "optimizer steps"), "tokens": (12, "of a completion")}
PROMPTS, COMPLETIONS, LAG = 48, 16, 12  # 13 batches of 768 are in flight
PARTS = 10  # of the run, whose costs are compared
KEEP_BYTES = 50_000_000  # of the journal, so that it is pruned here as well


@dataclass(frozen=True, slots=True)
class Part:
    """A tenth of the run."""

    controller_us: float  # CPU time a completion
    launcher_us: float
    memory_mb: float
    journal_mb: float
    metrics_mb: float


def engine_main(conn: Connection, tokens: int) -> None:
    """Answers requests as fast as it can; weights are swapped at once."""
    generator = np.random.default_rng(0)
    ids, logprobs = generator.integers(0, 150_000, tokens, np.int32), -generator.random(tokens, np.float32)
    version, inbox = 0, SimpleQueue[Any]()
    read_messages(conn, inbox.put)  # in a thread: the controller blocks while it sends
    conn.send(Ready({}))
    while True:
        message = inbox.get()
        if isinstance(message, Request):
            for i in range(message.n):
                versions = np.full(tokens, version, np.int32)
                done = Completion(message.request_id, i, ids, logprobs, versions, "stop")
                conn.send(Columns.from_records([done]))
        elif isinstance(message, UpdateWeights):
            version = message.version
            conn.send(Ack())
        else:
            return


class _Learner:
    """Takes each batch as the learner's pipe would, and saves nothing but the controller's state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    async def train(self, batch: TrainBatch) -> StepDone:
        await asyncio.sleep(0)
        return StepDone(batch.step, "", {"learner/input_tokens": 1})

    async def save(self, path: str, state: dict[str, Any]) -> None:
        self.state = state


class _Rewards:
    def __init__(self) -> None:
        self._random = random.Random(0)

    async def score(self, prompt: Prompt, text: str, tokens: int, step: int | None) -> Scored:
        return Scored(1.0, "correct", {}) if self._random.random() < 0.5 else Scored(-1.0, "wrong", {})


def measure(steps: int, tokens: int) -> Row:
    """The costs by tenth of the run, and the seconds in which a resume reads the journal."""
    journal_of.KEEP_BYTES = KEEP_BYTES
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), steps, tokens))


def cases(options: Namespace) -> Iterator[Case]:
    """The run is one case."""
    yield "run", partial(measure, options.steps // PARTS * PARTS, options.tokens)


def _config(folder: Path, steps: int) -> Config:
    config = Config(run_dir=str(folder))
    return replace(
        config,
        pipeline=replace(
            config.pipeline, steps=steps, max_lag=LAG, prompts_per_step=PROMPTS,
            completions_per_prompt=COMPLETIONS, no_positive_resampling=False,
        ),
        evaluation=replace(config.evaluation, every=0, samples=1),
        logging=replace(config.logging, checkpoint_every=max(1, steps // 100), tensorboard=False),
    )  # fmt: skip


async def _measure(folder: Path, steps: int, tokens: int) -> Row:
    config = _config(folder, steps)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine_main, args=(theirs, tokens))
    process.start()
    theirs.close()
    prompts = tuple(Prompt(f"{i:05d}", "", tuple(range(200)), "", {}) for i in range(PROMPTS * 100))
    recorder = Recorder(
        config, assign(config, (), 2), make_view(config, "core-hours", stream=StringIO()), None, 0.0
    )
    costs, launcher_s, parts = [time.process_time()], [0.0], list[Part]()

    def emit(kind: str, data: dict[str, Any]) -> None:
        began, now = time.process_time(), time.monotonic()
        if kind == "step":
            for role in recorder.ledger.devices:
                states = ("generate", "idle", "generate", "weight_update")
                cuts = [now - 4e-4 + 1e-4 * i for i in range(5)]
                recorder.handle(role, Spans(role, tuple(zip(states, cuts[:-1], cuts[1:], strict=True))))
        recorder.handle("controller", Event(kind, now, data))
        launcher_s[0] += time.process_time() - began
        if kind == "step" and data["step"] % (steps // PARTS) == 0:
            parts.append(_part(folder, costs, launcher_s, steps // PARTS * PROMPTS * COMPLETIONS))

    with closing(EngineClient(ours, "engine")) as client, closing(Journal(folder / "journal")) as journal:
        await client.ready()
        deadline = Deadline(config.pipeline.deadline_s)
        rewards: Any = {name: _Rewards() for name in config.tasks}
        pool = EnginePool([client], deadline.wait_for)
        ctx = RolloutContext(
            config, pool, rewards, lambda many: ["text"] * len(many), frozenset(), (), deadline
        )
        sampler, learner = Sampler(prompts, config.pipeline, 0), _Learner()
        dataset = Dataset(prompts, prompts[:1])
        run = Controller(ctx, dataset, sampler, cast(Any, learner), journal, emit)
        await run.run()
    process.join()
    began = time.monotonic()
    saved = learner.state
    replay(folder / "journal", saved["group_id"], {p.prompt_id: p for p in prompts})
    return {"parts": [asdict(part) for part in parts], "resume_s": time.monotonic() - began}


def _part(folder: Path, costs: list[float], launcher_s: list[float], completions: int) -> Part:
    spent = time.process_time() - costs[0]
    part = Part(
        controller_us=1e6 * (spent - launcher_s[0]) / completions,
        launcher_us=1e6 * launcher_s[0] / completions,
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        journal_mb=sum(p.stat().st_size for p in (folder / "journal").iterdir()) / 1e6,
        metrics_mb=sum(p.stat().st_size for p in folder.glob("*.jsonl")) / 1e6,
    )
    costs[0], launcher_s[0] = time.process_time(), 0.0
    return part


def describe(head: Row, rows: Sequence[Row]) -> str:
    """One line for each tenth of the run."""
    steps, lines = head["options"]["steps"] // PARTS, []
    forms = (".0f", ".1f", ".0f", ".0f", ".1f")
    for i, part in enumerate(rows[0]["parts"], 1):
        lines.append([str(i * steps), *map(format, part.values(), forms)])
    columns = ("controller µs a completion", "launcher µs", "memory MB", "journal MB", "metrics MB")
    end = f"A resume reads the journal in {rows[0]['resume_s']:.1f} s."
    return table(("steps until", *columns), lines) + "\n\n" + end
