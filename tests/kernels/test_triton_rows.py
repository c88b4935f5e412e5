"""The Triton row kernels in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from losses import check_single_pass, exact_softmax
from torch import Tensor

pytest.importorskip("triton")
from kernels.rows import Gradient, softmax
from kernels.triton import config, rows
from kernels.triton.config import RowConfig

pytestmark = [
    pytest.mark.skipif(not config.INTERPRET, reason="TRITON_INTERPRET=1 is not set: see tests/gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
TILES = RowConfig(block=16, warps=1)
C = 5


def problem(vocabulary: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(vocabulary)
    z = torch.randn(C, vocabulary) * scale
    return z, torch.randint(vocabulary, (C,)), 0.5 + torch.rand(C)


@pytest.mark.parametrize("cap", [0.0, 7.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 16, 61, 127])
def test_log_probs_and_entropies_are_float64s(vocabulary: int, cap: float) -> None:
    z, y, it = problem(vocabulary)
    before = z.clone()
    found = softmax(rows.row_stats(z, y, it, cap, TILES))
    _, logp, entropy = exact_softmax(z, y, it, cap)
    torch.testing.assert_close(found.logp.double(), logp, rtol=0, atol=3e-6)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=3e-6)
    assert torch.equal(z, before)


@pytest.mark.parametrize("gap", [
    [5.0, 10.0, 20.0, 27.0, 32.0],  # log π from −3e-1 to −6e-13
    [0.0, -40.0, -80.0, -120.0, -300.0],
], ids=["peaked", "unlikely"])  # fmt: skip
def test_peaked_rows_unlikely_targets_and_offset_logits_are_as_exact(gap: list[float]) -> None:
    z, y, it = problem(61, 1.0)
    it.fill_(1.0)
    if gap[0]:
        z[torch.arange(C), y] = z.amax(1)
    else:
        z = (z * 512).round() / 512 + 1e4  # exact in FP32
    z[torch.arange(C), y] += torch.tensor(gap)
    _, logp, entropy = exact_softmax(z, y, it)
    stats = [rows.row_stats(z, y, it, 0.0, TILES)]
    if gap[0]:
        stats.append(rows.single_pass(z.clone(), y, it, logp.float(), TILES)[1])
    for found in map(softmax, stats):
        assert float(((found.logp - logp) / logp).abs().max()) <= 1e-5
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=3e-6)
    if not gap[0]:
        torch.testing.assert_close(found.logp.double(), logp, rtol=3e-7, atol=3e-6)


def test_a_target_of_another_shard_is_no_column_of_this_one() -> None:
    z, y, it = problem(61)
    y[:4] = torch.tensor([-1, 61, 63, -(10**12)])  # 63 lies within the last tile
    u, *_ = exact_softmax(z, y.clamp(0, 60), it)
    anchor, others, target, dot = rows.row_stats(z, y, it, 0.0, TILES).double()
    v = u - anchor[:, None]
    v[4, y[4]] = -torch.inf
    torch.testing.assert_close(anchor, u.amax(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(others, v.exp().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(dot, (v.exp() * v).nan_to_num().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(target, torch.where(y == y[4], u[4, y[4]], 0.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("cap", [0.0, 7.0])
def test_the_gradient_is_float64s_and_in_bf16_the_nearest_in_place(cap: float, bonus: bool) -> None:
    z, y, it = problem(61)
    y[3] = -7
    m = rows.row_stats(z, y, it, cap, TILES)[0]
    a, b, k, dz_y = torch.randn(4, C)
    u, *_ = exact_softmax(z, y.clamp(0), it, cap)
    v = u - m.double()[:, None]
    expected = v.exp() * (a[:, None] + bonus * b[:, None] * (v + k[:, None]))
    local = torch.arange(C) != 3
    expected[local, y[local]] = dz_y[local].double()
    if cap:
        expected *= 1 - torch.tanh(z.double() / cap) ** 2
    g = Gradient(m, a, b if bonus else None, k if bonus else None, dz_y)
    exact = rows.row_grads(z.clone(), y, it, cap, g, True, TILES)
    torch.testing.assert_close(exact.double(), expected, rtol=2e-6, atol=2e-6)
    chunk = z.clone()
    rounded = rows.row_grads(chunk, y, it, cap, g, False, TILES)
    assert torch.equal(rounded, exact.bfloat16())
    assert rounded.data_ptr() == chunk.data_ptr() and rounded.stride() == (2 * 61, 1)


def test_rows_may_lie_apart_and_one_value_may_stand_for_all() -> None:
    z, y, _ = problem(61)
    wide = torch.full((C, 64), torch.nan)
    one, spread = torch.ones(C), torch.ones(1).expand(C)
    results = []
    for x, targets, ones in ((z, y, one), (wide[:, :61], torch.stack([y, y], 1)[:, 0], spread)):
        stats = rows.row_stats(x.copy_(z), targets, ones, 0.0, TILES)
        dz = rows.row_grads(x, targets, ones, 0.0, Gradient(ones, ones, ones, ones, ones), False, TILES)
        results.append([stats, dz.clone()])
        z, y, _ = problem(61)
        results[-1] += [x.clone() for x in rows.single_pass(x.copy_(z), targets, ones, -ones, TILES)]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    assert bool(wide[:, 61:].isnan().all())


@pytest.mark.parametrize("error", [0.0, 1.0, -30.0, 30.0])
def test_the_single_pass_gives_statistics_and_the_gradients_factors_whatever_the_anchor(error: float) -> None:
    z, y, it = problem(61)
    logp = exact_softmax(z, y, it)[1]
    exp, stats = rows.single_pass(z.clone(), y, it, (logp + error).float().clamp(max=0.0), TILES)
    torch.testing.assert_close(*check_single_pass(exp, stats, z, y, it, 4e-6), rtol=2**-7, atol=1e-12)


def test_the_single_pass_raises_an_anchor_that_logits_exceed_by_far_wherever_they_stand() -> None:
    z, y, it = problem(61, 1.0)
    it.fill_(1.0)
    z[torch.arange(C), y] -= 50.0  # the generator says: likely
    z[2, 5] += 70.0  # raised in the first tile
    z[3, 40] += 70.0  # in the third, which rescales the first two
    z[4, 60], z[4, 20] = z[4, 60] + 200.0, z[4, 20] + 100.0  # twice
    y[2:] = 50
    exp, stats = rows.single_pass(z.clone(), y, it, torch.zeros(C), TILES)
    assert float((stats[0] - z.amax(1)).max()) <= 0
    torch.testing.assert_close(*check_single_pass(exp, stats, z, y, it, 4e-6), rtol=2**-7, atol=1e-12)


def test_the_single_pass_takes_rows_whose_target_is_elsewhere() -> None:
    z, y, it = problem(61)
    exp, stats = rows.single_pass(z.clone(), y - 100, it, torch.zeros(C), TILES)
    u, *_ = exact_softmax(z, y, it)
    v = u - stats[0].double()[:, None]
    torch.testing.assert_close(stats[1].double(), v.exp().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(exp.double(), v.exp(), rtol=2**-7, atol=0)
