"""Arithmetic of PTX on the 32 lanes of a warp, in NumPy. PTX ISA 8.7, "Instruction Set"."""

from collections.abc import Callable
from typing import Any

import numpy as np
from ptx_memory import UNSIGNED, Array

Function = Callable[..., Array]
DType = np.dtype[Any]
TYPES: dict[str, DType] = {
    f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
    for size in UNSIGNED
    for kind in "bus"
}
TYPES |= {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "f16": np.dtype("f2"), "pred": np.dtype(bool)}
TYPES |= {"bf16": np.dtype("u2"), "bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4")}
ROUNDINGS = {"rn", "rz", "rm", "rp"}


def arithmetic(opcode: str) -> tuple[Function, list[DType], DType]:
    """(function, its operands' types, its result's type) of an instruction that only computes."""
    name, *modifiers = opcode.split(".")
    kind = modifiers[-1]
    if name == "cvt":
        return _conversion(set(modifiers[:-2]), modifiers[-2], kind)
    t = TYPES[kind]
    if name == "setp":
        return _comparison(modifiers[0], kind), [t, t], TYPES["pred"]
    if name == "selp":
        return lambda a, b, p: np.where(p, a, b), [t, t, TYPES["pred"]], t
    if name in ("and", "or", "xor", "not"):
        function: Function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.get(
            name, np.invert
        )
        return function, [t] * (1 if name == "not" else 2), t
    if t.kind == "f":
        return _float(name, set(modifiers)), [t] * {"fma": 3}.get(name, 2 if name in BINARY else 1), t
    if name in ("shl", "shr"):
        return _shift(name, 8 * t.itemsize), [t, TYPES["u32"]], t
    if name == "bfe":
        return _field, [t, TYPES["u32"], TYPES["u32"]], t
    wide = np.dtype(f"{t.kind}{min(8, 2 * t.itemsize)}")
    if "wide" in modifiers:
        widened = lambda a, b, c=0: a.astype(wide) * b.astype(wide) + c  # noqa: E731
        return widened, [t, t, wide][: 3 if name == "mad" else 2], wide
    if "hi" in modifiers:
        high = lambda a, b: (a.astype(wide) * b.astype(wide) >> (8 * t.itemsize)).astype(t)  # noqa: E731
        return high, [t, t], t
    if name == "mad":
        return lambda a, b, c: a * b + c, [t] * 3, t
    return INTEGER[name], [t] * (1 if name in ("neg", "abs") else 2), t


def _divide(a: Array, b: Array) -> Array:
    """Quotient, cut towards zero; all bits set for a divisor of zero."""
    q = np.abs(a) // np.where(b == 0, 1, np.abs(b)).astype(a.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), np.where((a < 0) != (b < 0), -q, q))


INTEGER: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "neg": np.negative, "abs": np.abs, "div": _divide, "rem": lambda a, b: a - _divide(a, b) * b,
}  # fmt: skip
BINARY: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.fmax, "min": np.fmin,
}  # fmt: skip
UNARY: dict[str, Function] = {
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh,
}  # fmt: skip


EXACT = BINARY | {"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt}


def _float(name: str, modifiers: set[str]) -> Function:
    """FP32 arithmetic in float64, rounded once; approximations have no error beside that."""
    rounding = (modifiers & ROUNDINGS or {"rn"}).pop()
    if rounding == "rn" and "ftz" not in modifiers and name in EXACT:  # NumPy's FP32 rounds these once
        return EXACT[name]
    flush = flushed if "ftz" in modifiers else lambda x: x

    def function(*operands: Array) -> Array:
        a, *rest = [flush(x) for x in operands]
        a = a.astype(np.float64)  # and with it all that follows
        if name == "fma" and rounding == "rn":
            total = a * rest[0] + rest[1]
            if not np.count_nonzero(_may_round_twice(total)):
                return flush(total.astype(np.float32))
        if name == "fma":
            total, error = _two_sum(a * rest[0], rest[1])
        elif name in ("add", "sub"):
            total, error = _two_sum(a, rest[0] if name == "add" else -rest[0])
        else:
            total, error = (BINARY | UNARY)[name](a, *rest), np.zeros_like(a)
        return flush(round_fp32(total, error, rounding))

    return function


def flushed(x: Array) -> Array:
    """Subnormal FP32 numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _may_round_twice(x: Array) -> Array:
    """Where float64 x may lie between two FP32 numbers because it was rounded, or is subnormal in FP32."""
    return (x.view(np.uint64) & 0x1FFFFFFF == 0x10000000) | ((np.abs(x) < 2.0**-125) & (x != 0))


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """float64 a + b and its exact rounding error (Knuth); 0 where the sum is not finite."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, np.where(np.isfinite(total), error, 0.0)


def round_fp32(x: Array, error: Array, rounding: str) -> Array:
    """float64 x + error as FP32, rounded once: to nearest by way of rounding x to odd, or in a direction."""
    if rounding == "rn":
        even = (x.view(np.uint64) & 1) == 0
        x = np.where((error != 0) & even, np.nextafter(x, np.copysign(np.inf, error)), x)
        return x.astype(np.float32)
    near = x.astype(np.float32)
    beyond = (near.astype(np.float64) - x) - error  # its sign is exact
    towards = {"rz": -np.sign(x), "rm": np.full(x.shape, -1.0), "rp": np.full(x.shape, 1.0)}[rounding]
    return np.where(beyond * towards < 0, np.nextafter(near, (towards * np.inf).astype(np.float32)), near)


def _comparison(how: str, kind: str) -> Function:
    names: dict[str, Function] = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    }  # fmt: skip
    if kind[0] != "f":
        return names[how]
    if how in ("nan", "num"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (how == "nan")
    if how in names and how != "ne":
        return names[how]
    if how == "ne":  # NumPy's is true of NaN
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    return lambda a, b: names[how[:-1]](a, b) | np.isnan(a) | np.isnan(b)


def _shift(name: str, bits: int) -> Function:
    def function(a: Array, by: Array) -> Array:
        inside = np.minimum(by, bits - 1).astype(a.dtype)
        shifted = a << inside if name == "shl" else a >> inside
        lost = (by >= bits) & ((name == "shl") | (a.dtype.kind == "u"))
        return np.where(lost, np.zeros_like(a), shifted)

    return function


def _field(a: Array, start: Array, length: Array) -> Array:
    """A field of bits of 32-bit a, with its sign where a has one; 1 to 32 bits that lie inside of a."""
    left = a << (32 - start - length).astype(a.dtype)
    return left >> (32 - length).astype(a.dtype)


def to_bf16(x: Array) -> Array:
    """bf16 bits of FP32 x, rounded to nearest, ties to even; NaN is 0x7FFF."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _conversion(modifiers: set[str], to: str, kind: str) -> tuple[Function, list[DType], DType]:
    t, source = TYPES[to], TYPES[kind]
    narrow = {"bf16": to_bf16, "f16": lambda x: x.astype(np.float16).view(np.uint16)}
    if to.endswith("x2"):
        pack = narrow[to[:-2]]
        joined = lambda high, low: pack(high).astype(np.uint32) << 16 | pack(low)  # noqa: E731
        return joined, [source, source], t
    if to == "bf16":
        return to_bf16, [source], t
    if kind == "bf16":
        return lambda x: (x.astype(np.uint32) << 16).view(np.float32).astype(t), [source], t
    if t.kind == source.kind == "f" and t == source:
        return _integral(modifiers), [source], t
    if t.kind in "iu" and source.kind == "f":
        limits = np.iinfo(t)
        to_integer = _integral(modifiers)

        def clamped(x: Array) -> Array:
            whole = np.nan_to_num(to_integer(x).astype(np.float64), nan=0.0)
            return np.where(whole >= limits.max, limits.max, np.maximum(whole, limits.min)).astype(t)

        return clamped, [source], t
    return lambda x: x.astype(t), [source], t


def _integral(modifiers: set[str]) -> Function:
    """FP to the same type: to an integer where a rounding to integers is named, cut to [0, 1] by sat."""

    def function(x: Array) -> Array:
        for name, rounded in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
            x = rounded(x) if name in modifiers else x
        if "ftz" in modifiers:
            x = flushed(x)
        return np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype) if "sat" in modifiers else x

    return function
