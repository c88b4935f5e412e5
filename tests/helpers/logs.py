"""Logs of runs for tests of reading: read them as on a command line, write them as tables."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.scaling.reading.options import Parser, ReadOptions
from trainer.scaling.reading.read import Reading, read_groups, read_inputs


def parsed(words: Sequence[object]) -> tuple[list[str], ReadOptions]:
    """The inputs and options of a command line."""
    parser = Parser(prog="")
    parser.add_argument("inputs", nargs="+")
    ReadOptions.add_to(parser)
    arguments = parser.parse_args([str(word) for word in words])
    return arguments.inputs, ReadOptions.from_arguments(arguments)


def readings_of(*words: object) -> list[Reading]:
    return read_inputs(*parsed(words))


def reading_of(*words: object) -> Reading:
    (reading,) = readings_of(*words)
    return reading


def groups_of(*words: object) -> dict[str, list[Reading]]:
    return read_groups(*parsed(words))
