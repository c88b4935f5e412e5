"""Fixtures that run a test on every backend, or on every instruction set of the native one."""

from collections.abc import Iterator

import pytest
from backends import BACKENDS, ISAS, instruction_set, on_backend


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
