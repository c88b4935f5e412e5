"""Fixtures that run a test on every backend, or on every instruction set of the native one."""

import inspect
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import pytest
from backends import BACKENDS, ISAS, instruction_set, on_backend

if "triton" in BACKENDS:  # half of its time the interpreter looks for what to patch; here, once
    from triton.runtime import interpreter

    builtins = cache(lambda p: [n for n, x in inspect.getmembers(p) if interpreter.tl.core.is_builtin(x)])
    members = {"getmembers": lambda package: [(n, getattr(package, n)) for n in builtins(package)]}
    interpreter.inspect = SimpleNamespace(**vars(inspect) | members)


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the native backend in turn; "none" where that was not built."""
    if not ISAS:
        yield request.param
        return
    with instruction_set(request.param):
        yield request.param


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of each backend that works here; `cpu` comes once for each instruction set."""
    with on_backend(request.param) as name:
        yield name
