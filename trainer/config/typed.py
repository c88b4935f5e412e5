"""Conversion of plain values, from YAML or a command line, to a checked config; and the texts of --help."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from trainer.config import Config, ConfigError
from trainer.config.values import field_docs

hints_of = cache(partial(get_type_hints, include_extras=True))  # else parsed at each call


def build(value: Any, hint: Any, where: str, key: str = "", finite: bool = True) -> Any:
    """`value` as type `hint`, or a ConfigError that names the key and both. Only a Range allows infinity."""
    origin, args, place = get_origin(hint), get_args(hint), f"{where}: {key}" if key else where
    if origin is Annotated:
        number, allowed = build(value, args[0], where, key, finite=False), args[1]
        if number not in allowed:
            reason = f": {allowed.reason}" if allowed.reason else ""
            finite_too = ", finite" if number == math.inf > allowed.most else ""
            raise ConfigError(f"{place} is {number}; expected {allowed}{finite_too}{reason}")
        return number
    if dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return _section(value, hint, where, f"{key}." if key else "")
    elif origin in (UnionType, Union):
        for choice in args:
            if dataclasses.is_dataclass(choice) and isinstance(value, Mapping):
                return build(value, choice, where, key)  # its error names the key inside
            with suppress(ConfigError):
                return build(value, choice, where, key)
    elif origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and (args[-1] is ... or len(items) == len(args)):
            return tuple(build(item, args[0], where, f"{key}[{i}]") for i, item in enumerate(items))
    elif origin is dict and args[1] is not Any:
        if isinstance(value, Mapping):
            return {
                build(k, args[0], where, key): build(v, args[1], where, f"{key}.{k}")
                for k, v in value.items()
            }
    elif isinstance(value, bool) and hint is not bool:
        pass  # Python takes it for a number
    elif hint is float:
        with suppress(TypeError, ValueError):
            number = float(value)  # YAML 1.1 reads 1e-5 (without a point) as text
            if math.isfinite(number) or not finite:
                return number
    elif isinstance(value, origin or hint):
        return value
    raise ConfigError(f"{place}: expected {type_name(hint)}, given {value!r}")


def _section(values: Mapping[str, Any], cls: Any, where: str, prefix: str) -> Any:
    """An instance of a dataclass of the config, whose keys begin with the prefix."""
    hints = hints_of(cls)
    for name in values.keys() - hints:
        key = f"{prefix}{name}"
        raise ConfigError(f"{where}: unknown key {key!r}{suggest(key)}; --help lists them all")
    for field in dataclasses.fields(cls):
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            missing, expected = f"{prefix}{field.name}", type_name(hints[field.name])
            raise ConfigError(f"{where}: {missing} is missing; expected {expected}")
    return cls(
        **{name: build(value, hints[name], where, f"{prefix}{name}") for name, value in values.items()}
    )


def from_text(hint: Any, raw: str) -> Any:
    """A command-line value as YAML would read it; text stays text."""
    if hint is str or get_origin(hint) is Literal:
        return raw
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError:
        return raw


def type_name(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{type_name(args[0])}, {args[1]}"
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (UnionType, Union):
        return " or ".join(map(type_name, args))
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(field.name for field in dataclasses.fields(hint)) + "}"
    if origin is tuple:
        return "list of " + (type_name(args[0]) if args[-1] is ... else f"{len(args)} {args[0].__name__}")
    if origin is dict and args[1] is not Any:
        return f"mapping of {type_name(args[0])} to {type_name(args[1])}"
    name: str = (origin or hint).__name__
    return {"dict": "mapping", "bool": "true | false", "str": "text", "NoneType": "null"}.get(name, name)


@cache
def fields(cls: type = Config, prefix: str = "") -> dict[str, tuple[Any, str]]:
    """Type and docstring of every key of the config, such as learner.lr, in the order of --help."""
    keys: dict[str, tuple[Any, str]] = {}
    hints, docs = hints_of(cls), field_docs(cls)
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            keys |= fields(hint, f"{prefix}{name}.")  # type: ignore[arg-type]  # hint is a class
        else:
            keys[f"{prefix}{name}"] = hint, docs[name]
    return keys


def suggest(key: str) -> str:
    same_name = [k for k in fields() if k.rpartition(".")[2] == key.rpartition(".")[2]]
    close = difflib.get_close_matches(key, same_name or fields(), n=1, cutoff=0 if same_name else 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
