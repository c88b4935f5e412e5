"""What neither the interpreter nor the compiler can show, on a GPU: races, tensor cores, large sizes.

Needs torch, Triton, NumPy and pytest only. Oracles are computed in float64 on the GPU.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import linear_logprob, policy_loss
from kernels.rows import Gradient, softmax
from kernels.triton import backend, config, fused, rows

if not torch.cuda.is_available():  # after the imports, so that a renamed module is noticed without a GPU
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.skipif(config.INTERPRET, reason="TRITON_INTERPRET=1: kernels run on the CPU")
V, H, N = 151936, 4096, 384


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


def problem(
    n: int = N, width: int = H, vocabulary: int = V, std: float = 3.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bf16 hidden and weight whose logits have this standard deviation; targets as the model draws them."""
    h = torch.randn(n, width).bfloat16()
    weight = (torch.randn(vocabulary, width) * std * width**-0.5).bfloat16()
    draws = [torch.distributions.Categorical(logits=(x @ weight.T).float()).sample() for x in h.split(256)]
    return h, weight, torch.cat(draws), torch.ones(n)


def exact_log_probs(z: Tensor, y: Tensor) -> Tensor:
    """float64, rows at a time."""
    return torch.cat([
        torch.log_softmax(x.double(), 1).gather(1, t[:, None])[:, 0]
        for x, t in zip(z.split(128), y.split(128), strict=True)
    ])  # fmt: skip


def exact_logits(h: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([h.double() @ w.double().T for w in weight.split(16384)], 1)


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("std", [3.0, 10.0])
def test_log_probs_err_no_more_than_the_bare_gemm(std: float) -> None:
    h, weight, y, one = problem(std=std)
    exact = exact_log_probs(exact_logits(h, weight), y)
    z = torch.mm(h, weight.T, out_dtype=torch.float32)
    bar = float((exact_log_probs(z, y) - exact).abs().max())
    lp = exact.float()
    found = {
        "two-pass": rows.row_stats(z, y, one, 0.0),
        "score": fused.score(h, weight, y, one, 0.0),
        "fused score": fused.fused_score(h, weight, y, one, 0.0),
        "single-pass": rows.single_pass(z.clone(), y, one, lp)[1],
        "fused-epilogue": fused.fused_epilogue(h, weight, y, one, lp)[1],
    }
    errors = {name: float((softmax(stats).logp - exact).abs().max()) for name, stats in found.items()}
    print(f"std {std}: mm(out_dtype) with a float64 epilogue {bar:.2e}", errors)
    assert max(errors.values()) <= max(1.5 * bar, 2e-6)


@pytest.mark.parametrize("vocabulary", [151936, 128257, 4099])
@pytest.mark.parametrize("bonus", [False, True])
def test_gradients_in_place_are_the_rounded_ones_every_time(vocabulary: int, bonus: bool) -> None:
    z, y, one = torch.randn(512, vocabulary) * 3, torch.randint(vocabulary, (512,)), torch.ones(512)
    a, b, k, dz_y = torch.randn(4, 512)
    m = rows.row_stats(z, y, one, 0.0)[0]
    g = Gradient(m, a, b if bonus else None, k if bonus else None, dz_y)
    exact = rows.row_grads(z.clone(), y, one, 30.0, g, torch.float32)
    for dtype in (torch.bfloat16, torch.float16) * 5:
        assert torch.equal(rows.row_grads(z.clone(), y, one, 30.0, g, dtype), exact.to(dtype))


@pytest.mark.parametrize("width", [4096, 1001])
def test_bits_do_not_depend_on_the_batch(width: int) -> None:
    h, weight, y, one = problem(300, width, 50304)
    lp, z = -torch.rand(300), torch.empty(300, 50304)
    whole = fused.score(h, weight, y, one, 0.0)
    exp, stats = fused.fused_epilogue(h, weight, y, one, lp)
    fused.logits(h, weight, z)
    order = torch.randperm(300)
    assert torch.equal(fused.score(h[order], weight, y[order], one, 0.0), whole[:, order])
    for n in (*range(1, 18), 127, 128, 129, 257):
        part = torch.empty(n, 50304)
        fused.logits(h[:n], weight, part)
        assert torch.equal(part, z[:n])
        assert torch.equal(fused.score(h[:n], weight, y[:n], one[:n], 0.0), whole[:, :n])
        found = fused.fused_epilogue(h[:n], weight, y[:n], one[:n], lp[:n])
        assert torch.equal(found[0], exp[:n]) and torch.equal(found[1], stats[:, :n])


def test_logits_of_integers_are_exact() -> None:
    for shape in ((200, 4096, 50304), (77, 1001, 5003)):
        h, weight = (torch.randint(-4, 5, (n, shape[1])).bfloat16() for n in (shape[0], shape[2]))
        exact = exact_logits(h, weight)
        for logits in (fused.logits, backend.logits):
            z = torch.full((shape[0], shape[2]), torch.nan)
            logits(h, weight, z)
            assert torch.equal(z.double(), exact)


@pytest.mark.parametrize("kernel", ["two-pass", "single-pass", "fused-epilogue", "exact"])
def test_the_losss_gradients_are_float64s(kernel: str) -> None:
    h, weight, y, _ = problem(1024, 1024, 50257)
    advantages, token_weights = torch.randn(1024), torch.full((1024,), 1 / 1024)
    z = exact_logits(h, weight)
    logp = exact_log_probs(z, y)
    logprobs_gen = (logp + 0.1 * torch.randn(1024)).float()
    h.requires_grad_(), weight.requires_grad_()
    mode: dict[str, Any] = {"exact": True} if kernel == "exact" else {"row_kernel": kernel}
    grads = []
    for _ in range(2):
        out = policy_loss(
            h, weight, y, logprobs_gen=logprobs_gen, advantages=advantages, token_weights=token_weights,
            chunk_rows=256, **mode,
        )  # fmt: skip
        grads.append(torch.autograd.grad(out.loss, (h, weight)))
    assert all(torch.equal(first, second) for first, second in zip(*grads, strict=True))
    c = -torch.exp(logp - logprobs_gen.double()).clamp(max=4) * advantages.double() / 1024
    minus_one = -torch.ones(1024, 1, dtype=torch.float64)
    dz = -torch.softmax(z, 1).scatter_add_(1, y[:, None], minus_one) * c[:, None]
    errors = error(grads[0][0], dz @ weight.double()), error(grads[0][1], dz.T @ h.double())
    print(kernel, errors)
    # gradients are returned in the parameters' bf16, which alone rounds by 1.7e-3
    assert max(errors) <= {"exact": 1.8e-3, "two-pass": 2.6e-3}.get(kernel, 3.1e-3)


@pytest.mark.parametrize(("operands", "dtype", "bound"), [
    (torch.bfloat16, torch.bfloat16, 1.9e-3), (torch.bfloat16, torch.float32, 1e-5),
    (torch.float16, torch.float16, 3e-4), (torch.float16, torch.float32, 1e-5),
])  # fmt: skip
def test_the_gemms_add_nothing_to_the_roundings_of_the_logits_gradient(
    operands: torch.dtype, dtype: torch.dtype, bound: float
) -> None:
    h, weight, y, one = problem(512, 1024, 50257)
    h, weight = h.to(operands), weight.to(operands)
    z, dx, dw = torch.empty(512, 50257), torch.empty(512, 1024), torch.zeros(50257, 1024)
    backend.logits(h, weight, z)
    stats = rows.row_stats(z, y, one, 0.0)
    found = softmax(stats)
    g = Gradient(stats[0], -1 / found.total, None, None, found.others / found.total)
    expected = -torch.softmax(z.double(), 1)
    expected.scatter_(1, y[:, None], (found.others.double() / found.total)[:, None])
    if operands == torch.float16:  # as the op scales it
        expected, g = expected * 2**15, g.over(torch.tensor(2.0**-15))
    dz = rows.row_grads(z, y, one, 0.0, g, dtype)
    backend.d_hidden(dz, weight, dx)
    for chunk in range(4):
        part = slice(chunk * 128, chunk * 128 + 128)
        backend.add_d_weight(dz[part], h[part], dw)
    assert error(dx, expected @ weight.double()) <= bound
    assert error(dw, expected.T @ h.double()) <= bound


def test_far_anchors_are_raised() -> None:
    h, weight, _, one = problem(64, 512, 50304)
    targets = torch.randint(50304, (64,))  # unlikely ones, which the generator calls certain
    h[::2] = (weight[torch.arange(0, 64, 2) * 700].float() * 40).bfloat16()
    exact = exact_log_probs(exact_logits(h, weight), targets)
    z = torch.mm(h, weight.T, out_dtype=torch.float32)
    row_kernel = rows.single_pass(z, targets, one, torch.zeros(64))
    epilogue = fused.fused_epilogue(h, weight, targets, one, torch.zeros(64))
    p = torch.softmax(exact_logits(h, weight), 1)
    p.scatter_add_(1, targets[:, None], -torch.ones(64, 1, dtype=torch.float64))
    for exp, stats in (row_kernel, epilogue):
        found = softmax(stats)
        torch.testing.assert_close(found.logp.double(), exact, rtol=2e-6, atol=1e-5)
        assert error(exp.double() / found.total.double()[:, None], p) <= 2.5e-3
    assert bool((exact < -60).any())


def test_tf32_does_not_reach_fp32_heads() -> None:
    h, weight, y, one = (x.float() if x.is_floating_point() else x for x in problem(256, 1024, 50257))
    exact = exact_log_probs(exact_logits(h, weight), y)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        z = torch.empty(256, 50257)
        backend.logits(h, weight, z)
        stats = rows.row_stats(z, y, one, 0.0), backend.score(h, weight, y, one, 0.0)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert max(float((softmax(s).logp - exact).abs().max()) for s in stats) <= 8e-6


@pytest.mark.parametrize(("parts", "bound"), [(2, 3e-5), (3, 4e-6)])
def test_fp32_master_weights_keep_their_digits(parts: int, bound: float) -> None:
    """Up to what a GEMM of the rounded weight loses, since tensor cores cut sums."""
    h = torch.randn(256, H).bfloat16()
    weight = torch.randn(50257, H) * H**-0.5
    y, one = torch.randint(50257, (256,)), torch.ones(256)
    z = torch.empty(256, 50257)
    backend.logits(h, weight.bfloat16(), z)
    rounded = exact_log_probs(exact_logits(h, weight.bfloat16()), y)
    bare = float((exact_log_probs(z, y) - rounded).abs().max())
    exact = exact_log_probs(exact_logits(h, weight), y)
    prepared = backend.prepare(h, weight, torch.float32, parts)
    backend.logits(h, prepared, z)
    for stats in (rows.row_stats(z, y, one, 0.0), backend.score(h, prepared, y, one, 0.0)):
        assert float((softmax(stats).logp - exact).abs().max()) <= bound + 1.5 * bare


@pytest.mark.skipif(torch.cuda.mem_get_info()[1] < 60 << 30, reason="needs 60 GB")
def test_offsets_past_2_to_31_are_right() -> None:
    n = 16384  # · 151,936 = 2.5e9 logits
    z, y, one = torch.empty(n, V), torch.randint(V, (n,)), torch.ones(n)
    last = torch.randn(8, V)
    z[-8:] = last
    torch.testing.assert_close(
        softmax(rows.row_stats(z, y, one, 0.0)[:, -8:]).logp.double(), exact_log_probs(last, y[-8:]),
        rtol=0, atol=5e-6,
    )  # fmt: skip
    g, few = Gradient(one, one, None, None, one), Gradient(one[-8:], one[-8:], None, None, one[-8:])
    dz = rows.row_grads(z, y, one, 0.0, g, torch.bfloat16)[-8:]
    alone = rows.row_grads(last, y[-8:], one[-8:], 0.0, few, torch.bfloat16)
    assert torch.equal(dz, alone)
    del z
    h, weight = torch.randn(n, 64).bfloat16(), torch.randn(V, 64).bfloat16()
    exp, _ = fused.fused_epilogue(h, weight, y, one, -one)
    assert torch.equal(exp[-8:], fused.fused_epilogue(h[-8:], weight, y[-8:], one[-8:], -one[-8:])[0])


def test_scoring_holds_no_logits() -> None:
    h, weight, y, _ = problem(4096, 1024)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, *_ = linear_logprob(h, weight, y)
    assert torch.cuda.max_memory_allocated() - before < 100 << 20  # the logits are 2.5 GB
    assert bool(logp.isfinite().all())
