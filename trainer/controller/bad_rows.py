"""Rows that cannot be used: skipped, counted and named, up to the share data.max_bad_rows of a source."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError, DataConfig
from trainer.controller.sources import HUB, RowError
from trainer.jsonl import write_atomic

FILE = "skipped_rows.jsonl"  # in the run's folder
HINTED = 0.2  # a share above which a setting is wrong rather than the rows
HUB_SHARE = 0.05  # data.max_bad_rows of a set of the hub, which is as it is; a file is one's own: 0


class LeftOut(RowError):
    """The user's function leaves a row out, which is not bad."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The rows of a source that are skipped: each one's place and the reason."""

    source: str
    total: int  # rows looked at
    rows: tuple[tuple[str, str], ...]

    @property
    def line(self) -> str:
        """The line for the user."""
        place, reason = self.rows[0]
        count = f"{len(self.rows)} of {self.total} rows of {self.source}"
        return f"data: {count} are skipped; the first: {place}: {reason}"


def allowed_share(source: str, config: DataConfig) -> float:
    """The share of a source's rows that may be bad."""
    default = HUB_SHARE if source.startswith(HUB) else 0.0
    return default if config.max_bad_rows is None else config.max_bad_rows


class BadRows:
    """The bad rows of a source that is being read."""

    def __init__(self, source: str, config: DataConfig) -> None:
        self._source, self._share = source, allowed_share(source, config)
        self._rows: list[tuple[str, str]] = []
        self._bad: list[str] = []  # all of them but those that the user's function leaves out

    def add(self, place: str, error: RowError) -> None:
        """Skip a row."""
        self._rows.append((place, str(error)))
        if not isinstance(error, LeftOut):
            self._bad.append(f"{place}: {error}")

    def skipped(self, total: int) -> tuple[Skipped, ...]:
        """The rows skipped, of `total` that were looked at. ConfigError if too many are bad."""
        asked = total - len(self._rows) + len(self._bad)  # rows that were not left out
        if self._bad and len(self._bad) == asked:
            raise ConfigError(self._bad[0])  # no bad rows, but a wrong setting
        if len(self._bad) > self._share * asked:
            share = len(self._bad) / asked
            skip = f". --data.max_bad_rows {_up(share)} skips and names them" * (share <= HINTED)
            raise ConfigError(
                f"{self._source}: {len(self._bad)} of {asked} rows cannot be used, over the share "
                f"data.max_bad_rows, {self._share:g}; the first: {self._bad[0]}{skip}"
            )
        return (Skipped(self._source, total, tuple(self._rows)),) if self._rows else ()


def _up(share: float) -> str:
    """The share with two digits, rounded up."""
    return f"{math.ceil(share * 100) / 100:g}"


def write_skipped(folder: Path, skipped: Iterable[Skipped]) -> None:
    """Name every skipped row in the run's folder."""
    rows = [{"place": place, "reason": reason} for one in skipped for place, reason in one.rows]
    write_atomic(folder / FILE, "".join(json.dumps(row) + "\n" for row in rows))
