"""The body's ops on a GPU: real sizes against float64, and the same bits twice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import fused_add_rms_norm, fused_qk_norm_rope, rope_tables, swiglu
from kernels.triton import config

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(config.INTERPRET, reason="TRITON_INTERPRET=1: kernels run on the CPU"),
]
T = 5000  # tokens: each program of a backward has many, and the last not all
Op = Callable[..., tuple[Tensor, ...]]


def rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, backend: str) -> tuple[Tensor, ...]:
    cos, sin = rope_tables(T, q.shape[-1], 1e6, "cuda")
    inputs = q, k, cos, sin, torch.arange(T, device="cuda").flip(0)
    return fused_qk_norm_rope(*inputs, q_weight=q_weight, k_weight=k_weight, backend=backend)


CASES: dict[str, tuple[Op, list[tuple[int, ...]]]] = {
    "norm 4096": (fused_add_rms_norm, [(T, 4096), (T, 4096), (4096,)]),
    "norm 5120": (fused_add_rms_norm, [(T, 5120), (T, 5120), (5120,)]),
    "norm 8192": (fused_add_rms_norm, [(T, 8192), (T, 8192), (8192,)]),
    "rope 32/8": (rope, [(T, 32, 128), (T, 8, 128), (128,), (128,)]),
    "rope 14/2": (rope, [(T, 14, 64), (T, 2, 64), (64,), (64,)]),
    "swiglu": (lambda gate, up, backend: (swiglu(gate, up, backend=backend),), [(T, 12288), (T, 12288)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_float64s_and_the_same_twice(case: str, dtype: torch.dtype) -> None:
    op, shapes = CASES[case]
    torch.manual_seed(0)
    given = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]

    def results(tensors: list[Tensor], backend: str) -> list[Tensor]:
        out = op(*tensors, backend=backend)
        generator = torch.Generator("cuda").manual_seed(1)
        random = [torch.randn(x.shape, generator=generator, device="cuda") for x in out]
        upstream = [r.to(dtype).to(x.dtype) for r, x in zip(random, out, strict=True)]
        return [*(x.detach() for x in out), *torch.autograd.grad(out, tensors, upstream)]

    found, again = results(given, "triton"), results(given, "triton")
    exact = results([x.detach().double().requires_grad_() for x in given], "torch")
    bound = 1e-6 if dtype == torch.float32 else 3e-3  # rounding to bf16: 1.7e-3; with the residual's 2.5e-3
    for x, y, truth in zip(found, again, exact, strict=True):
        assert torch.equal(x, y)
        assert float((x.double() - truth).norm() / truth.norm()) < bound
