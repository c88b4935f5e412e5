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


def test_a_peaked_rows_log_prob_keeps_its_relative_precision() -> None:
    gap = torch.tensor([5.0, 10.0, 20.0, 27.0, 32.0])  # log π from −3e-1 to −6e-13
    z, y, it = problem(61, 1.0)
    it.fill_(1.0)
    z[torch.arange(C), y] = z.amax(1) + gap
    _, logp, _ = exact_softmax(z, y, it)
    for stats in (
        rows.row_stats(z, y, it, 0.0, TILES),
        rows.single_pass(z.clone(), y, it, logp.float(), TILES)[1],
    ):
        assert float(((softmax(stats).logp - logp) / logp).abs().max()) <= 1e-5


def test_unlikely_targets_and_offset_logits_are_as_exact() -> None:
    z, y, it = problem(61)
    it.fill_(1.0)
    z = (z * 512).round() / 512 + 1e4  # exact in FP32
    z[torch.arange(C), y] -= torch.tensor([0.0, 40.0, 80.0, 120.0, 300.0])
    _, logp, entropy = exact_softmax(z, y, it)
    found = softmax(rows.row_stats(z, y, it, 0.0, TILES))
    torch.testing.assert_close(found.logp.double(), logp, rtol=3e-7, atol=3e-6)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=3e-6)


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


def test_a_value_for_all_rows_need_not_be_copied_for_each() -> None:
    z, y, _ = problem(61)
    apart, one, spread = torch.stack([y, y], 1)[:, 0], torch.ones(C), torch.ones(1).expand(C)
    stats = rows.row_stats(z, apart, spread, 0.0, TILES)
    assert torch.equal(stats, rows.row_stats(z, y, one, 0.0, TILES))
    found = [
        rows.row_grads(z.clone(), t, x, 0.0, Gradient(x, x, x, x, x), False, TILES)
        for t, x in ((apart, spread), (y, one))
    ]
    assert torch.equal(*found)
    assert torch.equal(
        rows.single_pass(z.clone(), apart, spread, -spread, TILES)[0],
        rows.single_pass(z.clone(), y, one, -one, TILES)[0],
    )


def test_rows_may_lie_apart() -> None:
    z, y, it = problem(61)
    wide = torch.full((C, 64), torch.nan)
    wide[:, :61] = z
    one, found = torch.ones(C), []
    for chunk in (z, wide[:, :61]):
        stats = rows.row_stats(chunk, y, it, 0.0, TILES)
        dz = rows.row_grads(chunk, y, it, 0.0, Gradient(stats[0], one, None, None, one), False, TILES)
        found.append((stats, dz))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
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


def test_no_rows_give_no_rows() -> None:
    none, y = torch.empty(0, 61), torch.empty(0, dtype=torch.int64)
    f = none.new_empty(0)
    assert rows.row_stats(none, y, f, 0.0).shape == (4, 0)
    assert rows.row_grads(none, y, f, 0.0, Gradient(f, f, None, None, f), False).shape == (0, 61)
    assert rows.single_pass(none, y, f, f)[0].shape == (0, 61)
