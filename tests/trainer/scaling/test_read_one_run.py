"""Promise of FILE/RUN: one run, or those that match, of a table of several, compressed or not."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from trainer.scaling.__main__ import main

HEAD = "run,step,gpu_hours,eval/pass_rate,scorer\n"


def rows(run: str, gain: float) -> str:
    return "".join(f"{run},{i},{i},{gain + i / 32},number\n" for i in range(9))


def test_runs_are_chosen_by_name_or_pattern_on_the_command_line_and_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curves.csv.gz"
    path.write_bytes(gzip.compress((HEAD + rows("a-0", 0.1) + rows("a-1", 0.2) + rows("b-0", 0.3)).encode()))
    (tmp_path / "runs.toml").write_text('[recipe.a]\nruns = ["curves.csv.gz/a-*"]\n')
    one = tmp_path / "one.csv"
    one.write_text(HEAD + rows("c-0", 0.15))
    inputs = [f"{path}/b-0", f"{tmp_path}/runs.toml", f"{one}/c-0"]
    assert main(["compare", *inputs]) == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert all(f"{file}/{run}" in shown for file, run in ((path, "a-0"), (path, "a-1"), (path, "b-0")))
    assert "a       2" in shown and "b-0     1" in shown and "c-0     1" in shown
    assert main(["fit", f"{path}/d-*"]) == 2
    assert f"{path} has no run 'd-*'; it has a-0, a-1, b-0" in capsys.readouterr().err


def test_columns_named_like_settings_tell_runs_that_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text(HEAD + rows("a", 0.1))
    (tmp_path / "b.csv").write_text(HEAD + rows("b", 0.2).replace("number", "text"))
    assert main(["compare", *(f"{tmp_path}/{name}.csv" for name in "ab")]) == 0
    assert "The runs differ in the scorer: 'number' (a), 'text' (b)." in capsys.readouterr().out


def test_a_damaged_archive_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "curves.csv.gz"
    path.write_bytes(gzip.compress(HEAD.encode())[:-9])
    assert main(["fit", str(path)]) == 2
    assert f"{path}: " in (err := capsys.readouterr().err) and err.count("\n") == 1
