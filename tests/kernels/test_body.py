"""The fused ops of the body, in plain torch and in Triton's interpreter, against float64 and autograd."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import backends, body, fused_add_rms_norm, fused_qk_norm_rope, rms_norm, rope_tables, swiglu
from kernels.triton import config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ["torch"] + ["triton"] * (config.INTERPRET and backends.backend_info()["triton"]["available"])
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
FP32, BF16, EPS = torch.float32, torch.bfloat16, 1e-6
BOUND = 1e-6  # relative, of FP32 results
Op = Callable[..., Tensor | tuple[Tensor, ...]]


def check(op: Op, tensors: list[Tensor], exact: Op, backend: str) -> list[Tensor]:
    """Outputs and gradients of op against those of exact in float64; they are returned, outputs first."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    found, expected = as_tuple(op(*leaves, backend=backend)), as_tuple(exact(*doubles))
    expected = tuple(x + 0 * sum(y.sum() for y in doubles) for x in expected)  # every gradient exists
    torch.manual_seed(0)
    upstream = [torch.randn_like(x) for x in found]
    found += torch.autograd.grad(found, leaves, upstream)
    expected += torch.autograd.grad(expected, doubles, [x.double() for x in upstream])
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == y.shape
        x, y = x.detach(), y.detach()
        error = (x.double() - y).abs()
        if x.dtype == FP32:
            assert float(error.norm()) <= BOUND * float(y.norm()), number
        else:  # the nearest bf16 number, or its neighbour where FP32 rounding decides between the two
            assert bool((error <= 2.0**-8 * (1 + 1e-4) * y.abs() + BOUND * y.abs().max()).all()), number
    return list(found)


def as_tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as its paper has it, in the type of x."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """transformers' x cos + rotate_half(x) sin, for angles (..., D/2)."""
    both = torch.cat([angles, angles], -1)[..., None, :]
    a, b = x.chunk(2, -1)
    return x * both.cos() + torch.cat([-b, a], -1) * both.sin()


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@on_each_backend
@pytest.mark.parametrize("x_type", [FP32, BF16])
@pytest.mark.parametrize("weight_type", [FP32, BF16])
def test_rms_norm_and_its_gradients_are_float64s(
    backend: str, x_type: torch.dtype, weight_type: torch.dtype
) -> None:
    weight = 1 + 0.3 * randn(320)
    for rows, dtype in ((1, None), (7, FP32), (7, BF16)):
        out, *_ = check(
            lambda x, w, dtype=dtype, **o: rms_norm(x, w, EPS, dtype=dtype, **o),
            [3 * randn(rows, 320, dtype=x_type), weight.to(weight_type)],
            normed,
            backend,
        )
        assert out.dtype == (dtype or x_type)


@on_each_backend
@pytest.mark.parametrize("x_type", [FP32, BF16])
@pytest.mark.parametrize("residual_type", [FP32, BF16])
def test_the_norm_of_the_sum_and_the_new_residual_are_float64s(
    backend: str, x_type: torch.dtype, residual_type: torch.dtype
) -> None:
    x, residual = randn(2, 3, 48, dtype=x_type), randn(2, 3, 48, dtype=residual_type, seed=1)
    stored = (x.double() + residual.double()).to(residual_type)

    def exact(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        out = normed(total, weight)
        total = total + (stored.double() - total).detach()
        if backend == "triton":  # its gradient is that at the sum as it is stored
            at_stored = normed(total, weight)
            out = at_stored + (out - at_stored).detach()
        return out, total

    out, total, *_ = check(
        lambda x, r, w, **o: fused_add_rms_norm(x, r, w, EPS, dtype=BF16, **o),
        [x, residual, 1 + 0.3 * randn(48)],
        exact,
        backend,
    )
    assert out.dtype == BF16 and torch.equal(total, stored)


@on_each_backend
@pytest.mark.parametrize("of", [0, 1], ids=["norm", "sum"])
def test_either_result_of_the_norm_of_the_sum_may_be_left_out_of_the_loss(backend: str, of: int) -> None:
    x, residual, weight = randn(5, 16), randn(5, 16, seed=1), randn(16, seed=2)

    def op(x: Tensor, residual: Tensor, **options: Any) -> Tensor:
        return fused_add_rms_norm(x, residual, weight, EPS, **options)[of]

    check(op, [x, residual], lambda x, r: (normed(x + r, weight.double()), x + r)[of], backend)


ROPE = [((1,), 1, 1, 4), ((5,), 7, 1, 64), ((2, 3), 4, 2, 24), ((9,), 3, 3, 80)]


@on_each_backend
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "width"), ROPE, ids=str)
def test_normed_and_rotated_queries_and_keys_are_float64s(
    backend: str, dtype: torch.dtype, norm: bool, tokens: tuple[int, ...], heads: int, kv_heads: int,
    width: int,
) -> None:  # fmt: skip
    q, k = 2 * randn(*tokens, heads, width, dtype=dtype), randn(*tokens, kv_heads, width, dtype=dtype, seed=1)
    count = q.shape[:-2].numel()
    positions = torch.randint(50, (count,), generator=torch.Generator().manual_seed(2)).view(tokens)
    cos, sin = rope_tables(50, width)
    angles = torch.atan2(sin.double(), cos.double())[positions]
    weights = [1 + 0.3 * randn(width, seed=3), 1 + 0.3 * randn(width, seed=4)] if norm else []

    def exact(q: Tensor, k: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        return tuple(apply_rope(normed(x, w[i]) if w else x, angles) for i, x in enumerate((q, k)))

    by_token = [torch.cat([x, x], -1)[positions].view(-1, width) for x in (cos, sin)]  # transformers' form
    for tables in ((cos, sin, positions.int()), (*by_token, None)):

        def op(q: Tensor, k: Tensor, *w: Tensor, **options: Any) -> tuple[Tensor, ...]:
            options |= dict(zip(("q_weight", "k_weight"), w, strict=False))
            return fused_qk_norm_rope(q, k, *tables, **options)  # noqa: B023

        out = check(op, [q, k, *weights], exact, backend)
        assert [x.dtype for x in out] == [dtype] * 4 + [FP32] * len(weights)


@on_each_backend
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (2, 2, 1100)], ids=str)
def test_swiglu_and_its_gradients_are_float64s(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    inputs = [3 * randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)]
    check(swiglu, inputs, lambda gate, up: gate * torch.sigmoid(gate) * up, backend)


@on_each_backend
def test_gates_far_from_zero_give_zero_or_the_gate(backend: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30], requires_grad=True)
    out = swiglu(gate, torch.ones(7), backend=backend)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30]))
    (slope,) = torch.autograd.grad(out.sum(), gate)
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]))


@on_each_backend
def test_tensors_need_not_be_contiguous(backend: str) -> None:
    packed = randn(6, 2, 96)  # such as one GEMM's output for q, k and v, or for gate and up
    x, w = packed[:, 0, :40], randn(80, seed=1)[::2]
    apart = randn(40, 6, seed=2).t()  # a row's elements are apart
    cos, sin = (t.t().contiguous().t() for t in rope_tables(6, 8))
    q, k = packed[:, 0, :32].view(6, 4, 8), packed[:, 1, 40:72].view(6, 4, 8).transpose(1, 2)[:, :, :4].mT
    rotate = partial(fused_qk_norm_rope, cos=cos, sin=sin, backend=backend)
    calls: list[Callable[..., Any]] = [
        lambda x, a, w, q, k: rms_norm(x, w, backend=backend),
        lambda x, a, w, q, k: fused_add_rms_norm(a, x, w, backend=backend),
        lambda x, a, w, q, k: swiglu(x, a, backend=backend),
        lambda x, a, w, q, k: rotate(q, k, q_weight=w[:8], k_weight=w[8:16]),
    ]
    for call in calls:
        results = []
        for copy in (False, True):
            given = [t.contiguous() if copy else t for t in (x, apart, w, q, k)]
            given = [t.detach().requires_grad_() for t in given]
            out = as_tuple(call(*given))
            upstream = [torch.ones(()).expand(t.shape) for t in out]  # strides of 0
            used = torch.autograd.grad(out, given, upstream, allow_unused=True)
            results.append([*out, *(t for t in used if t is not None)])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@on_each_backend
def test_no_rows_give_no_rows_and_gradients_of_zero(backend: str) -> None:
    x, w = torch.empty(0, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    q, k = torch.empty(0, 3, 16), torch.empty(0, 1, 16)
    cos, sin = rope_tables(0, 16)
    out = [
        rms_norm(x, w, backend=backend),
        *fused_add_rms_norm(x, x, w, backend=backend),
        swiglu(x, x, backend=backend),
        *fused_qk_norm_rope(q, k, cos, sin, q_weight=w, k_weight=w, backend=backend),
    ]
    assert [len(t) for t in out] == [0] * 6
    torch.stack([t.sum() for t in out]).sum().backward()
    assert w.grad is not None and torch.equal(w.grad, torch.zeros(16))


@on_each_backend
def test_two_runs_give_the_same_bits(backend: str) -> None:
    x, w, dy = randn(37, 96), randn(96), randn(37, 96, seed=1)

    def gradients() -> tuple[Tensor, ...]:
        given = [t.clone().requires_grad_() for t in (x, x + 1, w)]
        return torch.autograd.grad(fused_add_rms_norm(*given, backend=backend), given, [dy, dy])  # type: ignore[misc]

    assert all(torch.equal(*pair) for pair in zip(gradients(), gradients(), strict=True))


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton's interpreter is not on: see tests/gpu")
def test_a_second_derivative_is_an_error() -> None:
    x, dy = randn(3, 16).requires_grad_(), torch.ones(3, 16, requires_grad=True)
    (slope,) = torch.autograd.grad(swiglu(x, x, backend="triton"), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton's interpreter is not on: see tests/gpu")
def test_a_position_outside_the_tables_gives_nan_where_it_cannot_be_checked() -> None:
    """The kernel itself: on a CPU `fused_qk_norm_rope` refuses the position."""
    from kernels.triton import rope

    q, positions = randn(3, 2, 8).requires_grad_(), torch.tensor([0, 4, -1])
    out = rope.NormRoPE.apply(q, None, *rope_tables(4, 8), positions, EPS, FP32)
    out.sum().backward()
    assert q.grad is not None
    for x in (out.detach(), q.grad):
        assert bool(x[0].isfinite().all()) and bool(x[1:].isnan().all())


def test_other_float_types_take_torch() -> None:
    for dtype in (torch.float16, torch.float64):
        x = randn(3, 16, dtype=dtype)
        assert rms_norm(x, x[0]).dtype == dtype
        with pytest.raises(ValueError, match=r"FP32.* BF16.*, given torch\.float"):
            rms_norm(x, x[0].float(), dtype=torch.float32, backend="triton")
    if "triton" in BACKENDS:
        with pytest.raises(ValueError, match=r"'triton' takes FP32 and BF16, given torch.float16; 'torch'"):
            swiglu(x.float(), x.float(), dtype=torch.float16, backend="triton")


Q, K, TABLE = randn(5, 3, 8), randn(5, 1, 8), randn(9, 4)
ROTATE = fused_qk_norm_rope
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: rms_norm(Q, randn(3)), "weight: expected shape (8,), as the last dimension of x (5, 3, 8)"),
    (lambda: rms_norm(Q.long(), Q[0, 0]), "x: expected a floating type, given torch.int64"),
    (lambda: rms_norm(3.0, Q), "x: expected a tensor, given float"),  # type: ignore[arg-type]
    (lambda: rms_norm(torch.ones(()), Q), "x: expected at least one dimension"),
    (lambda: rms_norm(Q, Q[0, 0].to("meta")), "weight is on meta, x on cpu; put both on one device"),
    (lambda: rms_norm(Q, Q[0, 0], dtype=torch.int8), "dtype: expected a floating type, given torch.int8"),
    (lambda: rms_norm(Q, Q[0, 0], backend="cpu"), "backend is 'cpu'; expected 'triton', 'torch', or None"),
    (lambda: fused_add_rms_norm(Q, K, Q[0, 0]), "residual: expected shape (5, 3, 8), as x, given (5, 1, 8)"),
    (lambda: swiglu(Q, K), "up: expected shape (5, 3, 8), as gate, given (5, 1, 8)"),
    (lambda: ROTATE(Q, K[:4], TABLE, TABLE), "expected q (..., query heads, D) and k"),
    (lambda: ROTATE(Q[..., :7], K[..., :7], TABLE, TABLE), "q's last dimension is 7; expected an even"),
    (lambda: ROTATE(Q, K, TABLE[:, :3], TABLE), "cos: expected shape (P, 4) or (P, 8), given (9, 3)"),
    (lambda: ROTATE(Q, K, TABLE, TABLE[:5]), "sin: expected shape (9, 4), as cos, given (5, 4)"),
    (lambda: ROTATE(Q, K, TABLE, TABLE), "cos has 9 rows; expected one per token, 5, or position_ids"),
    (
        lambda: ROTATE(Q, K, TABLE, TABLE, torch.arange(4)),
        "position_ids: expected shape (5,), as the tokens of q (5, 3, 8), given (4,)",
    ),
    (lambda: ROTATE(Q, K, TABLE, TABLE, torch.ones(5)), "position_ids: expected int64 or int32"),
    (
        lambda: ROTATE(Q, K, TABLE, TABLE, torch.arange(5) + 5),
        "position_ids hold 5 to 9; expected 0 to 8, rows of cos",
    ),
    (
        lambda: ROTATE(Q, K, TABLE[:5], TABLE[:5], q_weight=Q[0, 0]),
        "q_weight and k_weight go together: give both or neither, given q_weight",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_inputs_are_one_clear_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton's interpreter is not on: see tests/gpu")
def test_rows_too_wide_for_a_program_are_refused() -> None:
    for width in (4097, 8208):
        wide = torch.ones(1, width)
        says = rf"x's last dimension is {width}; expected at most 8192 \(4096 if"
        with pytest.raises(ValueError, match=says):
            rms_norm(wide, wide[0], backend="triton")
    q, says = torch.ones(1, 1, 528), "q's last dimension is 528; expected at most 512, or backend='torch'"
    with pytest.raises(ValueError, match=says):
        fused_qk_norm_rope(q, q, *rope_tables(1, 528), backend="triton")


def test_the_kernels_are_never_exchanged_for_torch_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(2, 4)
    monkeypatch.setattr(body, "INTERPRET", False)
    monkeypatch.setattr(backends, "unavailable", lambda name: "")
    with pytest.raises(ValueError, match="backend 'triton' was given tensors on cpu; expected CUDA tensors"):
        swiglu(x, x, backend="triton")
    monkeypatch.setattr(backends, "unavailable", lambda name: "Triton is not installed; pip install triton")
    with pytest.raises(ValueError, match="backend 'triton' cannot be used: Triton is not installed"):
        swiglu(x, x, backend="triton")
