"""The account of the learner's MFU, against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from bench import mfu
from bench.kernels.account import Card
from bench.learner.step import MODELS, parameters_of
from bench.mfu import TOKENS, Cost, Counter, as_one_kernel, count, of_model


def test_an_operation_costs_its_flops_or_the_bytes_it_moves() -> None:
    a, b, x = torch.zeros(2, 3), torch.zeros(3, 5), torch.zeros(4, 1)
    with Counter() as counter:
        a @ b  # 60 FLOPs; 6, 15 and 10 numbers of 4 bytes
        x.expand(4, 7) + torch.zeros(1)  # reads 4 numbers and 1, writes 28; zeros writes 1
        x.view(4).t()  # no kernel
    cost = counter.cost
    assert (cost.product_flops, cost.product_bytes, cost.bytes, cost.kernels) == (60, 124, 136, 3)
    card = Card("round numbers", gemm=1e3, bandwidth=10.0, issue=1.0, launch=2.0)
    assert Cost(500.0, 100.0, 70.0, [11e14, 84e13], 3).seconds(card, "FlashAttention 3") == pytest.approx({
        "matrix products": 0.5 + 0.2 * 10, "attention": 4.0, "everything else": 7.0, "launches": 6.0,
    })  # fmt: skip


def test_a_fused_op_is_one_kernel_each_way() -> None:
    counter = Counter()
    gate, up = (torch.zeros(10, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with counter:
        out = as_one_kernel(counter, lambda g, u: (g * u).sin(), (0, 1))(gate, up)
        assert (counter.cost.bytes, counter.cost.kernels) == (60, 1)  # two read, one written
        torch.autograd.backward(out, torch.zeros_like(out))
    # gate, up and the gradient read, two gradients written; zeros_like writes 20.
    assert (counter.cost.bytes, counter.cost.kernels) == (60 + 100 + 20, 3)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_products_have_six_flops_a_parameter_and_token_or_eight(checkpointed: bool) -> None:
    body = parameters_of(MODELS["tiny"]())[1]
    for match_engine in (None, True):
        cost = count("tiny", match_engine, checkpointed, layers=2)
        # The last product that is computed again, of the down projection, is needed by no gradient.
        expected = (8 if checkpointed else 6) * body * TOKENS
        assert cost.product_flops == pytest.approx(expected, rel=0.1 if checkpointed else 1e-9)
        width = 64  # heads times their size
        assert cost.attention_flops == [(1 + checkpointed) * 2 * 4 * TOKENS * width * mfu.MEAN_KEYS,
                                        2 * 10 * TOKENS * width * mfu.MEAN_KEYS]  # fmt: skip


def test_fusing_and_matching_the_engine_move_fewer_bytes_in_fewer_kernels() -> None:
    plain, fused, matched = (of_model("qwen3-0.6b", variant, False)[0] for variant in mfu.VARIANTS)
    assert plain.bytes > 3 * fused.bytes > 3 * matched.bytes
    assert plain.kernels > 2 * fused.kernels
    assert plain.product_flops == fused.product_flops == matched.product_flops


def test_the_table_has_every_model_and_card(capsys: pytest.CaptureFixture[str]) -> None:
    mfu.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| qwen3-") for line in lines) == 8
    row = next(line for line in lines if line.startswith("| qwen3-4b | H200 | –"))
    shares = [float(x) for x in row.split("|")[4:-1]]
    assert 0.2 < shares[0] < shares[1] <= shares[2] < shares[3] < 0.8
