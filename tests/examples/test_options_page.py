"""The promise of docs/options.md: every key that it names for this project, and for TRL, exists."""

import re
from pathlib import Path

import pytest

from trainer import cli

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]
TABLE = [row for row in ROWS if len(row) == 6][1:]  # without its head


def test_the_table_has_a_cell_for_every_trainer() -> None:
    assert len(TABLE) > 35 and all(cell.strip() for row in TABLE for cell in row)


def test_every_key_of_this_project_exists() -> None:
    named = {key for row in TABLE for key in re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)+)", row[1])}
    assert len(named) > 35 and named <= cli.fields().keys()


def test_every_key_of_trl_exists() -> None:
    trl = pytest.importorskip("trl", reason="trl is missing: requirements/examples.txt")
    rows = (row for row in TABLE if "experimental" not in row[2])
    named = {key for row in rows for key in re.findall(r"`([a-z0-9_]+)=", row[2])}
    assert len(named) > 18 and named <= trl.GRPOConfig.__dataclass_fields__.keys()
