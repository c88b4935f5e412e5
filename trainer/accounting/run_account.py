"""Cost of a run of ours with another loss kernel, from the run's own ledger.

    change     = (time of the other kernel / time of the run's − 1) · seconds in `loss_head`
    pipeline   wall' = wall + max(learner + change, engine) − max(learner, engine)    they work side by side
    in turns   wall' = wall + change                                                  ppo_off_policy

The devices stay split as they are, so a faster loss saves nothing where the learner waits for the engines.
All times are the run's, so no rate of a body, a batch or a machine is assumed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.roles import role_kind

NOT_WORK = ("idle", "start-up", "shut-down", "evaluate")  # states in which a role does nothing for training


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Seconds of a run's training."""

    wall: float  # C over the number of devices
    learner: float  # busy
    engine: float  # busy, the mean over engines
    loss_head: float  # of the learner's
    in_turns: bool  # learner and engines do not work at the same time

    def factor(self, ratio: float) -> float:
        """The compute of the run, relative to its own, if the loss took `ratio` times as long."""
        change = (ratio - 1) * self.loss_head
        if not self.in_turns:
            change = max(self.learner + change, self.engine) - max(self.learner, self.engine)
        return (self.wall + change) / self.wall


def ledger_of(run: Path) -> dict[str, Any] | None:
    """The ledger of a run folder, or of FILE/RUN in a sweep's kept curves; None if there is none."""
    in_table = run.parent.is_file()
    path = (run.parent.parent if in_table else run) / "ledger.json"
    if not path.is_file():
        return None
    books: dict[str, Any] = json.loads(path.read_text())
    return books["runs"].get(run.name) if in_table else books


def run_times(run: Path) -> RunTimes | None:
    """None if there is no such run of ours, or it did not book the loss apart."""
    if (books := ledger_of(run)) is None:
        return None
    busy: dict[str, list[float]] = {"learner": [], "engine": []}
    for role, booked in books["roles"].items():
        if booked["devices"] and (kind := role_kind(role)) in busy:
            busy[kind].append(sum(s for state, s in booked["seconds"].items() if state not in NOT_WORK))
    learner, engines = books["roles"].get("learner"), busy["engine"]
    if not learner or not engines or "loss_head" not in learner["seconds"]:
        return None
    scheme = books.get("scheme") or _config(run)["pipeline"]["scheme"]
    return RunTimes(
        wall=3600 * books["compute"]["total"] / books["devices_total"],
        learner=busy["learner"][0],
        engine=sum(engines) / len(engines),
        loss_head=learner["seconds"]["loss_head"],
        in_turns=scheme != "pipeline_rl",
    )


def run_dtype(run: Path) -> str:
    """The type of a run's model."""
    return str((ledger_of(run) or {}).get("dtype") or _config(run)["model"]["dtype"])


def _config(folder: Path) -> dict[str, Any]:
    import yaml  # takes long to load, and other commands import this module

    content: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return content
