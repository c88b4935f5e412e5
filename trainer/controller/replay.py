"""--replay RUN: the controller without engines and verifiers; the batches are those of RUN's journal.

The learner gets the same completions in the same order, with the log-probs and versions that the engines gave
them. With RUN's own settings its losses are therefore those of RUN, bit for bit; with others they answer what
the same samples would have taught, but then they are not samples of the policy that is trained.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.controller.controller import Controller, due
from trainer.controller.deadline import Deadline
from trainer.controller.journal import Journal
from trainer.controller.learner_client import LearnerClient
from trainer.controller.mixture import load_tasks, sampler_of
from trainer.controller.process import alive, listen, send_event
from trainer.controller.recorded import Recorded
from trainer.controller.rollout import RolloutContext
from trainer.engines.pool import EnginePool
from trainer.jsonl import nan_to_null, read_lines
from trainer.roles import run_role
from trainer.run_folder import origin


def replay_main(
    config: Config, model_dir: str, engine_conns: Sequence[Connection], learner_conn: Connection,
    resume: dict[str, Any] | None, telemetry: Connection,
) -> None:  # fmt: skip
    """Entry of the spawned process: as that of the controller, without engines."""
    work = partial(_run, config, model_dir, learner_conn, telemetry)
    run_role("controller", telemetry, lambda: asyncio.run(work()), ends_with_peer=False)


class Replay(Controller):
    """A controller whose groups are there already."""

    def begin(self, run: Path, recorded: Recorded, off_policy: bool) -> None:
        """Go on from the weights that the recorded steps begin with."""
        self._recorded, self._marks = recorded, {"replay/off_policy": float(off_policy)}
        rows = read_lines(run / "metrics.jsonl")
        self._losses = {row["step"]: row["learner/loss"] for row in rows if "learner/loss" in row}
        self._differs = 0  # the first step whose loss is not that of the run
        self._round_end = -1  # no version is published
        if recorded.start is not None:
            self.restore_learning(json.loads((recorded.start / "controller.json").read_text()))

    async def _run(self) -> None:
        self._record("training_begins", {"step": self.version})
        prompts = {p.prompt_id: p for p in self.dataset.train}
        for minibatches in self._recorded.rounds(prompts, self.config.pipeline.off_policy):
            unscored = [g for m in minibatches if not m.epoch for g in m.groups]
            for minibatch in minibatches:
                if self.stop.is_set() or self.version >= self.config.pipeline.steps:
                    return
                if self.keep:
                    await self.save()
                self._step = asyncio.create_task(self._train_step(minibatch, unscored, 0.0))
                await asyncio.shield(self._step)
                unscored = []
                if due(self.version, self.config.logging.checkpoint_every):
                    await self.save()

    def _record(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "step" and not self._differs:
            same = nan_to_null(data["learner/loss"]) == self._losses.get(data["step"])  # null: skipped
            self._differs = 0 if same else data["step"]
        super()._record(kind, data | (self._marks if kind == "step" else {}))

    def _evaluates(self, version: int) -> bool:
        return False

    @property
    def ended_by(self) -> str:
        """As of any run, whose last step is here the last that the journal holds."""
        return "steps" if self.version >= self._recorded.last else super().ended_by

    @property
    def outcome(self) -> str:
        """Whether the losses are those of the run."""
        if self._differs:
            return f"the loss of step {self._differs} is the first that is not bit for bit the replayed run's"
        return f"the losses up to step {self.version} are bit for bit those of the replayed run"


async def _run(config: Config, model_dir: str, learner_conn: Connection, telemetry: Connection) -> None:
    emit = partial(send_event, telemetry)
    begun = origin(config.run_dir)
    with alive(telemetry), ExitStack() as stack:
        learner = stack.enter_context(closing(LearnerClient(learner_conn)))
        deadline = Deadline(config.pipeline.deadline_s)
        start = Deadline(config.pipeline.start_deadline_s, "pipeline.start_deadline_s")
        emit("phase", {"name": "loading data and model"})
        from transformers import AutoTokenizer  # takes seconds, so the pipes are open before

        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        dataset = load_tasks(config, tokenizer)
        phrase = tuple(tokenizer.encode(config.engine.interruption.phrase, add_special_tokens=False))
        engines = EnginePool((), deadline.wait_for)
        ctx = RolloutContext(config, engines, {}, lambda ids: [], frozenset(), phrase, deadline)
        journal = stack.enter_context(closing(Journal(Path(config.run_dir) / "journal")))
        sampler = sampler_of(config, dataset.train, lambda text: None)
        replay = Replay(ctx, dataset, sampler, learner, journal, emit)
        run = Path(begun["replay"])
        replay.begin(run, Recorded(run), bool(begun["changed"]))
        emit("ready", {"learner": await start.wait_for(learner.ready(), "learner: start")})
        listen(telemetry, replay, engines, start)
        await replay.run()
        emit("note", {"text": replay.outcome})
        await replay.save()
        emit("done", {"step": replay.version, "ended_by": replay.ended_by})
