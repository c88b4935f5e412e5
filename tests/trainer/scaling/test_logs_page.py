"""Promises of docs/logs.md: its commands parse, and its table of runs is one."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from trainer.scaling.reading.options import Parser, expand

TEXT = (Path(__file__).parents[3] / "docs" / "logs.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"python -m trainer\.scaling ([^`\n]+)", TEXT)))


@pytest.mark.parametrize("line", [line for line in COMMANDS if " " in line])
def test_every_command_parses(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table,) = re.findall(r"```toml\n(.+?)```", TEXT, re.DOTALL)
    (tmp_path / "runs.toml").write_text(table)
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(line)
    parser, command = Parser(), import_module(f"trainer.scaling.commands.{name}").Command
    command.add_to(parser)
    args = parser.parse_args(words)
    inputs = [source for text in args.inputs for source in expand(text, command.from_arguments(args))]
    assert all("@devices" not in run and "=" not in run for source in inputs for run in source.runs)
    if args.inputs == ["runs.toml"]:
        assert [(g.name, len(g.runs), g.options.devices, g.options.samples) for g in inputs] == [
            ("dapo", 2, 64, 960), ("grpo", 1, 32, 960),
        ]  # fmt: skip
