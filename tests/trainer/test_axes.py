"""The promise that every value of an axis of the recipes has a test of numbers worked by hand.

A test says which values it covers: `@pytest.mark.axis("objective.aggregation", "sample", "token")`. The marks
are read from the files, so that a test counts whether or not it is collected in this run.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from kernels.objectives import OBJECTIVES
from trainer import cli

TESTS = Path(__file__).parents[1]
NUMBERS = {"objective.entropy_bonus": (0.2,), "pipeline.epochs": (2,)}  # by a value that is not the default
SWITCHES = ("objective.", "pipeline.", "curriculum.")  # sections whose booleans are choices of the recipe


def axes() -> set[tuple[str, object]]:
    """Every (key, value) of the configuration that is a choice of the recipe, and not of the machine."""
    hints = {key: hint for key, (hint, _) in cli.fields().items()}
    choices = {key: get_args(hint) for key, hint in hints.items() if get_origin(hint) is Literal}
    choices |= {
        key: (False, True) for key, hint in hints.items() if hint is bool and key.startswith(SWITCHES)
    }
    choices |= NUMBERS | {"objective.loss": tuple(OBJECTIVES), "objective.kl.to": ("initial", "generator")}
    return {
        (key, value) for key, values in choices.items() for value in values if key.split(".")[0] != "engine"
    }


def marks(path: Path) -> Iterator[tuple[str, object]]:
    """The (key, value) pairs that the tests of a file are marked with, on the function or on a parameter."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            for call in (node for d in function.decorator_list for node in ast.walk(d)):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.axis":
                    key, *values = map(ast.literal_eval, call.args)
                    yield from ((key, value) for value in values)


def test_every_value_of_every_axis_has_a_test_worked_by_hand() -> None:
    marked = {pair for path in TESTS.rglob("test_*.py") for pair in marks(path)}
    unknown = sorted(f"{key} {value}" for key, value in marked - axes())
    assert not unknown, "marks name a key or a value that does not exist"
    missing = sorted(f"{key} {value}" for key, value in axes() - marked)
    assert not missing, 'expected a test marked @pytest.mark.axis("KEY", "VALUE") for each'
