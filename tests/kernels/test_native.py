"""Promises of the native CPU backend on every instruction set; its row kernels: test_rows.py."""

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from losses import error
from torch import Tensor

from kernels import native

pytestmark = [
    pytest.mark.skipif(bool(native.why_not()), reason=native.why_not()),
    pytest.mark.usefixtures("isa"),
]
TYPES = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def logits(h: Tensor, w: Tensor) -> Tensor:
    z = torch.full((len(h), len(w)), math.nan)
    native.logits(h, w, z)
    return z


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (37, 13, 101), (29, 300, 523), (65, 613, 67), (301, 67, 1031)])
def test_gemms_equal_float64_and_give_the_same_bits_on_any_number_of_threads(
    shape: tuple[int, int, int], types: tuple[torch.dtype, ...]
) -> None:
    c, h, v = shape
    hidden, weight = rand(c, h, dtype=types[0]), rand(v, h, dtype=types[1])
    dz, before = rand(c, v, dtype=types[0]), rand(v, h)
    assert error(logits(hidden, weight), hidden.double() @ weight.double().T) < 3e-7
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        d_hidden, d_weight = torch.full((c, h), math.nan), before.clone()
        native.d_hidden(dz, weight, d_hidden)
        native.add_d_weight(dz, hidden, d_weight)
        results.append((d_hidden, d_weight))
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0]) and torch.equal(other[1], results[0][1])
    assert error(d_hidden, dz.double() @ weight.double()) < 5e-7
    assert error(d_weight, before.double() + dz.double().T @ hidden.double()) < 3e-7


def test_exp_is_within_two_units_and_right_at_the_ends() -> None:
    # `others` of a row (0, x, target far below) is 1 + e^x; with x the only other one it is e^x itself
    x = -torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 87
    z = torch.stack([torch.zeros_like(x), x], 1)
    ones = torch.ones(len(x))
    others = native.row_stats(z, torch.zeros(len(x), dtype=torch.int64), ones, 0.0)[1]
    exact = x.double().exp()
    assert float(((others - exact) / exact).abs().max()) < 2 * 2**-24 * 2
    z = torch.tensor([[0.0, -math.inf], [0.0, -1e30], [0.0, -95.0], [math.nan, 0.0], [math.inf, 0.0]])
    stats = native.row_stats(z, torch.zeros(5, dtype=torch.int64), torch.ones(5), 0.0)
    assert stats[1, :3].tolist() == stats[3, :3].tolist() == [0.0] * 3
    z[3:, 0], z[3, 1], z[4, 1] = 0.0, math.nan, math.inf
    stats = native.row_stats(z, torch.zeros(5, dtype=torch.int64), torch.ones(5), 0.0)
    assert stats[1, 3:].isnan().all()  # the op sees it and says so


@pytest.mark.parametrize("types", TYPES)
def test_a_row_does_not_depend_on_its_neighbours_or_the_threads(types: tuple[torch.dtype, ...]) -> None:
    hidden, weight = rand(17, 300, dtype=types[0]), rand(4111, 300, dtype=types[1])
    targets, inverse = torch.arange(17) * 240, 0.5 + rand(17).abs()
    whole = logits(hidden, weight)
    stats = native.row_stats(whole, targets, inverse, 7.0)
    for n in range(1, 18):
        torch.set_num_threads(1 + n % 2)
        rows = torch.randperm(17, generator=torch.Generator().manual_seed(n))[:n]
        assert torch.equal(logits(hidden[rows], weight), whole[rows])
        scored = native.score(hidden[rows], weight, targets[rows], inverse[rows], 7.0)
        assert torch.equal(scored, stats[:, rows])


def test_scoring_is_bitwise_the_statistics_of_the_logits() -> None:
    hidden, weight = rand(400, 24), rand(2500, 24)  # more rows than are scored at a time
    targets, inverse = torch.arange(400) - 3, torch.ones(400)
    targets[-3:] = 2500  # of another shard, where rows of the block before had theirs
    stats = native.row_stats(logits(hidden, weight), targets, inverse, 0.0)
    assert torch.equal(native.score(hidden, weight, targets, inverse, 0.0), stats)


def test_rows_of_a_larger_matrix_and_transposed_ones_are_taken_as_they_are() -> None:
    hidden, weight = rand(9, 80)[:, 3:40], rand(37, 50).T
    out = torch.zeros(9, 64)
    native.logits(hidden, weight, out[:, 5:55])
    assert error(out[:, 5:55], hidden.double() @ weight.double().T) < 3e-7
    assert not out[:, :5].any() and not out[:, 55:].any()
    with pytest.raises(ValueError, match="contiguous rows"):
        native.logits(hidden, weight, torch.zeros(50, 9).T)
    with pytest.raises(ValueError, match="FP32 or BF16 matrix on the CPU"):
        native.logits(hidden.double(), weight, out)


def test_a_wrong_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, says in {"avx1024": "it is unknown", "": "it is unknown"}.items():
        monkeypatch.setenv(native.ISA_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"SIGMOID_RL_ISA is '{wrong}', but {says}; expected one of"):
            native._library.__wrapped__()
    monkeypatch.setenv(native.ISA_VARIABLE, "baseline")
    native._library.__wrapped__()
    assert native.info()["isa"] == "baseline"


def test_without_the_library_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_native.so")
    assert "was not built: install CMake" in native._library.__wrapped__()
    native.LIBRARY.write_text("not a library")
    assert "cannot be loaded" in native._library.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(native, "VERSION", 0)
    assert "was built from other sources" in native._library.__wrapped__()


def test_it_works_in_a_forked_process() -> None:
    hidden, weight, out = rand(64, 128), rand(1024, 128), torch.empty(64, 1024)
    here = logits(hidden, weight).numpy().tobytes()  # has had its threads
    pid = os.fork()
    if not pid:  # torch's own threads do not survive a fork: no tensor operations here
        signal.alarm(60)
        native.logits(hidden, weight, out)
        os._exit(0 if out.numpy().tobytes() == here else 1)
    assert os.waitpid(pid, 0)[1] == 0
