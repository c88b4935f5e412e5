"""Promises of `sigmoid-rl`: every command of the project by one name, installed with the package."""

import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from trainer.__main__ import COMMANDS, main


def test_it_is_installed_with_the_package() -> None:
    (script,) = entry_points(group="console_scripts", name="sigmoid-rl")
    assert script.load() is main


@pytest.mark.parametrize("name", [*COMMANDS, "fit", "report"])
def test_each_command_explains_itself(name: str) -> None:
    """But doctor, which takes nothing."""
    if name == "doctor":
        assert callable(import_module(COMMANDS[name][0]).main)
        return
    command = [sys.executable, "-m", "trainer", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ") and len(done.stdout.splitlines()) > 5


def test_help_and_completion_name_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and main([]) == 0
    text = capsys.readouterr().out
    assert main(["--completion"]) == 0
    words = capsys.readouterr().out.partition("'")[2].partition("'")[0].split()
    assert {*COMMANDS, "fit", "compare", "predict", "plan", "report", "across"} <= set(words)
    assert all(f"\n  {word} " in text for word in words)


def test_what_is_no_command_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'trian'; did you mean train?\n"
    assert main(["fit", str(tmp_path / "no.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN  # Python's own, in a process that is not its
