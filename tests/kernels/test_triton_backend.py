"""The Triton backend as the driver sees it, in the interpreter: GEMMs, splits, availability."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from backends import INTERPRETED
from losses import error, exact, problem, rounded, train
from torch import Tensor

pytest.importorskip("triton")
from kernels.triton import backend, matmul, scale
from kernels.triton.split import split_16

pytestmark = INTERPRETED


@pytest.mark.parametrize(("dtype", "decades", "all_bits"), [
    (torch.bfloat16, (-20, 20), (8, 16, 24)), (torch.float16, (-0.9, 4.5), (11, 22)),
])  # fmt: skip
def test_parts_add_up_to_the_number(
    dtype: torch.dtype, decades: tuple[float, float], all_bits: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = (1 + torch.rand(3, 37)) * torch.logspace(*decades, 37)
    for parts, bits in enumerate(all_bits, 1):
        split = split_16(x, parts, dtype, block=16)
        assert torch.equal(split, parts_of(x, parts, dtype)) and torch.equal(split[:, -37:], x.to(dtype))
        total = split.double().view(3, parts, 37).sum(1)
        assert float(((total - x.double()) / x.double()).abs().max()) <= 2.0**-bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_factor_on_the_device_scales_in_place_with_one_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(scale, "PROGRAMS", 2)  # each has several blocks
    d = torch.randn(3, 3001).to(dtype)
    expected = (d.float() * 0.3).to(dtype)
    assert scale.scale_(d, torch.tensor(1.0)) is d and not torch.equal(d, expected)
    scale.scale_(d, torch.tensor(0.3))
    assert torch.equal(d, expected)


@pytest.mark.parametrize(("parts", "bound"), [(2, 3e-5), (3, 4e-6)])
def test_an_fp32_master_weight_beside_bf16_hidden_keeps_its_digits(parts: int, bound: float) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(5, 4096).bfloat16(), torch.randn(23, 4096) * 0.03
    prepared = backend.prepare(h, weight, torch.float32, parts)
    out = torch.empty(5, 23)
    backend.logits(h, prepared, out)
    assert float((out - h.double() @ weight.double().T).abs().max()) <= bound


@pytest.mark.parametrize("hidden_type", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.float32, torch.float16])
def test_exact_gradients_are_finer_than_16_bits_for_every_pair_of_types(
    hidden_type: torch.dtype, weight_type: torch.dtype
) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(7, 24).to(hidden_type), torch.randn(61, 24).to(weight_type)
    dz, start = torch.randn(7, 61), torch.randn(61, 24)
    prepared = backend.prepare(h, weight, torch.float32, 3)
    rounded = (dz.half(), 3e-4) if hidden_type == torch.float16 else (dz.bfloat16(), 2.5e-3)
    for given, bound in ((dz, 1e-5), rounded):
        dx, dw = torch.empty(7, 24), start.clone()
        backend.d_hidden(given, prepared, dx)
        backend.add_d_weight(given, h, dw)
        assert error(dx, dz.double() @ weight.double()) < bound
        assert error(dw - start, dz.double().T @ h.double()) < bound


def on_tensor_cores(left: Tensor, right: Tensor) -> Tensor:
    """The product as tensor cores sum it: 16 products at a time, then the sum is cut to FP32 towards zero."""
    total = torch.zeros(len(left), right.shape[1], dtype=torch.float64)
    for i in range(0, len(right), 16):
        total += left[:, i : i + 16].double() @ right[i : i + 16].double()
        total = (total.view(torch.int64) >> 29 << 29).view(torch.float64)
    return total.float()


def parts_of(x: Tensor, parts: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`split_16` in torch: the interpreter would take minutes for as many rows."""
    split = list[Tensor]()
    for _ in range(parts):
        split.insert(0, x.to(dtype))
        x = x - split[0].float()
    return torch.cat(split, 1)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "split_16", parts_of)
    monkeypatch.setattr(matmul, "_mm", lambda x, y, out: out.copy_(on_tensor_cores(x, y)))
    monkeypatch.setattr(matmul, "_add_mm", lambda x, y, out: out.add_(on_tensor_cores(x, y)))


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("vocabulary", [50257, 151936])
def test_exact_gradients_are_exact_although_tensor_cores_cut_their_sums(vocabulary: int) -> None:
    torch.manual_seed(0)
    dz, weight, dx = torch.randn(3, vocabulary), torch.randn(vocabulary, 5), torch.empty(3, 5)
    for prepared in (weight.bfloat16(), parts_of(weight, 3)):
        backend.d_hidden(dz, prepared, dx)
        used = prepared.double().view(vocabulary, -1, 5).sum(1)
        assert error(dx, dz.double() @ used) < 1e-5
    h, dw = torch.randn(16384, 5).bfloat16(), torch.empty(3, 5)
    for first, times in ((True, 1), (False, 2)):
        backend.add_d_weight(dz[:, :16384].t().contiguous(), h, dw, first)
        assert error(dw, times * (dz[:, :16384].double() @ h.double())) < 1e-5


@pytest.mark.usefixtures("tensor_cores")
def test_an_fp32_weights_logits_are_as_good_as_a_bf16_weights_although_sums_are_cut() -> None:
    torch.manual_seed(0)
    h, weight, z = torch.randn(9, 4096).bfloat16(), torch.randn(11, 4096) * 0.03, torch.empty(9, 11)

    def worst(prepared: Tensor, exact: Tensor) -> float:
        matmul.cublas_logits(h, prepared, z)
        return float((z - h.double() @ exact.double().T).abs().max())

    bare = worst(weight.bfloat16(), weight.bfloat16())
    assert worst(parts_of(weight, 3), weight) < 1.2 * bare


@pytest.mark.slow
@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize(("options", "bound"), [
    ({"row_kernel": "two-pass"}, 1.9e-3), ({"row_kernel": "single-pass"}, 2.5e-3), ({"exact": True}, 1e-5),
])  # fmt: skip
def test_the_whole_op_is_within_its_bounds_although_sums_are_cut(
    options: dict[str, Any], bound: float
) -> None:
    """The bounds of docs/kernels.md, and what rounds a gradient to its bf16: 1.7e-3 at most in the norm."""
    p = rounded(problem(2, 8, 16384, std=3.0))
    out, dx, dw = train(p, backend="triton", **options)
    loss, logp, _, *gradients = exact(p)
    assert float((out.logprobs - logp).abs().max()) < 1e-5 and error(out.loss.detach(), loss) < 1e-6
    for found, expected in zip((dx, dw), gradients, strict=True):
        assert error(found, expected) < bound + 1.7e-3
        if options.get("exact"):  # but for the few that are as far from two bf16 numbers
            assert float((found == expected.bfloat16()).float().mean()) > 0.99


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)


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
