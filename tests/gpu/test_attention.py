"""On a GPU: the flash kernel's attention over a tree of completions equals the masked one."""

import numpy as np
import pytest
import torch

from trainer.learner import attention
from trainer.learner.packing import pack
from trainer.types import TrainSequence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sequences() -> list[TrainSequence]:
    """Three prompts, completions shorter and longer than a block of queries."""
    rng = np.random.default_rng(0)
    out = []
    for size in (5, 40, 130):
        prompt = rng.integers(0, 50, size).astype(np.int32)
        for n in (3, 300, 90, 600):
            tokens = rng.integers(0, 50, n).astype(np.int32)
            ones = np.ones(n, np.float32)
            out.append(TrainSequence(prompt, tokens, -ones, np.zeros(n, np.int32), ones, ones))
    return out


def test_flash_over_branches_equals_the_same_in_float32() -> None:
    (m,) = pack(sequences(), 10**6)
    kernel, line = attention.flash_kernel()
    assert kernel is not None, line
    torch.manual_seed(0)
    q, k, v, weight = (torch.randn(len(m.input_ids), h, 64, device="cuda") for h in (8, 2, 2, 8))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
        packed = attention.layout(m.segments, flash=True).map(torch.Tensor.cuda)
        query, key, value = (x.transpose(0, 1)[None] for x in given)
        inputs = torch.nn.Identity(), query, key, value, None, 0.125
        out, _ = attention.packed_attention(*inputs, packed=packed)
        gradients = torch.autograd.grad((out[0].float() * weight).sum(), given)
        results.append([x.float() for x in (out, *gradients)])
    for exact, half in zip(*results, strict=True):
        assert float((half - exact).norm() / exact.norm()) < 0.01  # bf16 keeps 8 bits
