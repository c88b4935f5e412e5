"""The native library of another processor, run under an emulator: what `ctypes.CDLL` is to `kernels.native`.

Every call goes with its buffers to emulated_native.cpp, which `make test-arm` compiles for aarch64 beside the
library, so that the tests of the native backend run on its code unchanged.
"""

import ctypes
import os
import struct
import subprocess
from functools import partial
from typing import Any

NUMBERS = ("version", "isa", "runs_here", "choose", "chosen", "has_pairs", "logits", "row_stats", "row_grads",
           "d_hidden", "add_d_weight", "score")  # fmt: skip
COMMAND = "SIGMOID_RL_EMULATED"  # qemu-aarch64, its options, the driver, the library
Buffer = tuple[int | None, int]  # address and bytes


class EmulatedLibrary:
    """One process for all calls; it ends with this one, whose end closes its input."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(command.split(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner = os.getpid()
        for name in NUMBERS:
            setattr(
                self, f"sigmoid_rl_{name}", Function(partial(getattr(self, f"_{name}", self._plain), name))
            )

    def _ask(self, name: str, numbers: list[int], buffers: list[Buffer] = []) -> int:  # noqa: B006  # only read
        assert os.getpid() == self._owner, "the emulator is not shared with a forked process"
        source, sink = self._process.stdin, self._process.stdout
        assert source is not None and sink is not None
        request = struct.pack(
            f"<2q{len(numbers)}qq", NUMBERS.index(name), len(numbers), *numbers, len(buffers)
        )
        for address, size in buffers:
            content = b"" if address is None else ctypes.string_at(address, size)
            request += struct.pack("<q", -1 if address is None else size) + content
        source.write(request)
        source.flush()
        (result,) = struct.unpack("<q", sink.read(8))
        for address, size in buffers:
            if address is not None:
                ctypes.memmove(address, sink.read(size), size)
        return int(result)

    def _plain(self, name: str, *numbers: Any) -> int:
        return self._ask(name, [x.value for x in numbers])

    def _isa(self, name: str, index: Any) -> bytes | None:
        text = ctypes.create_string_buffer(64)
        there = self._ask(name, [index.value], [(ctypes.addressof(text), 64)])
        return text.value if there else None

    def _product(
        self, name: str, a: Any, b: Any, rows: int, columns: int, out: Any, stride: Any, *more: Any
    ) -> int:
        """A GEMM; `more` precede the stride, threads follow it."""
        buffers = [matrix(a), matrix(b), (out.value, 4 * ((rows - 1) * stride.value + columns))]
        *flags, threads = more
        numbers = [*sizes(a), *sizes(b), *(int(x.value) for x in flags), stride.value, threads.value]
        return self._ask(name, numbers, buffers)

    def _logits(self, name: str, h: Any, w: Any, out: Any, stride: Any, threads: Any) -> int:
        return self._product(name, h, w, h._obj.rows, w._obj.rows, out, stride, threads)

    def _d_hidden(self, name: str, dz: Any, w: Any, out: Any, stride: Any, threads: Any) -> int:
        return self._product(name, dz, w, dz._obj.rows, w._obj.columns, out, stride, threads)

    def _add_d_weight(self, name: str, dz: Any, h: Any, add: Any, out: Any, stride: Any, threads: Any) -> int:
        return self._product(name, dz, h, dz._obj.columns, h._obj.columns, out, stride, add, threads)

    def _row_stats(self, name: str, z: Any, rows: Any, out: Any, threads: Any) -> int:
        n = z._obj.rows
        return self._ask(
            name, [*sizes(z), cap(rows), threads.value], [matrix(z), *vectors(rows, n), (out.value, 16 * n)]
        )

    def _row_grads(self, name: str, z: Any, rows: Any, c: Any, bf16: Any, threads: Any) -> int:
        n = z._obj.rows
        coefficients = [(getattr(c._obj, field), 4 * n) for field in ("anchor", "a", "b", "k", "target")]
        numbers = [*sizes(z), cap(rows), int(bf16.value), threads.value]
        return self._ask(name, numbers, [matrix(z), *vectors(rows, n), *coefficients])

    def _score(self, name: str, h: Any, w: Any, rows: Any, out: Any, threads: Any) -> int:
        n = h._obj.rows
        numbers = [*sizes(h), *sizes(w), cap(rows), threads.value]
        return self._ask(name, numbers, [matrix(h), matrix(w), *vectors(rows, n), (out.value, 16 * n)])


class Function:
    """A function of the library, whose `restype` may be set."""

    restype: Any = None

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


def sizes(m: Any) -> list[int]:
    return [m._obj.rows, m._obj.columns, m._obj.stride, int(m._obj.bf16)]


def matrix(m: Any) -> Buffer:
    rows, columns, stride, bf16 = sizes(m)
    return m._obj.data, max(0, (rows - 1) * stride + columns) * (2 if bf16 else 4)


def cap(rows: Any) -> int:
    return int.from_bytes(struct.pack("<f", rows._obj.cap), "little")


def vectors(rows: Any, n: int) -> list[Buffer]:
    return [(rows._obj.targets, 8 * n), (rows._obj.inverse_temperature, 4 * n)]
