"""The groups in a run's journal: a summary of each in memory, and its tokens read when they are looked at.

The journal is read once, in small parts, and from then on only what has been added. Tokens and texts stay in
the files: 10,000 groups of 16 completions would be gigabytes.
"""

import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trainer.controller.journal import SEGMENT_GROUPS, segments
from trainer.run_folder import EVALUATIONS

TOKENS = b'"tokens": "'  # before the packed tokens in a line
PART = 1 << 22  # bytes of the journal that are read at once
SEARCH_S = 0.15  # longest search of one request; the next one goes on
HELD_OUT = 10**11  # the first id of held-out groups, which have none of their own
LISTS = "reward", "outcome", "truncated", "interrupted"  # fields of a finished group that the summary has


class NoGroupError(LookupError):
    """The journal holds no such group."""


@dataclass(slots=True)
class Entry:
    """The summary of a group. Lists are by rollout."""

    group_id: int
    prompt_id: str = ""
    epoch: int = 0
    step: int = 0  # that trained on it; 0: none yet
    aside: bool = False  # counted, but not trained on
    prompt: str = ""
    task: str = ""
    answer: Any = None
    lengths: Sequence[int] = ()  # tokens
    rewards: Sequence[float | None] = ()  # None: not a number
    outcomes: Sequence[str] = ()
    truncated: Sequence[bool] = ()
    interrupted: Sequence[bool] = ()
    advantages: Sequence[float | None] = ()  # None: not trained on; empty: not known
    # File, start and length in bytes of its lines; empty until it is finished.
    finished: tuple[Path, int, int] | None = None
    learned: tuple[Path, int, int] | None = None

    def row(self) -> dict[str, Any]:
        """The group as the table has it."""
        return {
            "id": self.group_id, "step": self.step, "aside": self.aside, "task": self.task,
            "prompt": self.prompt[:160] or self.prompt_id, "rewards": self.rewards,
            "outcomes": self.outcomes, "lengths": self.lengths, "truncated": self.truncated,
            "interrupted": self.interrupted, "advantages": self.advantages,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Query:
    """The groups that are asked for: those with a rollout that meets all conditions on rollouts; held-out
    ones where their `task` is asked for."""

    task: str = ""
    steps: tuple[int, int] | None = None  # first and last
    outcome: str = ""
    interrupted: bool | None = None
    # Lowest and highest value (None: no bound) of rewards, lengths and advantages, as far as they are asked.
    bounds: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    text: str = ""  # in the prompt, a completion or a turn, whatever its case
    order: str = "newest"

    def matches(self, entry: Entry) -> bool:
        """True if the group meets all conditions but that on its text."""
        if entry.task != self.task and (self.task or entry.group_id >= HELD_OUT):
            return False
        if self.steps and not self.steps[0] <= entry.step <= self.steps[1]:
            return False
        asked = [(getattr(entry, column), bounds) for column, bounds in self.bounds.items()]
        if not (asked or self.outcome) and self.interrupted is None:
            return bool(entry.rewards)
        return any(
            (not self.outcome or entry.outcomes[i] == self.outcome)
            and (self.interrupted is None or entry.interrupted[i] == self.interrupted)
            and all(_within(values[i] if values else None, *bounds) for values, bounds in asked)
            for i in range(len(entry.rewards))
        )


ORDERS: dict[str, tuple[Any, bool]] = {  # key, and whether the largest comes first
    "newest": (lambda e: (e.step or 1 << 40, e.group_id), True),
    "oldest": (lambda e: (e.step or 1 << 40, e.group_id), False),
    "lowest reward": (lambda e: (_mean(e.rewards), e.group_id), False),
    "highest reward": (lambda e: (_mean(e.rewards), e.group_id), True),
    "longest": (lambda e: (max(e.lengths, default=0), e.group_id), True),
}


@dataclass(slots=True)
class Rollouts:
    """The journal of a run, as far as it has been read."""

    folder: Path
    entries: dict[int, Entry] = field(default_factory=dict)
    read: dict[Path, tuple[int, int]] = field(default_factory=dict)  # of each file: inode, bytes
    damaged: list[str] = field(default_factory=list)  # lines that cannot be read: file and place
    held_out: int = 0  # prompts of evaluations that were read so far

    def files(self) -> list[Path]:
        """The samples of `python -m trainer.evaluate`, then the journal's files, oldest first."""
        return [*self.folder.parent.glob(f"{EVALUATIONS}/*/samples.jsonl"), *segments(self.folder)]

    def progress(self) -> tuple[int, int]:
        """Bytes that are read, and all that there are."""
        sizes = list[int]()
        for path in self.files():
            with suppress(FileNotFoundError):  # pruned meanwhile
                sizes.append(path.stat().st_size)
        return sum(size for _, size in list(self.read.values())), sum(sizes)

    def update(self, seconds: float) -> bool:
        """Read on for so long at most; True if all is read. The newest files come first at the beginning."""
        end, files = time.monotonic() + seconds, self.files()
        for path in self.read.keys() - set(files):  # pruned, or moved away
            self._drop(path)
        for path in reversed(files):
            while self._read_part(path):
                if time.monotonic() > end:
                    return False
        return True

    def page(self, query: Query, start: int, count: int) -> dict[str, Any]:
        """Up to `count` rows from place `start` in the order; `next`: the place to go on from, or None."""
        key, largest_first = ORDERS[query.order]
        chosen = [e for e in list(self.entries.values()) if e.finished and query.matches(e)]
        chosen.sort(key=key, reverse=largest_first)
        rows, place, end = list[dict[str, Any]](), start, time.monotonic() + SEARCH_S
        needle, opened = query.text.lower(), dict[Path, mmap.mmap]()
        while place < len(chosen) and len(rows) < count:
            entry = chosen[place]
            with suppress(NoGroupError, ValueError):  # its file was deleted or replaced since `update`
                if not needle or _has_text(entry, needle, opened):
                    rows.append(entry.row())
            place += 1
            if query.text and time.monotonic() > end:
                break
        total = None if query.text else len(chosen)
        return {"rows": rows, "next": place if place < len(chosen) else None, "total": total,
                "searched": place, "candidates": len(chosen)}  # fmt: skip

    def tasks(self) -> list[str]:
        """The tasks of the groups, in alphabetical order."""
        return sorted({entry.task for entry in list(self.entries.values())} - {""})

    def record(self, group_id: int) -> tuple[Entry, dict[str, Any], dict[str, Any]]:
        """A finished group: its summary, its record, and what the learner said of it ({}: nothing)."""
        entry = self.entries.get(group_id)
        if entry is None or entry.finished is None:
            raise NoGroupError(f"the journal holds no finished group {group_id}")
        learned = json.loads(_line(entry.learned)) if entry.learned else {}
        return entry, json.loads(_line(entry.finished)), learned

    def _name(self, path: Path) -> Path:
        return path.relative_to(self.folder.parent)

    def _drop(self, path: Path) -> None:
        """Forget a file and its groups."""
        del self.read[path]
        self.damaged = [line for line in self.damaged if not line.startswith(f"{self._name(path)},")]
        number = int(path.stem) if path.stem.isdecimal() else -1
        for group_id, entry in list(self.entries.items()):
            if group_id // SEGMENT_GROUPS == number or (entry.finished and entry.finished[0] == path):
                del self.entries[group_id]

    def _read_part(self, path: Path) -> bool:
        """Read the next lines of a file; False at its end, where a half-written line may stand."""
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                inode, place = self.read.setdefault(path, (about.st_ino, 0))
                if inode != about.st_ino or about.st_size < place:  # another run has begun in this folder
                    self._drop(path)
                    place = 0
                file.seek(place)
                data = file.read(PART)
                if b"\n" not in data:  # a line of a long group, or one that is being written
                    data += file.readline()
        except FileNotFoundError:  # the journal has been pruned meanwhile
            return False
        whole = data.rfind(b"\n") + 1
        for start, line in _lines(data[:whole]):
            try:
                self._take(line, (path, place + start, len(line)))
            except (ValueError, LookupError, TypeError):  # not JSON, or none of the journal's records
                self.damaged.append(f"{self._name(path)}, byte {place + start}")
        self.read[path] = about.st_ino, place + whole
        return whole > 0

    def _entry(self, group_id: int) -> Entry:
        return self.entries.setdefault(group_id, Entry(group_id))

    def _take(self, line: bytes, place: tuple[Path, int, int]) -> None:
        """Take in a record; those of turns are part of the finished group."""
        if line.startswith(b'{"finished"'):
            self._finished(json.loads(_without_tokens(line)), place)
        elif line.startswith(b'{"issued"'):
            record = json.loads(line)
            self.entries[record["issued"]] = Entry(record["issued"], record["prompt_id"], record["epoch"])
        elif line.startswith(b'{"trained"'):
            self._trained(json.loads(line))
        elif line.startswith(b'{"learned"'):
            record = json.loads(_without_tokens(line))
            entry = self._entry(record["learned"])
            entry.learned, entry.advantages = place, record["advantages"]
        elif line.startswith(b'{"step"'):
            self._evaluated(json.loads(line), place)

    def _finished(self, record: Mapping[str, Any], place: tuple[Path, int, int]) -> None:
        lists = [record[x] for x in LISTS]
        if len({len(x) for x in (record["lengths"], *lists)}) > 1:
            raise ValueError("expected as many of each as the group has rollouts")
        entry = self._entry(record["finished"])
        entry.lengths, entry.finished = record["lengths"], place
        entry.rewards, entry.outcomes, entry.truncated, entry.interrupted = lists
        entry.prompt, entry.task = record.get("prompt", ""), record.get("task", "")
        entry.answer = record.get("answer")

    def _evaluated(self, record: Mapping[str, Any], place: tuple[Path, int, int]) -> None:
        task = " ".join(filter(None, ("held-out", place[0].parent.name, record["set"])))
        samples, entry = record["completions"], self._entry(HELD_OUT + self.held_out)
        lists = [[c[name] for c in samples] for name in ("reward", "outcome", "tokens")]
        entry.rewards, entry.outcomes, entry.lengths = lists
        entry.truncated = entry.interrupted = [False] * len(samples)
        entry.step, entry.task, entry.finished = record["step"], task, place
        entry.prompt, entry.answer = record["prompt"], record["answer"]
        self.held_out += 1

    def _trained(self, record: Mapping[str, Any]) -> None:
        aside = set(record.get("aside", ()))
        ids = record.get("groups") or range(record["first"], record["last"] + 1)
        for group_id in {*ids, *aside}:
            entry = self._entry(group_id)
            entry.step, entry.aside = entry.step or record["trained"], group_id in aside


def _has_text(entry: Entry, needle: str, opened: dict[Path, mmap.mmap]) -> bool:
    """True if a text of the group holds the needle, which is in lower case. Each file is opened once."""
    assert entry.finished
    path, start, length = entry.finished
    if path not in opened:
        with _open(path) as file:
            opened[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = _without_tokens(opened[path], start, start + length)
    written = json.dumps(needle, ensure_ascii=False)[1:-1].encode()
    if needle.isascii() and written not in data.lower():  # other letters have cases that bytes lack
        return False
    return any(needle in text.lower() for text in _texts(json.loads(data)))


def _mean(rewards: Sequence[float | None]) -> float:
    return sum(reward or 0.0 for reward in rewards) / max(1, len(rewards))


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each whole line with the place where it starts."""
    start = 0
    for line in data.split(b"\n")[:-1]:
        yield start, line
        start += len(line) + 1


def _without_tokens(data: bytes | mmap.mmap, start: int = 0, end: int | None = None) -> bytes:
    """The line from `start` to `end` with no packed tokens: parsing them takes most of the time."""
    end = len(data) if end is None else end
    cut = data.find(TOKENS, start, end)
    if cut < 0:
        return data[start:end]
    cut += len(TOKENS)
    return data[start:cut] + data[data.find(b'"', cut, end) : end]


def _line(place: tuple[Path, int, int]) -> bytes:
    """The line at a place of the journal; NoGroupError if the file is gone."""
    path, start, length = place
    with _open(path) as file:
        file.seek(start)
        return file.read(length)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as e:
        raise NoGroupError(f"{path.name} of the journal has been deleted: its groups are too old") from e


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    """All texts of a finished group, or of a held-out one."""
    yield record.get("prompt", "")
    yield from record.get("text") or [c["text"] for c in record["completions"]]
    for episode in record.get("episode", ()):
        for turn in episode.get("turns", ()):
            yield str(turn.get("content") or "")
