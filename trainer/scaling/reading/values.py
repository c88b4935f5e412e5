"""Cells as numbers: percent, decimal commas, thousands and dates; NaN stands for what is unknown."""

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError

Row = dict[str, Any]
Values = NDArray[np.float64]  # (rows,); NaN: unknown

UNKNOWN = ("", "-", "–", "null", "none", "n/a", "na", "nan")  # lower case
DATE = re.compile(r"\d{4}-\d\d-\d\d")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")


def is_known(cell: Any) -> bool:
    """True if a cell holds anything but NaN."""
    return cell is not None and cell != "" and cell == cell


def is_text(cell: Any) -> bool:
    """True if a cell holds text that is no number, date or percentage."""
    try:
        return isinstance(cell, str) and _parse(cell, False, 1.0) is None
    except ValueError:
        return True


def numbers(rows: Sequence[Row], column: str, percent: float = 1.0) -> Values:
    """A column; NaN where a cell is empty or not finite. `percent`: what 1% is.

    Dates become seconds since 1970 (UTC unless they say otherwise). ConfigError: a cell is no number.
    """
    cells = [row.get(column) for row in rows]
    decimal = _has_decimal_commas(cell for cell in cells if isinstance(cell, str))
    values = np.full(len(cells), math.nan)
    for i, cell in enumerate(cells):
        try:
            values[i] = _parse(cell, decimal, percent) if isinstance(cell, str) else _number(cell)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"row {i + 1}: {column!r} is {cell!r}; expected a number") from e
    values[np.isinf(values)] = math.nan
    return values


def filled(values: Values) -> Values:
    """Unknown values get the value of the row before."""
    known = np.where(np.isnan(values), 0, np.arange(len(values)))
    return values[np.maximum.accumulate(known)]


def _number(cell: Any) -> float:
    if isinstance(cell, datetime):  # of parquet
        return cell.replace(tzinfo=cell.tzinfo or UTC).timestamp()
    return math.nan if cell is None else float(cell)


def _parse(text: str, decimal_commas: bool, percent: float) -> float:
    plain = text.strip()
    if plain.lower() in UNKNOWN:
        return math.nan
    try:
        return float(plain)
    except ValueError:
        if DATE.match(plain):
            return _number(datetime.fromisoformat(plain))
    scale = percent if plain.endswith("%") else 1.0
    digits = re.sub(r"[\s']", "", plain.removesuffix("%"))
    digits = digits.replace(".", "").replace(",", ".") if decimal_commas else digits.replace(",", "")
    return float(digits) * scale


def _has_decimal_commas(texts: Iterable[str]) -> bool:
    """True if commas are decimal points: 0,302 or 1.280,5 but not 1,280 or 1,280.5."""
    plain = (text.strip().removesuffix("%").rstrip() for text in texts if "," in text)
    return any(not THOUSANDS.fullmatch(text) for text in plain)
