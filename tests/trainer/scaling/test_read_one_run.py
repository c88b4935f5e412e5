"""Promise of FILE/RUN: one run, or those that match, of a table of several, compressed or not."""

import gzip
from pathlib import Path

from helpers.commands import Command

HEAD = "run,step,gpu_hours,eval/pass_rate,scorer\n"


def rows(run: str, gain: float) -> str:
    return "".join(f"{run},{i},{i},{gain + i / 32},number\n" for i in range(9))


def test_runs_are_chosen_by_name_or_pattern_on_the_command_line_and_in_a_file(command: Command) -> None:
    table = HEAD + rows("a-0", 0.1) + rows("a-1", 0.2) + rows("b-0", 0.3)
    Path("curves.csv.gz").write_bytes(gzip.compress(table.encode()))
    Path("runs.toml").write_text('[recipe.a]\nruns = ["curves.csv.gz/a-*"]\n')
    Path("one.csv").write_text(HEAD + rows("c-0", 0.15))
    shown = command("compare curves.csv.gz/b-0 runs.toml one.csv/c-0")
    assert all(f"curves.csv.gz/{run}" in shown for run in ("a-0", "a-1", "b-0"))
    assert all(line in shown for line in ("a       2", "b-0     1", "c-0     1"))
    refusal = command("fit 'curves.csv.gz/d-*'", exit_code=2)
    assert "curves.csv.gz has no run 'd-*'; it has a-0, a-1, b-0" in refusal


def test_columns_named_like_settings_tell_runs_that_cannot_be_compared(command: Command) -> None:
    Path("a.csv").write_text(HEAD + rows("a", 0.1))
    Path("b.csv").write_text(HEAD + rows("b", 0.2).replace("number", "text"))
    assert "The runs differ in the scorer: 'number' (a), 'text' (b)." in command("compare a.csv b.csv")


def test_a_damaged_archive_is_one_clear_line(command: Command) -> None:
    Path("curves.csv.gz").write_bytes(gzip.compress(HEAD.encode())[:-9])
    assert "curves.csv.gz: " in command("fit curves.csv.gz", exit_code=2)
