"""The commands of `python -m trainer.scaling` as a user runs them; tests/trainer/scaling has the fixture."""

import json
import shlex
from pathlib import Path
from typing import Any, Protocol

import pytest

from trainer.scaling.__main__ import main


class Printed(str):
    """The output of a command."""

    json: Any = None  # the content of the file of --json

    @property
    def words(self) -> str:
        """The output without its line breaks."""
        return " ".join(self.split())


class Command(Protocol):
    """Runs a command line; one that is refused prints one line, which is returned."""

    def __call__(self, line: str, exit_code: int = 0) -> Printed: ...


def command_in_current_folder(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(line: str, exit_code: int = 0) -> Printed:
        arguments = shlex.split(line)
        assert main(arguments) == exit_code, line
        out, err = capsys.readouterr()
        printed = Printed(err if exit_code else out)
        if exit_code:
            assert err.startswith("error: ") and err.count("\n") == 1
        elif "--json" in arguments:
            printed.json = json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())
        return printed

    return run
