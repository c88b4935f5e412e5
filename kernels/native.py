"""The native CPU backend: binds the C++ kernels of kernels/csrc, which setup.py builds into _native.so.

The environment variable SIGMOID_RL_ISA names the instruction set; without it, the best that the machine has
is used. The number of threads is torch's (`torch.set_num_threads`). ctypes releases the GIL during a call.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .rows import Gradient

LIBRARY = Path(__file__).with_name("_native.so")
ISA_VARIABLE = "SIGMOID_RL_ISA"
VERSION = 2  # must equal sigmoid_rl_version() in kernels/csrc/api.cpp


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64),
        ("stride", ctypes.c_int64), ("bf16", ctypes.c_bool),
    )  # fmt: skip


class _Rows(ctypes.Structure):
    _fields_ = (
        ("targets", ctypes.c_void_p), ("inverse_temperature", ctypes.c_void_p), ("cap", ctypes.c_float),
    )  # fmt: skip


class _Coefficients(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("anchor", "a", "b", "k", "target"))


def why_not() -> str:
    """The reason why it cannot be used here; empty if it can. ValueError on a wrong SIGMOID_RL_ISA."""
    library = _library()
    return library if isinstance(library, str) else ""


def isas() -> list[str]:
    """The library's instruction sets that run on this machine, best first; the emulated are for tests."""
    return [*_usable(_loaded())]


def select(isa: str) -> None:
    """Use this instruction set from now on, in all threads. ValueError if this machine does not have it."""
    _choose(_loaded(), isa)


def info() -> dict[str, Any]:
    """The instruction set in use, all that this machine can run, and the number of threads."""
    library = _loaded()
    used = _names(library)[library.sigmoid_rl_chosen()]
    return {"isa": used, "isas": isas(), "threads": torch.get_num_threads()}


def prepare(hidden: Tensor, weight: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
    """The weight (V, H) for the functions below: FP32 or BF16, with contiguous rows."""
    return _rows_of(weight)


def logits(h: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (C, V) FP32 = h (C, H) Wᵀ; h and W FP32 or BF16. Products of BF16 are exact, sums are in FP32."""
    a, b = _rows_of(h), _rows_of(weight)
    _call("logits", _matrix(a), _matrix(b), *_output(out, len(a), len(b)))


def row_stats(z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float) -> Tensor:
    """(4, C) FP32 statistics of z (C, V) FP32: anchor, others, target, dot (see `kernels.rows`)."""
    stats = torch.empty(4, len(z), dtype=torch.float32)
    rows, _alive = _row_inputs(targets, inverse_temperature, cap, len(z))
    _output(z, *z.shape)
    _call("row_stats", _matrix(z), rows, stats.data_ptr())
    return stats


def score(h: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float) -> Tensor:
    """(4, N): bit for bit `row_stats` of `logits` for h (N, H), but only tiles of logits are in memory."""
    a, b = _rows_of(h), _rows_of(weight)
    stats = torch.empty(4, len(a), dtype=torch.float32)
    rows, _alive = _row_inputs(targets, inverse_temperature, cap, len(a))
    _call("score", _matrix(a), _matrix(b), rows, stats.data_ptr())
    return stats


def row_grads(
    z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float, g: Gradient, dtype: torch.dtype
) -> Tensor:
    """The logits' gradient (C, V) in place of z: FP32, or BF16 if asked for and this ISA multiplies pairs."""
    rows, _alive = _row_inputs(targets, inverse_temperature, cap, len(z))
    _output(z, *z.shape)
    values = g.anchor, g.a, g.b, g.k, g.dz_y
    vectors = [None if x is None else _vector(x, torch.float32, len(z)) for x in values]
    coefficients = _Coefficients(*(None if x is None else x.data_ptr() for x in vectors))
    bf16 = dtype == torch.bfloat16 and bool(_loaded().sigmoid_rl_has_pairs())
    _call("row_grads", _matrix(z), rows, ctypes.byref(coefficients), ctypes.c_bool(bf16))
    return z.view(torch.bfloat16)[:, : z.shape[1]] if bf16 else z


def d_hidden(dz: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (C, H) FP32 = dz (C, V) W."""
    a, b = _rows_of(dz), _rows_of(weight)
    _call("d_hidden", _matrix(a), _matrix(b), *_output(out, len(a), b.shape[1]))


def add_d_weight(dz: Tensor, h: Tensor, out: Tensor, first: bool = False) -> None:
    """out (V, H) FP32 += dzᵀ h, or = if first."""
    a, b = _rows_of(dz), _rows_of(h)
    address, stride = _output(out, a.shape[1], b.shape[1])
    _call("add_d_weight", _matrix(a), _matrix(b), ctypes.c_bool(not first), address, stride)


@cache
def _library() -> ctypes.CDLL | str:
    """The library with its instruction set chosen, or the reason why there is none."""
    if not LIBRARY.exists():
        return (
            f"{LIBRARY.name} was not built: install CMake and a C++20 compiler, then install sigmoid-rl again"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded: {error}"
    if not hasattr(library, "sigmoid_rl_version") or library.sigmoid_rl_version() != VERSION:
        return f"{LIBRARY.name} was built from other sources than native.py: install sigmoid-rl again"
    library.sigmoid_rl_isa.restype = ctypes.c_char_p
    for name in ("runs_here", "has_pairs"):
        getattr(library, f"sigmoid_rl_{name}").restype = ctypes.c_bool
    _choose(library, os.environ.get(ISA_VARIABLE))
    return library


def _loaded() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


def _names(library: ctypes.CDLL) -> list[str]:
    names: list[str] = []
    while name := library.sigmoid_rl_isa(ctypes.c_int64(len(names))):
        names.append(name.decode())
    return names


def _usable(library: ctypes.CDLL) -> dict[str, int]:
    """The indices of the instruction sets that run on this machine, best first."""
    names = enumerate(_names(library))
    return {name: i for i, name in names if library.sigmoid_rl_runs_here(ctypes.c_int64(i))}


def _choose(library: ctypes.CDLL, isa: str | None) -> None:
    usable = _usable(library)
    isa = next(iter(usable)) if isa is None else isa
    if isa not in usable:
        known = "this machine lacks it" if isa in _names(library) else "it is unknown"
        raise ValueError(f"{ISA_VARIABLE} is {isa!r}, but {known}; expected one of {', '.join(usable)}")
    library.sigmoid_rl_choose(ctypes.c_int64(usable[isa]))


def _call(name: str, *args: Any) -> None:
    """Call a function of the library, adding the number of threads. MemoryError if it runs out of memory."""
    threads = ctypes.c_int64(torch.get_num_threads())
    args = tuple(ctypes.c_void_p(x) if isinstance(x, int) else x for x in args)
    if getattr(_loaded(), f"sigmoid_rl_{name}")(*args, threads):
        raise MemoryError(f"native {name}: out of memory for its buffers")


def _rows_of(x: Tensor) -> Tensor:
    """x with contiguous rows. ValueError unless it is an FP32 or BF16 matrix on the CPU."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or x.dim() != 2:
        raise ValueError(
            f"expected an FP32 or BF16 matrix on the CPU, given {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    return x.detach() if x.stride(1) == 1 or x.shape[1] == 1 else x.detach().contiguous()


def _matrix(x: Tensor) -> Any:
    bf16 = x.dtype == torch.bfloat16
    return ctypes.byref(_Matrix(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), bf16))


def _output(x: Tensor, rows: int, columns: int) -> tuple[int, ctypes.c_int64]:
    """(address, row stride) of a matrix that is written to, which therefore cannot be copied first."""
    if x.shape != (rows, columns) or x.dtype != torch.float32 or (x.stride(1) != 1 and columns > 1):
        raise ValueError(
            f"expected FP32 ({rows}, {columns}) with contiguous rows, given {x.dtype} {tuple(x.shape)}"
        )
    return x.data_ptr(), ctypes.c_int64(x.stride(0))


def _row_inputs(targets: Tensor, inverse_temperature: Tensor, cap: float, n: int) -> tuple[Any, list[Tensor]]:
    """The C structure, and the tensors it points to, which the caller must keep alive."""
    vectors = [_vector(targets, torch.int64, n), _vector(inverse_temperature, torch.float32, n)]
    return ctypes.byref(_Rows(vectors[0].data_ptr(), vectors[1].data_ptr(), cap)), vectors


def _vector(x: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    if x.shape != (n,) or x.dtype != dtype:
        raise ValueError(f"expected {dtype} ({n},), given {x.dtype} {tuple(x.shape)}")
    return x.contiguous()
