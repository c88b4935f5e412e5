"""The kernels' backends that work here; the native one once for each instruction set that it can run."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
from emulated_native import COMMAND, EmulatedLibrary

from kernels import backend_info, native
from kernels.triton import config

INTERPRETED = [  # marks of a test that calls Triton's kernels on the CPU
    pytest.mark.skipif(not config.INTERPRET, reason="TRITON_INTERPRET=1 is not set: see tests/gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
if command := os.environ.get(COMMAND):  # before anything has loaded the library of this machine
    with patch.object(ctypes, "CDLL", lambda path: EmulatedLibrary(command)):
        assert not native.why_not(), native.why_not()
ISAS = [] if native.why_not() else native.isas()
BACKENDS = [
    variant
    for name, info in backend_info().items()
    if info["available"]
    for variant in ([f"cpu-{isa}" for isa in ISAS] if name == "cpu" else [name])
]
TAKE_FP16 = [name for name in BACKENDS if not name.startswith("cpu")]


@contextmanager
def on_backend(variant: str) -> Iterator[str]:
    """The name of a backend; inside, the native one uses the variant's instruction set."""
    name, _, isa = variant.partition("-")
    with instruction_set(isa) if isa else nullcontext():
        yield name


@contextmanager
def instruction_set(isa: str) -> Iterator[None]:
    """The native backend uses this one inside."""
    before = native.info()["isa"]
    native.select(isa)
    try:
        yield
    finally:
        native.select(before)
