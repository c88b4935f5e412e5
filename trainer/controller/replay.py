"""--replay RUN: the controller without engines and verifiers; the batches are those of RUN's journal.

The learner gets the same completions in the same order, with the log-probs and versions that the engines gave
them. With RUN's own settings its losses are therefore those of RUN, bit for bit; with others they answer what
the same samples would have taught, but then they are not samples of the policy that is trained.
"""

import json
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.controller.controller import Controller, Emit
from trainer.controller.process import controller_main
from trainer.controller.recorded import Recorded
from trainer.jsonl import nan_to_null, read_lines
from trainer.run_folder import origin


def replay_main(
    config: Config, model_dir: str, engines: Any, learner: Connection, resume: Any, telemetry: Connection
) -> None:
    """Entry of the spawned process: as that of the controller, without engines and never resumed."""
    controller_main(config, model_dir, (), learner, None, telemetry, Replay)


class Replay(Controller):
    """A controller whose groups are there already: it goes on from the weights before the recorded steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.emit = partial(self._emit, self.emit)
        source = origin(self.config.run_dir)
        run = Path(source["replay"])
        self._recorded, self._marks = Recorded(run), {"replay/off_policy": float(bool(source["changed"]))}
        rows = list(read_lines(run / "metrics.jsonl"))
        self._losses = {row["step"]: row["learner/loss"] for row in rows if "learner/loss" in row}
        self._steps = {
            row["step"]: row["train/planned_steps"] for row in rows if "train/planned_steps" in row
        }
        self._differs = 0  # the first step whose loss is not that of the run
        self._round_end = -1  # no version is published
        if self._recorded.start is not None:
            self.restore_learning(json.loads((self._recorded.start / "controller.json").read_text()))

    async def run(self) -> None:
        """Train on the recorded steps, and say whether the losses are those of the run."""
        await super().run()
        same = f"the losses up to step {self.version} are bit for bit those of the replayed run"
        differs = f"the loss of step {self._differs} is the first that is not bit for bit the replayed run's"
        self.emit("note", {"text": differs if self._differs else same})

    async def _run(self) -> None:
        self.emit("training_begins", {"step": self.version})
        prompts = {p.prompt_id: p for p in self.dataset.train}
        for minibatches in self._recorded.rounds(prompts, self.config.pipeline.off_policy):
            remaining = self.config.pipeline.steps - self.version
            if self.stop.is_set() or remaining <= 0:
                return
            await self._train_round(minibatches[:remaining])

    def _emit(self, emit: Emit, kind: str, data: dict[str, Any]) -> None:
        if kind == "step" and not self._differs:
            same = nan_to_null(data["learner/loss"]) == self._losses.get(data["step"])  # null: skipped
            self._differs = 0 if same else data["step"]
        emit(kind, data | (self._marks if kind == "step" else {}))

    def planned_steps(self, step: int) -> float:
        planned = super().planned_steps(step)
        return self._steps.get(step, planned) if self.config.pipeline.max_compute else planned

    def _evaluates(self, version: int) -> bool:
        return False

    @property
    def ended_by(self) -> str:
        """The reason why the run is complete; its last step is the last that the journal holds."""
        return "steps" if self.version >= self._recorded.last else super().ended_by
