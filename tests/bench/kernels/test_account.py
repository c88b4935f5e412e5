"""The account of the loss's costs, against numbers worked by hand."""

import pytest

from bench.kernels import account
from bench.kernels.account import Card, bare, extra, ratio

CARD = Card("round numbers", gemm=1e12, bandwidth=1e9, issue=1e9, launch=1e-3)
N, H, V = 10, 100, 1000  # 10,000 logits


def test_the_parts_are_those_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "INSTRUCTIONS", {"row_stats": 3, "row_grads": 8, "score": 5})
    assert bare(CARD, N, H, V) == pytest.approx(3 * 2 * 10 * 100 * 1000 / 1e12)
    parts = extra(CARD, N, H, V, "two-pass", chunk_rows=5)  # two chunks
    assert parts == pytest.approx({
        "FP32 logits written": 0.2 * 40e3 / 1e9,
        "row_stats": 40e3 / 1e9,  # 4 bytes take longer than 3 instructions
        "row_grads": 80e3 / 1e9,  # 8 instructions take longer than 6 bytes
        "dX rounded": 8 * 1000 / 1e9,
        "dW summed": 10 * 100e3 / 1e9,
        "dW rounded": 6 * 100e3 / 1e9,
        "launches": (account.CALL_LAUNCHES + 2 * account.CHUNK_LAUNCHES) * 1e-3,
    })  # fmt: skip
    assert extra(CARD, N, H, V, "scoring", 0.5) == pytest.approx({
        "epilogue": 50e3 / 1e9, "slower GEMM": 2e6 / 1e12, "tiles' statistics": 24 * 10e3 / 256 / 1e9,
        "launches": 0.01,
    })  # fmt: skip
    whole = bare(CARD, N, H, V) + sum(parts.values())
    assert ratio(CARD, N, H, V, "two-pass", chunk_rows=5) == pytest.approx(bare(CARD, N, H, V) / whole)


def test_one_chunk_writes_dw_at_once() -> None:
    assert "dW rounded" not in extra(CARD, N, H, V, "single-pass")


def test_every_path_of_the_table_costs_something_and_less_than_the_gemms() -> None:
    for card in account.CARDS:
        for kernel, efficiency in account.KERNELS:
            assert 0.5 < ratio(card, *account.SHAPES[0], kernel, efficiency) < 1
