"""The elementwise ops of a transformer's body, fused: RMSNorm (and the residual), q/k norm with RoPE, SwiGLU.

    x ─> fused_add_rms_norm ─> q, k, v ─> fused_qk_norm_rope ─> attention ─> fused_add_rms_norm ─> swiglu ─> …

Each op is one pass over its inputs forward and one backward, computed in FP32 and rounded once, to the type
that the caller names: that of the next GEMM. CUDA tensors take the Triton kernels; other devices take the
lines of torch below, which autograd differentiates. There is no fallback from one to the other.
"""

import torch
from torch import Tensor

from .backends import choose
from .check import check_floating, check_tensors
from .triton.config import INTERPRET

MAX_WIDTH = 8192  # of a norm in Triton, whose programs hold a row in registers: more would spill
MAX_ODD_WIDTH = 4096  # of one that is no multiple of 16, which needs more registers for addresses
MAX_HEAD_DIM = 512


def rms_norm(
    x: Tensor,  # (..., H)
    weight: Tensor,  # (H,)
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """(..., H) x / √(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467), in `dtype` or x's.

    backend  "triton" or "torch"; by default the device's. ValueError on wrong shapes, types and devices.
    """
    _check_floats({"x": x, "weight": weight})
    _check_shape("weight", weight, x.shape[-1:], f"the last dimension of x {tuple(x.shape)}")
    dtype = dtype or x.dtype
    if _use_triton(backend, dtype, x, weight):
        from .triton.rms_norm import RMSNorm

        _check_width("x", x, MAX_WIDTH, MAX_ODD_WIDTH)
        out: Tensor = RMSNorm.apply(x, None, weight, eps, dtype)
        return out
    return _normed(x, weight, eps).to(dtype)


def fused_add_rms_norm(
    x: Tensor,  # (..., H): what attention or the MLP adds
    residual: Tensor,  # (..., H)
    weight: Tensor,  # (H,)
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x), the sum in the residual's type.

    What is normed is the sum before it is rounded, as in vLLM's compiled models; only the backward of the
    Triton kernel takes the rounded one, which is all that is kept. The other arguments are `rms_norm`'s.
    """
    _check_floats({"x": x, "residual": residual, "weight": weight})
    _check_shape("residual", residual, x.shape, "x")
    _check_shape("weight", weight, x.shape[-1:], f"the last dimension of x {tuple(x.shape)}")
    dtype = dtype or x.dtype
    if _use_triton(backend, dtype, x, residual, weight):
        from .triton.rms_norm import RMSNorm

        _check_width("x", x, MAX_WIDTH, MAX_ODD_WIDTH)
        normed, total = RMSNorm.apply(x, residual, weight, eps, dtype)
        return normed, total
    total = _wide(x) + _wide(residual)
    return _normed(total, weight, eps).to(dtype), total.to(residual.dtype)


def fused_qk_norm_rope(
    q: Tensor,  # (..., query heads, D)
    k: Tensor,  # (..., key heads, D)
    cos: Tensor,  # (P, D/2), or (P, D) with the angles twice, as transformers has them
    sin: Tensor,  # as cos
    position_ids: Tensor | None = None,  # (...) rows of the tables; None: one row per token, in order
    *,
    q_weight: Tensor | None = None,  # (D,) of the RMSNorm of each query head; None, like k_weight: no norm
    k_weight: Tensor | None = None,  # (D,)
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k, each head normed by `rms_norm`, then rotated by its token's angles (RoPE, arXiv 2104.09864).

    In the layout of `rotate_half` (Llama, Qwen3): with halves a and b, (a cos − b sin, b cos + a sin). The
    results are contiguous, in `dtype` or q's. The tables get no gradient. `rms_norm` explains `backend`.
    """
    both = {"q_weight": q_weight, "k_weight": k_weight}
    norms = {name: x for name, x in both.items() if x is not None}
    if len(norms) == 1:
        raise ValueError(f"q_weight and k_weight go together: give both or neither, given {', '.join(norms)}")
    _check_floats({"q": q, "k": k, "cos": cos, "sin": sin} | norms)
    _check_rope(q, k, cos, sin, position_ids)
    for name, x in norms.items():
        _check_shape(name, x, q.shape[-1:], f"the last dimension of q {tuple(q.shape)}")
    cos, sin = (x.detach()[:, : q.shape[-1] // 2] for x in (cos, sin))
    dtype = dtype or q.dtype
    if _use_triton(backend, dtype, q, k, cos, sin, q_weight, k_weight):
        from .triton.rope import NormRoPE

        _check_width("q", q, MAX_HEAD_DIM, MAX_HEAD_DIM)
        rest = cos, sin, position_ids, eps, dtype
        return NormRoPE.apply(q, q_weight, *rest), NormRoPE.apply(k, k_weight, *rest)
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = (_wide(x).reshape(*q.shape[:-2], 1, x.shape[-1]) for x in (cos, sin))

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        a, b = (_wide(x) if weight is None else _normed(x, weight, eps)).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(dtype)

    return rotated(q, q_weight), rotated(k, k_weight)


def rope_tables(
    length: int, head_dim: int, theta: float = 10000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin), (length, head_dim/2) FP32 each: of the angles position · theta^(−2i/head_dim).

    In FP32, as transformers and vLLM compute them. Models with other angles (YaRN, Llama 3.1) need their own.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] / theta**powers
    return angles.cos(), angles.sin()


def swiglu(
    gate: Tensor,  # (..., F)
    up: Tensor,  # (..., F)
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """(..., F) silu(gate) · up = gate · σ(gate) · up (arXiv 2002.05202), in `dtype` or gate's.

    gate and up may be halves of one tensor. `rms_norm` explains `backend`.
    """
    _check_floats({"gate": gate, "up": up})
    _check_shape("up", up, gate.shape, "gate")
    dtype = dtype or gate.dtype
    if _use_triton(backend, dtype, gate, up):
        from .triton.swiglu import SwiGLU

        out: Tensor = SwiGLU.apply(gate, up, dtype)
        return out
    return (torch.nn.functional.silu(_wide(gate)) * _wide(up)).to(dtype)


def _wide(x: Tensor) -> Tensor:
    """x in the type in which it is computed with."""
    return x if x.dtype == torch.float64 else x.float()


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = _wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _use_triton(backend: str | None, dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """True if these inputs take the Triton kernels. ValueError if they should and cannot."""
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"backend is {backend!r}; expected 'triton', 'torch', or None")
    check_floating(dtype=dtype)
    x, *others = (tensor for tensor in tensors if tensor is not None)
    name, _ = choose(x, others[0], backend or ("triton" if x.is_cuda else "torch"))
    types = {dtype, x.dtype, *(tensor.dtype for tensor in others)} - {torch.float32, torch.bfloat16}
    if name == "triton" and types:
        raise ValueError(f"backend 'triton' takes FP32 and BF16, given {types.pop()}; 'torch' takes it")
    if name == "triton" and not (x.is_cuda or INTERPRET):
        raise ValueError(f"backend 'triton' was given tensors on {x.device}; expected CUDA tensors")
    return name == "triton"


def _check_floats(tensors: dict[str, Tensor]) -> None:
    """All are tensors of a floating type and of at least one dimension, on the device of the first."""
    check_tensors(tensors)
    check_floating(**{name: x.dtype for name, x in tensors.items()})
    for name, x in tensors.items():
        if not x.dim():
            raise ValueError(f"{name}: expected at least one dimension, given a number")


def _check_shape(name: str, x: Tensor, expected: torch.Size, reason: str) -> None:
    if x.shape != expected:
        raise ValueError(f"{name}: expected shape {tuple(expected)}, as {reason}, given {tuple(x.shape)}")


def _check_width(name: str, x: Tensor, limit: int, odd_limit: int) -> None:
    """ValueError if the last dimension is over the limit, which is another where 16 does not divide it."""
    width = x.shape[-1]
    if width > (odd_limit if width % 16 else limit):
        odd = f" ({odd_limit} if 16 does not divide it)" if odd_limit != limit else ""
        raise ValueError(
            f"{name}'s last dimension is {width}; expected at most {limit}{odd}, or backend='torch'"
        )


def _check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> None:
    if q.dim() < 2 or k.dim() != q.dim() or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"expected q (..., query heads, D) and k (..., key heads, D), given {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    tokens, width = q.shape[:-2], q.shape[-1]
    if width % 2:
        raise ValueError(f"q's last dimension is {width}; expected an even number: RoPE rotates pairs")
    if cos.dim() != 2 or cos.shape[1] not in (width // 2, width):
        raise ValueError(f"cos: expected shape (P, {width // 2}) or (P, {width}), given {tuple(cos.shape)}")
    _check_shape("sin", sin, cos.shape, "cos")
    if position_ids is None:
        if len(cos) != tokens.numel():
            raise ValueError(
                f"cos has {len(cos)} rows; expected one per token, {tokens.numel()}, or position_ids"
            )
        return
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"position_ids: expected int64 or int32, given {position_ids.dtype}")
    _check_shape("position_ids", position_ids, tokens, f"the tokens of q {tuple(q.shape)}")
    if position_ids.device != q.device:
        raise ValueError(f"position_ids is on {position_ids.device}, q on {q.device}; put both on one device")
    if position_ids.device.type == "cpu" and position_ids.numel():  # on a GPU the host would have to wait
        low, high = (int(x) for x in position_ids.aminmax())
        if low < 0 or high >= len(cos):
            raise ValueError(f"position_ids hold {low} to {high}; expected 0 to {len(cos) - 1}, rows of cos")
