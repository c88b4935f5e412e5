"""The record of an evaluation, from the messages of its roles, in the folder of its results:

config.yaml     the question, as a recipe file
results.jsonl   a line for each checkpoint that is done: `eval/NAME/…`, and the run's compute at that step
samples.jsonl   a line for each of its prompts, with all completions
held_out.jsonl  what 1, 2, 4, ... completions of each prompt are worth, for `scaling inference`
ledger.json     device-seconds, start-up included; they never count in the compute of the run

A start that goes on with a broken-off evaluation drops samples of checkpoints that have no results yet.
"""

import json
import time
from collections.abc import Callable, Iterator
from itertools import compress, count
from pathlib import Path
from typing import Any

from trainer.accounting.ledger import Ledger
from trainer.cli import to_yaml
from trainer.evaluate.question import Question
from trainer.evaluate.view import View
from trainer.jsonl import append, open_to_append, read_lines, write_atomic
from trainer.launcher.placement import Devices
from trainer.messages import Event, Spans
from trainer.run_folder import HELD_OUT, RESULTS

SAMPLES = "samples.jsonl"


class Record:
    """Writes the files; `steps` says which are done."""

    def __init__(self, question: Question, devices: Devices, view: View) -> None:
        self.folder, self._question, self._view = Path(question.config.run_dir), question, view
        books = self.folder / "ledger.json"
        carried = json.loads(books.read_text()) if books.is_file() else None
        self._ledger = Ledger(devices.by_role(), devices.unit, time.monotonic(), carried)
        write_atomic(self.folder / "config.yaml", to_yaml(question.config))
        self._results = open_to_append(self.folder / RESULTS)
        done = {row["step"] for row in results(self.folder)}
        _keep_samples(self.folder / SAMPLES, lambda sample: sample["step"] in done)
        self._samples = open_to_append(self.folder / SAMPLES)

    def handle(self, role: str, message: object) -> str:
        """Record one message that a role has sent."""
        match message:
            case Spans():
                self._ledger.add(message)
            case Event(kind="sample"):
                append(self._samples, message.data)
                self._view.advance(message.data["step"])
            case Event(kind="eval"):
                self._write(dict(message.data))
            case Event(kind="prompts"):
                self._view.begin(message.data["count"])
            case Event(kind="phase"):
                self._view.log(f"{message.data['name']} ...")
            case Event(kind="note"):
                self._view.log(message.data["text"])
        return ""

    def close(self) -> None:
        """Close the books and the files."""
        self._ledger.close(self.folder, time.monotonic())
        self._results.close()
        self._samples.close()

    def _write(self, scores: dict[str, Any]) -> None:
        """The line of a checkpoint; its device-hours are those of its generation and verification."""
        step, worth = scores.pop("step"), scores.pop("by_prompt")
        with open_to_append(self.folder / HELD_OUT) as file:
            for name, measures in worth.items():
                append(file, {"step": step, "set": name, **measures})
        scores["device_hours"] = scores["seconds"] * sum(self._ledger.devices.values()) / 3600
        line = {"step": step} | {f"eval/{self._question.name}/{k}": v for k, v in scores.items()}
        compute = {checkpoint.step: checkpoint.compute for checkpoint in self._question.checkpoints}[step]
        append(self._results, line | ({} if compute is None else {"compute/total": compute}))


def results(folder: Path) -> list[dict[str, Any]]:
    """The lines of results.jsonl by step."""
    path = folder / RESULTS
    return sorted(read_lines(path), key=lambda row: row["step"]) if path.is_file() else []


def chosen_samples(folder: Path, number: int) -> Iterator[dict[str, Any]]:
    """So many lines of samples.jsonl at even distances; it may be larger than the memory."""
    with (folder / SAMPLES).open(encoding="utf-8") as file:
        total = sum(1 for _ in file)
        file.seek(0)
        wanted = {round(i * (total - 1) / max(1, number - 1)) for i in range(number)}
        yield from map(json.loads, compress(file, (i in wanted for i in count())))


def _keep_samples(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite the file without the lines that are not kept, if there are any."""
    if path.is_file() and not all(map(keep, read_lines(path))):
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            for sample in filter(keep, read_lines(path)):
                append(file, sample)
        part.replace(path)
