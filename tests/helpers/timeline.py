"""What timeline.jsonl says of a run, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from trainer.accounting.ledger import Span


def read_timeline(path: Path) -> list[Span]:
    """The spans of timeline.jsonl."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [Span(r["role"], r["state"], r["start"], r["end"]) for r in rows]


def overlap(
    timeline: Iterable[Span],
    a: tuple[str, str] = ("engine", "generate"),
    b: tuple[str, str] = ("learner", "forward_backward"),
) -> float:
    """Seconds during which role a[0] was in state a[1] while role b[0] was in state b[1]."""
    spans = list(timeline)
    first, second = ([s for s in spans if (s.role, s.state) == side] for side in (a, b))
    return sum(max(0.0, min(x.end, y.end) - max(x.start, y.start)) for x in first for y in second)
