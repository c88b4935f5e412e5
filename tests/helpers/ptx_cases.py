"""Calls of the row and body kernels with their results' errors, in bounds, against float64."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.objectives import OBJECTIVES

Case = Callable[[], float]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(x: Tensor, exact: Tensor) -> float:
    """Largest error in bounds: 1e-5 of the largest result in FP32, or the rounding of 16 bits as well."""
    precision = {FP32: 0.0, BF16: 2.0**-8, FP16: 2.0**-11}[x.dtype]
    bound = 1e-5 * exact.abs().max().clamp(min=1e-6) + precision * (1 + 1e-3) * exact.abs()
    worst = ((x.double() - exact).abs() / bound).nan_to_num(torch.inf)
    return float(worst.max())


def logits(rows: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits as the op pads them, targets, inverse temperatures); the last target is another shard's."""
    z = (3 * randn(rows, -(-vocabulary // 16) * 16))[:, :vocabulary]
    y = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    y[-1] = vocabulary + 3
    return z, y, 0.5 + torch.arange(rows) / rows


def scaled(z: Tensor, scale: Tensor, cap: float) -> Tensor:
    z = z.double()
    return (cap * (z / cap).tanh() if cap else z) * scale[:, None].double()


def stats_error(stats: Tensor, u: Tensor, y: Tensor, anchor: Tensor) -> float:
    """The error of (4, rows) statistics of scaled logits u, for this anchor."""
    at_target = torch.arange(u.shape[1]) == y[:, None]
    v = u - anchor[:, None].double()
    exp = torch.where(at_target, 0.0, v.exp())
    exact = [anchor.double(), exp.sum(1), (u * at_target).sum(1), (exp * v).sum(1)]
    return max(error(found, x) for found, x in zip(stats, exact, strict=True))


def row_stats(rows: int, vocabulary: int, block: int, warps: int, cap: float) -> float:
    from kernels.triton import rows as kernel

    z, y, scale = logits(rows, vocabulary)
    u = scaled(z, scale, cap)
    stats = kernel.row_stats(z, y, scale, cap, kernel.RowConfig(block, warps))
    return stats_error(stats, u, y, u.max(1).values)


def row_grads(dtype: torch.dtype, cap: float, bonus: bool, config: tuple[int, int, int]) -> float:
    """Gradients in place of the logits of two rows."""
    from kernels.rows import Gradient
    from kernels.triton import rows as kernel

    vocabulary, block, warps = config
    z, y, scale = logits(2, vocabulary)
    u = scaled(z, scale, cap)
    anchor, (a, b, k, dz_y) = u.max(1).values.float(), (1 + 0.5 * randn(4, 2)).unbind()
    v = u - anchor[:, None].double()
    exact = v.exp() * (a[:, None] + (b[:, None] * (v + k[:, None]) if bonus else 0.0))
    exact = torch.where(torch.arange(vocabulary) == y[:, None], dz_y[:, None].double(), exact)
    if cap:
        exact *= 1 - (z.double() / cap).tanh() ** 2
    g = Gradient(anchor, a, b if bonus else None, k if bonus else None, dz_y)
    return error(kernel.row_grads(z, y, scale, cap, g, dtype, kernel.RowConfig(block, warps)), exact)


def single_pass(raised: bool, config: tuple[int, int, int]) -> float:
    """Two rows in place, the second without a target; if raised, each tile has a logit far above the last."""
    from kernels.triton import rows as kernel

    vocabulary, block, warps = config
    z, y, scale = logits(2, vocabulary)
    y[0] = vocabulary - 20  # in the last tile, and another thread stores it than stores −others there
    z[0, y[0]] = -5 / scale[0]
    if raised:
        z[:, block + 3], z[:, -1] = 38 / scale, 80 / scale
    u = scaled(z, scale, 0.0)
    exp, stats = kernel.single_pass(z, y, scale, torch.tensor([-2.0, -1.0]), kernel.RowConfig(block, warps))
    exact = (u - stats[0].double()[:, None]).exp()
    exact[0, y[0]] -= exact[0].sum()
    relative = (exp.double() - exact).abs() / (2.0**-8 * (3 if raised else 1.001) * exact.abs() + 1e-38)
    first = u[1, :block].max()
    anchor = (
        torch.tensor([-3.0, first]) if not raised else torch.tensor([80.0, 80.0 if first < 40 else first])
    )
    return max(float(relative.max()), error(stats[0], anchor.double()), stats_error(stats, u, y, stats[0]))


def terms(objective: str, bonus: float, kl: float) -> float:
    """The terms of 300 rows, the last 44 of them in a second program."""
    from kernels import KL
    from kernels.rows import gradient, softmax
    from kernels.settings import Settings
    from kernels.tokens import Tokens
    from kernels.triton import terms as kernel

    rows, settings = 300, Settings(OBJECTIVES[objective].make(), KL(kl, "k3") if kl else None, bonus)
    torch.manual_seed(0)
    anchor, others = 9 * torch.randn(rows), torch.rand(rows) * torch.logspace(-9, 3, rows)
    target = anchor - torch.rand(rows) * torch.logspace(-3, 1.2, rows).flip(0)
    stats = torch.stack([anchor, others, target, -others * torch.rand(rows) * 5])
    probs = softmax(stats.double())
    gen, reference = (probs.logp.float() + x * torch.randn(rows) for x in (0.5, 0.3))
    weights, scale = torch.rand(rows) * (torch.rand(rows) > 0.2), 0.5 + torch.rand(rows)
    t = Tokens(torch.zeros(rows).long(), gen, torch.randn(rows), weights, scale, reference, None)
    values = [torch.zeros(rows) for _ in range(5)]
    g, sums = kernel.terms(stats, t, settings, values)

    term = settings.objective(probs.logp, gen.double(), t.advantages.double())
    log_ratio = probs.logp - reference
    estimate = torch.expm1(-log_ratio) + log_ratio if kl else torch.zeros(rows).double()
    loss = weights * (term.loss - bonus * probs.entropy + kl * estimate)
    c = weights * (term.dloss_dlogp - kl * torch.expm1(-log_ratio))
    exact = gradient(probs, c, -bonus * weights.double() if bonus else None, scale.double())
    pairs = [(g.a, exact.a), (g.dz_y, exact.dz_y), (sums.sum()[None], loss.sum()[None])]
    pairs += zip(
        values, [probs.logp, probs.entropy, term.ratio, term.truncated.double(), estimate], strict=True
    )
    if bonus:
        pairs += [(g.b, exact.b), (g.k, exact.k)]
    return max(error(*pair) for pair in pairs)


def split(parts: int, dtype: torch.dtype) -> float:
    """The parts add up to the numbers that were split: to 16 bits or 22 of two parts, exactly of three."""
    from kernels.triton.split import split_16

    x = randn(3, 1300)
    out = split_16(x, parts, dtype).double().view(3, parts, 1300).sum(1)
    bound = {(3, BF16): 1e-30, (2, BF16): 2.0**-16, (2, FP16): 2.0**-22}[parts, dtype]
    return float(((out - x).abs() / (bound * (x.abs() + (0.125 if dtype == FP16 else 0)))).max())


def scaled_in_place(dtype: torch.dtype, factor: float) -> float:
    """All blocks by one program; a factor of 1 changes no bit."""
    from kernels.triton import scale

    d = randn(3, 1500, dtype=dtype)
    exact = d.double() * float(torch.tensor(factor))
    with patch.object(scale, "PROGRAMS", 1):
        scale.scale_(d, torch.tensor(factor))
    return error(d, exact) if factor != 1 else float(not torch.equal(d.double(), exact))


def body(op: Any, tensors: list[Tensor], exact: Any) -> float:
    """Outputs and gradients of an op of the body, for upstream gradients at random."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    doubles = [x.double().requires_grad_() for x in tensors]
    outputs, expected = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (op(*leaves), exact(*doubles)))
    upstream = [randn(*x.shape, dtype=x.dtype, seed=5) for x in outputs]
    pairs = [
        *zip(outputs, expected, strict=True),
        *zip(
            torch.autograd.grad(outputs, leaves, upstream),
            torch.autograd.grad(expected, doubles, [x.double() for x in upstream]),
            strict=True,
        ),
    ]
    return max(error(x.detach(), y.detach()) for x, y in pairs)


def norm(rows: int, width: int, x: torch.dtype, residual: torch.dtype | None, dtype: torch.dtype) -> float:
    from kernels.triton.rms_norm import RMSNorm

    def exact(x: Tensor, w: Tensor, r: Tensor | None = None) -> Any:
        total = x if r is None else x + r
        y = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
        return y if r is None else (y, total)

    tensors = [2 * randn(rows, width, dtype=x), 1 + 0.3 * randn(width, seed=1)]
    if residual is not None:
        tensors.append(randn(rows, width, dtype=residual, seed=2))
    return body(lambda x, w, r=None: RMSNorm.apply(x, r, w, 1e-6, dtype), tensors, exact)


def rope(tokens: int, heads: int, width: int, x: torch.dtype, normed: bool) -> float:
    from kernels import rope_tables
    from kernels.triton.rope import NormRoPE

    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(2))
    cos, sin = rope_tables(50, width)
    c, s = (t[positions][:, None].double() for t in (cos, sin))

    def exact(x: Tensor, w: Tensor | None = None) -> Tensor:
        if w is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    tensors = [randn(tokens, heads, width, dtype=x)] + [1 + 0.3 * randn(width, seed=1)] * normed
    return body(lambda x, w=None: NormRoPE.apply(x, w, cos, sin, positions, 1e-6, BF16), tensors, exact)


def gated(rows: int, width: int, dtype: torch.dtype) -> float:
    from kernels.triton.swiglu import SwiGLU

    tensors = [3 * randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype, seed=1)]
    return body(lambda g, u: SwiGLU.apply(g, u, dtype), tensors, lambda g, u: g * torch.sigmoid(g) * u)


SMALL, TAIL, SHIPPED = (1100, 512, 4), (300, 512, 4), (9001, 4096, 8)
"""Vocabulary, tile and warps of row kernels: whole tiles and a part of one, a part alone, what is shipped."""


# On one multiprocessor some programs of the backward take two rows, or tiles of rows.
NORMS = [
    (5, 1100, BF16, None, BF16), (5, 1104, BF16, FP32, BF16), (17, 3, FP32, None, FP32),
    (2, 8192, BF16, FP32, BF16),
]  # fmt: skip
ROPES = [(22, 3, 128, BF16, True), (4, 3, 512, FP32, True), (513, 1, 2, BF16, False)]


def cases() -> dict[str, Case]:
    """All cases by name."""
    found: dict[str, Case] = {
        "row_stats": partial(row_stats, 2, 1100, 512, 4, 0.0),
        "row_stats cap": partial(row_stats, 2, 1100, 512, 2, 30.0),
        "row_stats shipped": partial(row_stats, 2, 9001, 4096, 8, 0.0),
        "single_pass": partial(single_pass, False, SMALL),
        "single_pass raised": partial(single_pass, True, SMALL),
        "single_pass shipped": partial(single_pass, True, SHIPPED),
    }
    for dtype, name in ((BF16, "bf16"), (FP16, "fp16"), (FP32, "fp32")):
        found[f"row_grads {name}"] = partial(row_grads, dtype, 0.0, True, SMALL)
        found[f"row_grads tail {name}"] = partial(row_grads, dtype, 0.0, True, TAIL)
    found["row_grads cap"] = partial(row_grads, BF16, 30.0, False, SMALL)
    found["row_grads tail cap"] = partial(row_grads, BF16, 30.0, False, TAIL)
    found["row_grads shipped tail"] = partial(row_grads, BF16, 0.0, False, (3001, 4096, 8))
    found["row_grads shipped"] = partial(row_grads, BF16, 0.0, False, SHIPPED)
    for objective in {entry.triton: name for name, entry in OBJECTIVES.items() if entry.triton}.values():
        found[f"terms {objective}"] = partial(terms, objective, 0.02, 0.1)
    found["terms plain"] = partial(terms, "cispo", 0.0, 0.0)
    for parts, dtype in ((2, BF16), (3, BF16), (2, FP16)):
        found[f"split {parts} {dtype}"] = partial(split, parts, dtype)
    for factor, dtype in ((0.3, BF16), (0.3, FP32), (1.0, BF16)):
        found[f"scale {factor} {dtype}"] = partial(scaled_in_place, dtype, factor)
    for arguments in NORMS:
        found[f"norm {arguments}"] = partial(norm, *arguments)
    for arguments in ROPES:
        found[f"rope {arguments}"] = partial(rope, *arguments)
    for arguments in [(2, 1100, BF16), (1, 1, FP32)]:
        found[f"swiglu {arguments}"] = partial(gated, *arguments)
    return found
