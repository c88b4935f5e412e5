"""A stage of the GPU suite: its record, which is written after every case, and its time budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import records
from bench.records import Record

BUDGET_S = 420.0  # of a stage; cases that no longer fit are recorded as skipped


@dataclass(slots=True)
class Stage:
    """One stage that runs."""

    path: Path  # of the record
    record: Record
    dry: bool
    began: float = field(default_factory=time.monotonic)

    def save(self) -> None:
        """Write the record as it is now."""
        self.record["seconds"] = round(time.monotonic() - self.began, 1)
        records.write(self.path, self.record)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return BUDGET_S - (time.monotonic() - self.began)

    def add_case(self, needs_s: float, **case: Any) -> Record:
        """A new record in "cases"; with an error if less than `needs_s` is left."""
        self.record.setdefault("cases", []).append(case)
        if self.left < needs_s and not self.dry:
            case["error"] = f"skipped: the stage's {BUDGET_S:.0f} s were over"
        return case

    def finish(self, text: str) -> int:
        """Write and print the tables; the exit status."""
        self.path.with_suffix(".txt").write_text(text + "\n")
        print(text)
        return 0
