"""The error of every wrong setting, the ranges of the numbers in the config, and the docs of its fields."""

import ast
import inspect
import math
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any


class ConfigError(ValueError):
    """A setting or input is wrong: the message says what was given, what was expected, what to do."""


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a number in the config may have. It is in the field's annotation; cli.build enforces it."""

    least: float = -math.inf  # the lowest value allowed
    above: float = -math.inf  # every value allowed is higher
    most: float = sys.float_info.max  # all finite numbers; math.inf: infinity, too
    reason: str = ""

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and value > self.above

    def __str__(self) -> str:
        low = f"above {self.above:g}" if self.above > self.least else f"{self.least:g} or more"
        return low + (f" and at most {self.most:g}" if self.most < sys.float_info.max else "")


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(0)]


@cache
def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass, in one line."""
    body = ast.parse(dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]  # a class
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
