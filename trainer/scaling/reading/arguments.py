"""Options of a command line as fields of a dataclass: the docstring under each is its line in `--help`."""

import argparse
import inspect
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from trainer.config.values import field_docs


@dataclass(frozen=True, kw_only=True)
class Options:
    """A base of frozen dataclasses. A field's type says how its option is read.

    `Annotated` adds the name of its value in `--help` (text), or a function that reads it.
    """

    group: ClassVar[tuple[str, ...]] = ()  # title and description in `--help`; empty: none of its own

    @classmethod
    def add_to(cls, command: argparse.ArgumentParser) -> None:
        """An option for each field, in the groups of the classes that define them."""
        hints = get_type_hints(cls, include_extras=True)
        for part in reversed(cls.__mro__):
            own = [option for option in fields(cls) if option.name in inspect.get_annotations(part)]
            group = vars(part).get("group") if own else None
            place = command.add_argument_group(*group) if group else command
            for option in own:
                text = field_docs(part)[option.name]
                if option.default not in (None, False, ()) and "default" not in text:
                    text += f" (default: {as_typed(option.default)})"
                how = _argument(hints[option.name])
                place.add_argument(
                    flag(option.name), default=option.default, help=text.replace("%", "%%"), **how
                )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The options on a command line that has them."""
        values = {option.name: getattr(arguments, option.name) for option in fields(cls)}
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


def flag(name: str) -> str:
    """A field as on the command line."""
    return f"--{name.replace('_', '-')}"


def as_typed(value: Any) -> str:
    """A default as on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(as_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _argument(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    extra: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *extra = get_args(hint)
    kind = next((one for one in get_args(hint) if NoneType in get_args(hint) and one is not NoneType), hint)
    argument: dict[str, Any] = {"type": kind}
    if kind is bool:
        argument = {"action": "store_true"}
    elif get_origin(kind) is Literal:
        argument = {"choices": get_args(kind)}
    elif get_origin(kind) is tuple:
        item, *rest = get_args(kind)
        argument = {"type": item, "nargs": "+" if rest == [...] else 1 + len(rest)}
    for one in extra:
        argument["type" if callable(one) else "metavar"] = one
    return argument
