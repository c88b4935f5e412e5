"""Promises of a run's files: every line is valid JSON, whatever was in it."""

import json
import math
from io import StringIO
from typing import Any

import numpy as np
import pytest

from trainer.jsonl import append

RECORDS: list[tuple[dict[Any, Any], dict[str, Any]]] = [
    ({"text": "é", "x": 0.5, "of": [1, (2, None)]}, {"text": "é", "x": 0.5, "of": [1, [2, None]]}),
    ({"x": math.nan, "y": {"z": [math.inf, 1.0]}}, {"x": None, "y": {"z": [None, 1.0]}}),
    ({"x": np.float32(0.5), "n": np.int64(2), "a": np.arange(2)}, {"x": 0.5, "n": 2, "a": [0, 1]}),
    ({"a": np.array([1.0, np.nan])}, {"a": [1.0, None]}),
    ({0: "step", "x": np.float64("nan")}, {"0": "step", "x": None}),
]  # fmt: skip


@pytest.mark.parametrize(("record", "read"), RECORDS)
def test_a_line_is_valid_json_of_the_record(record: dict[Any, Any], read: dict[str, Any]) -> None:
    file = StringIO()
    append(file, record)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert file.getvalue().endswith("}\n") and file.getvalue().count("\n") == 1
    assert json.loads(file.getvalue(), parse_constant=refuse) == read
