"""The body's fused ops beside what transformers computes in their place, as a pytest-benchmark suite.

  pytest bench/kernels/bench_body.py --benchmark-only    8,192 tokens of Qwen3-4B on CUDA, 512 of 0.6B on CPU

Forward and backward. On a CPU ours is plain torch (docs/kernels.md). `bytes` in each record is what one pass
forward and one backward must move: bytes over the time is to be held against the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import fused_add_rms_norm, fused_qk_norm_rope, rms_norm, rope_tables, swiglu


class Shape(NamedTuple):
    """Tokens, and the sizes of a layer."""

    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


SHAPES = {"cpu": Shape(512, 1024, 16, 8, 128, 3072), "cuda": Shape(8192, 2560, 32, 8, 128, 9728)}
SMALL = Shape(4, 16, 3, 1, 8, 24)  # where benchmarks are off
Op = Callable[..., Tensor | tuple[Tensor, ...]]


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Qwen3RMSNorm of transformers."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same after the residual's sum."""
    total = residual + x
    return eager_norm(total, weight), total


def eager_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, ...]:
    """q_norm, k_norm and apply_rotary_pos_emb of transformers."""
    cos, sin = (torch.cat([x, x], -1)[positions][:, None].to(q.dtype) for x in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return rotated(eager_norm(q, q_weight)), rotated(eager_norm(k, k_weight))


def our_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, ...]:
    """The same by one call."""
    return fused_qk_norm_rope(q, k, cos, sin, positions, q_weight=q_weight, k_weight=k_weight)


OPS: dict[str, dict[str, Op]] = {
    "rms_norm": {"ours": rms_norm, "eager": eager_norm},
    "fused_add_rms_norm": {"ours": fused_add_rms_norm, "eager": eager_add_norm},
    "fused_qk_norm_rope": {"ours": our_rope, "eager": eager_rope},
    "swiglu": {"ours": swiglu, "eager": lambda gate, up: F.silu(gate) * up},
}


def arguments(op: str, s: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random inputs of an op, those with a gradient first."""

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    if op == "swiglu":
        return [new(s.tokens, s.intermediate), new(s.tokens, s.intermediate)]
    if op == "fused_qk_norm_rope":
        heads = [new(s.tokens, n, s.head_dim) for n in (s.heads, s.kv_heads)]
        positions = torch.arange(s.tokens, device=device)
        return [
            *heads, new(s.head_dim), new(s.head_dim),
            *rope_tables(s.tokens, s.head_dim, 1e6, device), positions,
        ]  # fmt: skip
    streams = 1 if op == "rms_norm" else 2
    return [*(new(s.tokens, s.hidden) for _ in range(streams)), new(s.hidden)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch.")
)
@pytest.mark.parametrize("provider", ["ours", "eager"])
@pytest.mark.parametrize("op", OPS)
def test_body_op(benchmark: Any, op: str, provider: str, dtype: torch.dtype, device: str) -> None:
    """Forward and backward of one op by one provider."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = SHAPES[device] if benchmark.enabled else SMALL
    given = arguments(op, shape, dtype, device)
    leaves = [x for x in given if x.requires_grad]
    call = OPS[op][provider]

    def forward() -> tuple[Tensor, ...]:
        out = call(*given)
        return (out,) if isinstance(out, Tensor) else out

    upstream = [torch.randn_like(x) for x in forward()]

    def step() -> None:
        torch.autograd.grad(forward(), leaves, upstream)
        if device == "cuda":
            torch.cuda.synchronize()

    moved = sum(x.nbytes for x in [*given, *upstream, *given, *upstream, *leaves])  # forward; backward
    benchmark.extra_info |= {"shape": shape._asdict(), "device": device, "bytes": moved}
    benchmark.pedantic(step, rounds=20 if device == "cuda" else 5, warmup_rounds=1)
