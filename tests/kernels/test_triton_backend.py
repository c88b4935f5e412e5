"""The Triton backend as the driver sees it, in the interpreter: GEMMs, splits, availability."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kernels.triton import backend, config
from kernels.triton.matmul import ieee_fp32
from kernels.triton.split import split_bf16

pytestmark = [
    pytest.mark.skipif(not config.INTERPRET, reason="TRITON_INTERPRET=1 is not set: see tests/gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def test_parts_add_up_to_the_number() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 37) * torch.logspace(-20, 20, 37)
    for parts, bits in ((1, 8), (2, 16), (3, 24)):
        split = split_bf16(x, parts, block=16)
        assert split.shape == (3, parts * 37) and torch.equal(split[:, :37], x.bfloat16())
        total = split.double().view(3, parts, 37).sum(1)
        assert float(((total - x.double()) / x.double()).abs().max()) <= 2.0**-bits


@pytest.mark.parametrize(("parts", "bound"), [(2, 3e-5), (3, 4e-6)])
def test_an_fp32_master_weight_beside_bf16_hidden_keeps_its_digits(parts: int, bound: float) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(5, 4096).bfloat16(), torch.randn(23, 4096) * 0.03
    prepared = backend.prepare(h, weight, torch.float32, parts)
    out = torch.empty(5, 23)
    backend.logits(h, prepared, out)
    assert float((out - h.double() @ weight.double().T).abs().max()) <= bound
    dz = torch.randn(5, 23)
    dx = torch.empty(5, 4096)
    backend.d_hidden(dz, prepared, dx)
    assert error(dx, dz.double() @ weight.double()) < 1e-5
    backend.d_hidden(dz.bfloat16(), prepared, dx)
    assert error(dx, dz.bfloat16().double() @ weight.double()) < 1e-5


@pytest.mark.parametrize("hidden_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.float32])
def test_exact_gradients_are_finer_than_bf16_for_every_pair_of_types(
    hidden_type: torch.dtype, weight_type: torch.dtype
) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(7, 24).to(hidden_type), torch.randn(61, 24).to(weight_type)
    dz, start = torch.randn(7, 61), torch.randn(61, 24)
    prepared = backend.prepare(h, weight, torch.float32, 3)
    for given, bound in ((dz, 1e-5), (dz.bfloat16(), 2.5e-3)):
        dx, dw = torch.empty(7, 24), start.clone()
        backend.d_hidden(given, prepared, dx)
        backend.add_d_weight(given, h, dw)
        assert error(dx, dz.double() @ weight.double()) < bound
        assert error(dw - start, dz.double().T @ h.double()) < bound


@pytest.mark.parametrize("setting", ["none", "ieee", "tf32"])
def test_tf32_is_off_inside_and_as_the_user_set_it_outside(setting: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = setting
        with ieee_fp32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == setting
    finally:
        matmul.fp32_precision = before


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=False
    )


def test_without_triton_the_package_works_and_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import kernels; from kernels.triton import backend; print(backend.why_not())"
    )
    assert run(code).stdout == "Triton is not installed; pip install triton\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels do run")
def test_cpu_tensors_outside_the_interpreter_are_a_clear_error() -> None:
    code = (
        "import torch; from kernels.triton import backend as b; print(b.why_not()); "
        "x = torch.zeros(2, 2); b.prepare(x, x, torch.float32, 3)"
    )
    found = run(code)
    assert "no CUDA device is visible; on a CPU set TRITON_INTERPRET=1" in found.stdout
    assert "ValueError: the triton backend was given tensors on cpu" in found.stderr
