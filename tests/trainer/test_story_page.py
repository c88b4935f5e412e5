"""The promise of docs/story.md: the trainer takes each of its commands, with settings that exist."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from trainer import cli
from trainer.scaling.reading.options import Parser, expand

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "story.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMMANDS = [
    line.removeprefix("$ ") for line in LINES if re.match(r"(\$ )?(python -m trainer|sigmoid-rl) ?", line)
]


def test_every_step_of_the_story_has_its_command() -> None:
    modules = {line.split()[2].removeprefix("trainer.") for line in COMMANDS if line.startswith("python")}
    assert modules == {"doctor", "evaluate", "sweep", "scaling", "main", "serve"} and len(COMMANDS) > 15
    ways = {line.split()[3] for line in COMMANDS if "trainer.scaling" in line}
    assert ways >= {"plan", "predict", "fit", "inference"}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_taken(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    if words[0] == "sigmoid-rl":
        name, argv = f"trainer.{words[1]}", words[2:]
    else:
        assert words[:2] == ["python", "-m"]
        name, argv = words[2], words[3:]
    match name:
        case "trainer.main":
            assert cli.parse(argv).config.run_dir.startswith("runs/")
        case "trainer.sweep":
            sweeping = import_module("trainer.sweep.__main__")
            parsed = sweeping._parser().parse_intermixed_args(argv)
            sweep = sweeping.Arguments.from_arguments(parsed).sweep(parsed.recipes, ())
            assert len(sweep.check()) == 3
        case "trainer.scaling":
            parser, command = Parser(), import_module(f"trainer.scaling.commands.{argv[0]}").Command
            command.add_to(parser)
            args = parser.parse_args(argv[1:])
            assert all(
                expand(text, command.from_arguments(args)) for text in args.inputs if "toml" not in text
            )
        case "trainer.doctor":
            assert not argv
        case _:
            assert import_module(f"{name}.__main__")._parser().parse_args(argv)
