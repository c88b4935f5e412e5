"""Elementwise device functions: 16-bit conversion, the soft cap, and functions as precise as torch's."""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

import triton
import triton.language as tl
from triton.language.extra import libdevice

from . import config

INTERPRET: tl.constexpr = tl.constexpr(config.INTERPRET)
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
"""Below any logit, but still finite as a difference and over a temperature of 1e-8 or more."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
RAISE: tl.constexpr = tl.constexpr(40.0)
"""An anchor is raised when a logit exceeds it by more than this. Σ e^{u − m} < e^{40} · V is far below FP32's
limit e^{88}, also after the division by e^{u_y − m} ≥ e^{−20} in `kernels.rows.softmax`."""


@triton.jit
def to_bf16(x):
    """FP32 to bf16, rounded to nearest, ties to even. The interpreter's own conversion truncates."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def from_bf16(x):
    """bf16 to FP32, exactly (the interpreter's own conversion loses subnormals)."""
    if INTERPRET:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def as_fp32(x):
    """bf16, FP16 or FP32 as FP32."""
    if x.dtype == tl.bfloat16:
        x = from_bf16(x)
    return x.to(tl.float32)


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """FP32 x in this type, FP32, bf16 or FP16."""
    if tl.bfloat16 == TYPE:
        x = to_bf16(x)
    return x.to(TYPE)


@triton.jit
def load_fp32(pointers, inside):
    """bf16 or FP32 elements as FP32; 0 outside."""
    return as_fp32(tl.load(pointers, mask=inside, other=0.0))


@triton.jit
def store_rounded(pointers, x, inside):
    """Store FP32 x in the type of the elements at these places, FP32 or bf16."""
    tl.store(pointers, rounded(x, pointers.dtype.element_ty), mask=inside)


@triton.jit
def fma(x, y, z):
    """x y + z, rounded once. The interpreter's own rounds the product, too."""
    if INTERPRET:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def tanh(x):
    """Relative error 2e-7: a polynomial near 0 (Cephes' tanhf), 1 − 2/(e^{2|x|} + 1) elsewhere."""
    a = tl.abs(x)
    s = x * x
    p = -5.70498872745e-3 * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(a, 20.0)) + 1.0)
    return tl.where(a < 0.625, p * s * x + x, tl.where(x < 0, -far, far))


@triton.jit
def capped(z, CAP: tl.constexpr):
    """The soft-capped logit, cap · tanh(z / cap) (Gemma 2, arXiv 2408.00118); z where cap is 0."""
    if CAP != 0.0:
        z = tanh(z * (1.0 / CAP)) * CAP
    return z


@triton.jit
def times_cap_slope(g, x, CAP: tl.constexpr):
    """g · d capped / dz at the capped logit x."""
    if CAP != 0.0:
        t = x * (1.0 / CAP)
        g *= 1.0 - t * t
    return g


@triton.jit
def precise_exp(x):
    """The same exp as torch's on CUDA; `tl.exp` loses digits as |x| grows."""
    return tl.exp(x) if INTERPRET else libdevice.exp(x)


@triton.jit
def precise_log(x):
    """The same log as torch's on CUDA; `tl.log` loses digits near 1."""
    return tl.log(x) if INTERPRET else libdevice.log(x)


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0. The interpreter, which has none, takes log(u) x / (u − 1) with u = 1 + x."""
    if INTERPRET:
        u = 1.0 + x
        return tl.where((u == 1.0) | (x > 1.0), tl.where(x > 1.0, tl.log(u), x), tl.log(u) * x / (u - 1.0))
    return libdevice.log1p(x)


@triton.jit
def expm1(x):
    """e^x − 1. The interpreter, which has none, takes (u − 1) x / log(u) with u = e^x near 0."""
    if INTERPRET:
        u = tl.exp(x)
        near = tl.where(u == 1.0, x, (u - 1.0) * x / tl.log(u))
        return tl.where(tl.abs(x) < 1.0, near, u - 1.0)
    return libdevice.expm1(x)
