"""The state of a run for the head of the page: how far it is, its newest metrics, warnings and processes."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.config import ConfigError
from trainer.run_folder import ENDED
from trainer.view.rollouts import Rollouts

SILENT_S = 60.0  # a run that trains writes its ledger every few seconds
WARNINGS = 50  # newest ones that the page lists
SHOWN = (  # metrics at the head of the page: name, title
    ("train/reward", "reward"),
    ("train/pass_rate", "pass rate"),
    ("eval/pass_rate", "held-out pass rate"),
    ("train/length_mean", "tokens a completion"),
    ("train/truncated", "truncated"),
    ("learner/entropy", "entropy, nats"),
    ("kl/k3", "KL to the generator"),
    ("lag/mean", "lag"),
    ("learner/grad_norm", "gradient norm"),
    ("engine/tokens_per_s", "engine, tokens/s"),
    ("learner/seconds", "learner, s a step"),
    ("forecast/end", "forecast of the end"),
)


@dataclass(slots=True)
class RunState:
    """A run folder: what has been read of metrics.jsonl, and the index of its journal."""

    folder: Path
    name: str
    steps: int  # planned
    rollouts: Rollouts
    latest: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    evaluations: int = 0
    warnings: list[tuple[int, str]] = field(default_factory=list)
    _read: tuple[int, int] = (0, 0)  # inode of metrics.jsonl, bytes

    def update(self) -> None:
        """Take in the lines that metrics.jsonl has got since; a resumed run has written it anew."""
        path = self.folder / "metrics.jsonl"
        with suppress(FileNotFoundError), path.open("rb") as file:
            about = os.fstat(file.fileno())
            inode, place = self._read
            if inode != about.st_ino or about.st_size < place:
                self.latest, self.step, self.evaluations, self.warnings = {}, 0, 0, []
                place = 0
            file.seek(place)
            data = file.read()
            whole = data.rfind(b"\n") + 1
            for line in data[:whole].splitlines():
                with suppress(ValueError):
                    self._take(json.loads(line))
            self._read = about.st_ino, place + whole

    def _take(self, row: Mapping[str, Any]) -> None:
        if "eval/pass_rate" in row:  # a forecast holds until the next evaluation
            self.latest = {k: v for k, v in self.latest.items() if not k.startswith("forecast/")}
        spent = self.latest.get("compute/total") or 0.0
        self.latest |= row
        if spent > (row.get("compute/total") or 0.0):  # an evaluation's is older: of its weights
            self.latest["compute/total"] = spent
        self.step = max(self.step, row.get("step", 0))
        self.evaluations += "eval/pass_rate" in row
        new = [(row["step"], str(row[key])) for key in row if key.startswith("warning/")]
        self.warnings = [*self.warnings, *new][-WARNINGS:]

    def view(self) -> dict[str, Any]:
        """The state as the page has it."""
        read, size = self.rollouts.progress()
        ledger = _json(self.folder / "ledger.json")
        damaged, warnings = self.rollouts.damaged, list(self.warnings)
        if damaged:
            lines = f"{len(damaged)} lines of the journal" if len(damaged) > 1 else "A line of the journal"
            warnings.append((self.step, f"{lines} cannot be read and is left out ({damaged[0]})"))
        shown = [(title, self.latest[key]) for key, title in SHOWN if self.latest.get(key) is not None]
        return {
            "name": self.name, "folder": str(self.folder), "state": self._state(),
            "step": self.step, "steps": self.steps, "evaluations": self.evaluations,
            "compute": self.latest.get("compute/total"), "unit": ledger.get("unit", ""),
            "warnings": warnings, "metrics": shown, "processes": self._processes(ledger),
            "groups": len(self.rollouts.entries), "read": read, "size": size, "tasks": self.rollouts.tasks(),
        }  # fmt: skip

    def _state(self) -> str:
        if end := _json(self.folder / ENDED):
            return f"ended by {end.get('by') or 'its end'}"
        files = [self.folder / name for name in ("ledger.json", "metrics.jsonl", "config.yaml")]
        silent = time.time() - max((path.stat().st_mtime for path in files if path.is_file()), default=0.0)
        return "training" if silent < SILENT_S else f"not running: nothing written for {_duration(silent)}"

    def _processes(self, ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each role with its share of time by state, largest first, and whether its process lives here."""
        pids = _json(self.folder / "pids.json")
        roles = ledger.get("roles", {})
        rows = []
        for role in {**roles, **pids}:
            states: dict[str, float] = roles[role]["states"] if role in roles else {}
            total = sum(states.values()) or 1.0
            shares = sorted(((s, x / total) for s, x in states.items()), key=lambda pair: -pair[1])
            pid = pids.get(role)
            rows.append({"role": role, "shares": shares, "pid": pid, "alive": _alive(pid)})
        return rows


def open_run(folder: Path, name: str) -> RunState:
    """The run in a folder; ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; expected that of a run, such as runs/demo-0")
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        steps = int(config["pipeline"]["steps"])
    except FileNotFoundError as e:
        raise ConfigError(f"{folder} holds no run (no config.yaml); expected one such as runs/demo-0") from e
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        problem = " ".join(f"expected YAML with a number as pipeline.steps ({type(e).__name__}: {e})".split())
        raise ConfigError(f"{folder / 'config.yaml'} is not a run's configuration: {problem}") from e
    return RunState(folder, name, steps, Rollouts(folder / "journal"))


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty without one."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _alive(pid: int | None) -> bool:
    """True if a process of this number runs on this machine."""
    try:
        os.kill(pid or 0, 0)
    except (OSError, OverflowError):
        return False
    return pid is not None


def _duration(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
