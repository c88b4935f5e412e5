"""The Triton GEMM and its epilogues in the interpreter, against float64 and bit by bit."""

from dataclasses import replace

import pytest
import torch
from backends import INTERPRETED
from losses import check_single_pass, exact_softmax
from torch import Tensor

pytest.importorskip("triton")
from kernels.rows import softmax
from kernels.triton import fused, quack
from kernels.triton.config import GemmConfig
from kernels.triton.split import split_16

pytestmark = INTERPRETED
POINTERS = GemmConfig(16, 64, 32, warps=1, stages=1, group=2)
COPIES = replace(POINTERS, tma=True, subtiles=1)
each_tiles = pytest.mark.parametrize("tiles", [POINTERS, COPIES], ids=["pointers", "copies"])
N, H, V = 37, 40, 173


def problem(
    dtype: torch.dtype = torch.bfloat16, n: int = N, vocabulary: int = V
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    h, weight = torch.randn(n, H).to(dtype), (torch.randn(vocabulary, H) * 0.5).to(dtype)
    return h, weight, torch.randint(vocabulary, (n,)), 0.5 + torch.rand(n)


def oracle(
    h: Tensor, weight: Tensor, y: Tensor, it: Tensor, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(tempered logits, log π(y), entropy) in float64."""
    return exact_softmax(h.double() @ weight.double().T, y, it, cap)


@each_tiles
@pytest.mark.parametrize(
    ("dtype", "cap"),
    [(torch.bfloat16, 0.0), (torch.bfloat16, 4.0), (torch.float32, 0.0), (torch.float16, 4.0)],
    ids=str,
)
def test_scores_are_float64s_without_logits(tiles: GemmConfig, dtype: torch.dtype, cap: float) -> None:
    h, weight, y, it = problem(dtype)
    found = softmax(fused.score(h, weight, y, it, cap, tiles))
    _, logp, entropy = oracle(h, weight, y, it, cap)
    torch.testing.assert_close(found.logp.double(), logp, rtol=0, atol=5e-6)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=5e-6)


def test_scores_of_other_shards_targets_are_sums_over_all_columns() -> None:
    h, weight, y, it = problem()
    y[:3] = torch.tensor([-1, V, V + 5])  # the last within the last tile
    stats = fused.score(h, weight, y, it, 0.0, POINTERS)[:, :3].double()
    u = (h.double() @ weight.double().T)[:3] * it.double()[:3, None]
    torch.testing.assert_close(stats[1].log() + stats[0], u.logsumexp(1), rtol=0, atol=5e-6)
    assert stats[2].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("function", ["score", "logits", "fused_epilogue"])
@each_tiles
def test_a_tokens_bits_do_not_depend_on_the_batch_around_it(tiles: GemmConfig, function: str) -> None:
    h, weight, y, it = problem(vocabulary=72)
    logprobs_gen = -torch.rand(N)

    def result(rows: Tensor) -> Tensor:
        if function == "score":
            return fused.score(h[rows], weight, y[rows], it[rows], 0.0, tiles).t()
        if function == "fused_epilogue":
            return fused.fused_epilogue(h[rows], weight, y[rows], it[rows], logprobs_gen[rows], tiles)[0]
        z = torch.empty(len(rows), 72)
        fused.logits(h[rows], weight, z, tiles)
        return z

    whole, order = result(torch.arange(N)), torch.randperm(N)
    assert torch.equal(result(order), whole[order])
    for n in (1, 2, 3, 5, 15, 16, 17):
        assert torch.equal(result(torch.arange(n)), whole[:n])


@each_tiles
def test_logits_of_integers_are_exact_and_stay_inside(tiles: GemmConfig) -> None:
    torch.manual_seed(0)
    h, weight = (torch.randint(-8, 9, (n, H)).bfloat16() for n in (19, V))
    wide = torch.full((19, 176), torch.nan)
    fused.logits(h, weight, wide[:, :V], tiles)
    assert torch.equal(wide[:, :V].double(), h.double() @ weight.double().T)
    assert bool(wide[:, V:].isnan().all())


@pytest.mark.parametrize(("parts", "bound"), [(2, 3e-5), (3, 4e-6)])
@each_tiles
def test_parts_of_an_fp32_weight_are_one_sum(tiles: GemmConfig, parts: int, bound: float) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(5, 72).bfloat16(), torch.randn(67, 72) * 0.1
    split, y, it = split_16(weight, parts), torch.arange(5), torch.ones(5)
    z = torch.empty(5, 68)[:, :67]
    fused.logits(h, split, z, tiles)
    assert float((z - h.double() @ weight.double().T).abs().max()) <= bound
    found, _ = fused.fused_epilogue(h, split, y, it, torch.zeros(5), tiles)
    assert found.shape == (5, 67)
    logp = softmax(fused.score(h, split, y, it, 0.0, tiles)).logp
    assert float((logp - oracle(h, weight, y, it)[1]).abs().max()) <= bound


@each_tiles
def test_the_fused_epilogue_gives_statistics_and_the_gradients_factors(tiles: GemmConfig) -> None:
    h, weight, y, it = problem()
    h[3], y[3] = weight[60] * 40, 60  # a peaked row
    check_fused_epilogue(h, weight, y, it, oracle(h, weight, y, it)[1].float(), tiles)


@each_tiles
def test_tiles_far_above_the_anchor_are_moved_to_one(tiles: GemmConfig) -> None:
    h, weight, y, it = problem(n=5)
    it.fill_(1.0)
    for row, high, target in ((1, 3, 100), (2, 170, 100), (3, 80, 2)):  # in the first, last and second tile
        h[row], y[row] = weight[high] * 10, target
    stats = check_fused_epilogue(h, weight, y, it, torch.zeros(5), tiles)
    z = h.double() @ weight.double().T
    raised = stats[0] > z.gather(1, y[:, None])[:, 0] + 1
    assert raised.tolist() == [False, True, True, True, False]


def check_fused_epilogue(
    h: Tensor, weight: Tensor, y: Tensor, it: Tensor, lp: Tensor, tiles: GemmConfig
) -> Tensor:
    exp, stats = fused.fused_epilogue(h, weight, y, it, lp, tiles)
    check_single_pass(exp, stats, h.double() @ weight.double().T, y, it, 1e-5)
    return stats


def test_hopper_and_blackwell_take_quacks_gemm_for_16_bit_operands_of_one_type_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bf16, fp16 = {torch.bfloat16}, {torch.float16}
    monkeypatch.setattr(quack, "why_not", lambda: "")
    assert quack.quack_config(90, bf16, True) == quack.quack_config(90, fp16, True) == quack.CONFIGS[90]
    assert quack.quack_config(100, bf16, True) == quack.CONFIGS[100]
    others = [(80, bf16, True), (90, bf16, False), (90, bf16 | fp16, True), (90, {torch.float32}, True)]
    assert [quack.quack_config(*case) for case in others] == [None] * 4
    monkeypatch.setattr(quack, "why_not", lambda: "version 0.1 is installed")
    with pytest.warns(UserWarning, match="Triton's GEMM instead of QuACK's: version 0.1 is installed"):
        assert quack.quack_config(90, bf16, True) is None
    h, weight, y, it = problem()
    assert torch.equal(fused.fused_score(h, weight, y, it, 0.0), fused.score(h, weight, y, it, 0.0))
