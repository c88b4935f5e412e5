"""The row kernels of every backend, and of every instruction set of the native one, against float64."""

from typing import Any

import pytest
import torch
from backends import BACKENDS
from losses import check_single_pass, error, exact_softmax
from torch import Tensor

from kernels import backends, native
from kernels.rows import Gradient, gradient, softmax
from kernels.triton.config import RowConfig

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
ROUNDING = ("amx", "avx512_bf16", "emulated", "emulated_amx")  # instruction sets that multiply BF16
C = 5
triton_only = pytest.mark.parametrize("backend", [x for x in BACKENDS if x == "triton"], indirect=True)


@pytest.fixture
def rows(backend: str) -> Any:
    """A row kernel of the backend, by name; in the interpreter with small tiles."""
    module = backends._load(backend)

    def kernel(name: str, z: Tensor, *inputs: Any) -> Any:
        tiles = [RowConfig(block=16 if z.shape[1] < 200 else 2048, warps=1)] * (backend == "triton")
        return getattr(module, name)(z, *inputs, *tiles)

    return kernel


def problem(vocabulary: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and inverse temperatures, which are powers of two."""
    torch.manual_seed(vocabulary)
    z = torch.randn(C, vocabulary) * scale
    return z, torch.randint(vocabulary, (C,)), 2.0 ** (torch.arange(C) % 3 - 1)


@pytest.mark.parametrize("cap", [0.0, 7.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 16, 61, 127, 5001])
def test_log_probs_and_entropies_are_float64s(rows: Any, vocabulary: int, cap: float) -> None:
    z, y, _ = problem(vocabulary)
    it, before = 0.5 + torch.rand(C), z.clone()
    found = softmax(rows("row_stats", z, y, it, cap))
    _, logp, entropy = exact_softmax(z, y, it, cap)
    torch.testing.assert_close(found.logp.double(), logp, rtol=0, atol=3e-6)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=3e-6)
    assert torch.equal(z, before)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("vocabulary", [61, 5001])
def test_a_target_of_another_shard_is_no_column_of_this_one(rows: Any, vocabulary: int, cap: float) -> None:
    z, y, it = problem(vocabulary)
    y[:4] = torch.tensor([-1, vocabulary, vocabulary + 2, -(10**12)])  # the third lies within the last tile
    u, *_ = exact_softmax(z, y.clamp(0, vocabulary - 1), it, cap)
    anchor, others, target, dot = rows("row_stats", z, y, it, cap).double()
    v = u - anchor[:, None]
    at_target = torch.arange(vocabulary) == y[:, None]
    exp = v.exp().where(~at_target, 0.0)
    torch.testing.assert_close(anchor, u.amax(1), rtol=4e-7, atol=0)
    torch.testing.assert_close(others, exp.sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(dot, (exp * v).sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(target, (u * at_target).sum(1), rtol=4e-7, atol=0)


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("cap", [0.0, 7.0])
@pytest.mark.parametrize("vocabulary", [61, 5001])
def test_the_gradient_is_float64s_and_in_16_bits_the_nearest_in_place(
    rows: Any, backend: str, vocabulary: int, cap: float, bonus: bool
) -> None:
    z, y, it = problem(vocabulary)
    y[:4] = torch.tensor([0, vocabulary - 1, -7, vocabulary])
    u, *_ = exact_softmax(z, y.clamp(0, vocabulary - 1), it, cap)
    anchor = u.amax(1).float() + 0.25  # any near the maximum
    a, b, k, dz_y = torch.randn(4, C)
    v = u - anchor.double()[:, None]
    expected = v.exp() * (a[:, None] + bonus * b[:, None] * (v + k[:, None]))
    expected = torch.where(torch.arange(vocabulary) == y[:, None], dz_y.double()[:, None], expected)
    if cap:
        x = z.double() / cap
        expected *= 4 / (x.exp() + (-x).exp()) ** 2  # 1 − tanh² without its cancellation
    g = Gradient(anchor, a, b if bonus else None, k if bonus else None, dz_y)
    chunk = z.clone()
    exact = rows("row_grads", chunk, y, it, cap, g, torch.float32)
    assert exact.data_ptr() == chunk.data_ptr() and error(exact, expected) < 5e-7
    torch.testing.assert_close(exact.double(), expected, rtol=2e-6, atol=2e-6)
    in_bf16 = backend == "triton" or (backend == "cpu" and native.info()["isa"] in ROUNDING)
    for dtype in (torch.bfloat16, torch.float16) if backend == "triton" else (torch.bfloat16,):
        chunk = z.clone()
        rounded = rows("row_grads", chunk, y, it, cap, g, dtype)
        assert torch.equal(rounded, exact.to(dtype) if in_bf16 else exact)
        if backend == "triton":
            assert rounded.data_ptr() == chunk.data_ptr() and rounded.stride() == (2 * vocabulary, 1)


@pytest.mark.parametrize("gap", [
    [5.0, 10.0, 20.0, 27.0, 32.0],  # log π from −3e-1 to −6e-13
    [0.0, -40.0, -80.0, -120.0, -300.0],
], ids=["peaked", "unlikely"])  # fmt: skip
def test_peaked_rows_unlikely_targets_and_offset_logits_are_as_exact(
    rows: Any, backend: str, gap: list[float]
) -> None:
    z, y, it = problem(61, 1.0)
    it.fill_(1.0)
    if gap[0]:
        z[torch.arange(C), y] = z.amax(1)
    else:
        z = (z * 512).round() / 512 + 1e4  # exact in FP32
    z[torch.arange(C), y] += torch.tensor(gap)
    _, logp, entropy = exact_softmax(z, y, it)
    stats = [rows("row_stats", z, y, it, 0.0)]
    if gap[0] and backend == "triton":
        stats.append(rows("single_pass", z.clone(), y, it, logp.float())[1])
    for found in map(softmax, stats):
        assert float(((found.logp - logp) / logp).abs().max()) <= 1e-5
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=3e-6)
    if not gap[0]:
        torch.testing.assert_close(found.logp.double(), logp, rtol=3e-7, atol=3e-6)


@triton_only
def test_rows_may_lie_apart_and_one_value_may_stand_for_all(rows: Any) -> None:
    z, y, _ = problem(61)
    wide = torch.full((C, 64), torch.nan)
    one, spread = torch.ones(C), torch.ones(1).expand(C)
    results = []
    for x, targets, ones in ((z, y, one), (wide[:, :61], torch.stack([y, y], 1)[:, 0], spread)):
        stats = rows("row_stats", x.copy_(z), targets, ones, 0.0)
        dz = rows("row_grads", x, targets, ones, 0.0, Gradient(*[ones] * 5), torch.bfloat16)
        results.append([stats, dz.clone()])
        z, y, _ = problem(61)
        results[-1] += [x.clone() for x in rows("single_pass", x.copy_(z), targets, ones, -ones)]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    assert bool(wide[:, 61:].isnan().all())


@triton_only
@pytest.mark.parametrize("error", [0.0, 1.0, -30.0, 30.0])
def test_the_single_pass_gives_statistics_and_the_gradients_factors_whatever_the_anchor(
    rows: Any, error: float
) -> None:
    z, y, it = problem(61)
    logp = exact_softmax(z, y, it)[1]
    exp, stats = rows("single_pass", z.clone(), y, it, (logp + error).float().clamp(max=0.0))
    torch.testing.assert_close(*check_single_pass(exp, stats, z, y, it, 4e-6), rtol=2**-7, atol=1e-12)


@triton_only
def test_the_single_pass_raises_an_anchor_that_logits_exceed_by_far_wherever_they_stand(rows: Any) -> None:
    z, y, it = problem(61, 1.0)
    it.fill_(1.0)
    z[torch.arange(C), y] -= 50.0  # the generator says: likely
    z[2, 5] += 70.0  # raised in the first tile
    z[3, 40] += 70.0  # in the third, which rescales the first two
    z[4, 60], z[4, 20] = z[4, 60] + 200.0, z[4, 20] + 100.0  # twice
    y[2:] = 50
    exp, stats = rows("single_pass", z.clone(), y, it, torch.zeros(C))
    assert float((stats[0] - z.amax(1)).max()) <= 0
    torch.testing.assert_close(*check_single_pass(exp, stats, z, y, it, 4e-6), rtol=2**-7, atol=1e-12)


@triton_only
def test_the_single_pass_takes_rows_whose_target_is_elsewhere(rows: Any) -> None:
    z, y, it = problem(61)
    exp, stats = rows("single_pass", z.clone(), y - 100, it, torch.zeros(C))
    u, *_ = exact_softmax(z, y, it)
    v = u - stats[0].double()[:, None]
    torch.testing.assert_close(stats[1].double(), v.exp().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(exp.double(), v.exp(), rtol=2**-7, atol=0)


def test_no_gradient_exceeds_its_bound() -> None:
    """FP16 divides by it: with an entropy term as large as the log-prob's, all |dz_j| are below."""
    z, y, _ = problem(61, scale=6.0)
    c, e = torch.randn(C), torch.tensor([-30.0, 30.0, -1.0, 1.0, 0.0])
    u, _, entropy = exact_softmax(z, y, torch.ones(C), 0.0)
    log_pi = u.log_softmax(1)
    at_target = torch.nn.functional.one_hot(y, 61)
    dz = c[:, None] * (at_target - log_pi.exp()) - e[:, None] * log_pi.exp() * (log_pi + entropy[:, None])
    stats = backends._load("torch").row_stats(z, y, torch.ones(C), 0.0)
    for rows in map(slice, range(C), range(1, C + 1)):
        part = gradient(softmax(stats[:, rows]), c[rows], e[rows], torch.ones(1))
        assert dz[rows].abs().max() <= part.bound() * (1 + 1e-6)
