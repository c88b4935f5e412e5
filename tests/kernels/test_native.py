"""Promises of the native CPU backend: every kernel, on every instruction set, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())
ISAS = native.isas() if native.available() else ["none"]
TYPES = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.info()["isa"]
    native.select(request.param)
    yield request.param
    native.select(before)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp(min=1e-30))


def logits(h: Tensor, w: Tensor) -> Tensor:
    z = torch.full((len(h), len(w)), math.nan)
    native.logits(h, w, z)
    return z


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (37, 13, 101), (29, 300, 523), (65, 613, 67)])
def test_gemms_equal_float64(shape: tuple[int, int, int], types: tuple[torch.dtype, ...]) -> None:
    c, h, v = shape
    hidden, weight = rand(c, h, dtype=types[0]), rand(v, h, dtype=types[1])
    dz, before = rand(c, v, dtype=types[0]), rand(v, h)
    assert error(logits(hidden, weight), hidden.double() @ weight.double().T) < 3e-7
    d_hidden, d_weight = torch.full((c, h), math.nan), before.clone()
    native.d_hidden(dz, weight, d_hidden)
    native.add_d_weight(dz, hidden, d_weight)
    assert error(d_hidden, dz.double() @ weight.double()) < 5e-7
    assert error(d_weight, before.double() + dz.double().T @ hidden.double()) < 3e-7
