"""The commands as a user runs them, in an empty folder."""

from pathlib import Path

import pytest
from helpers.commands import Command, command_in_current_folder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    return command_in_current_folder(capsys)
