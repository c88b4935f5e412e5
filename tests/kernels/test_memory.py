"""Promise of memory: one chunk of FP32 logits and dW are all that training holds for a while."""

import subprocess
import sys

import pytest

from kernels import backend_info

MIB = 1 << 20
PROGRAM = """
import resource, sys
import torch
from kernels import linear_logprob, policy_loss

def run(n, h, v, c):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=g).requires_grad_() for s in ((n, h), (v, h)))
    rest = {k: torch.rand(n, generator=g) for k in ("logprobs_gen", "advantages", "token_weights")}
    targets = torch.randint(v, (n,), generator=g)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.argv[2] == "policy_loss":
        policy_loss(hidden, weight, targets, **rest, chunk_rows=c, backend=sys.argv[1]).loss.backward()
    else:
        logp, entropy, *_ = linear_logprob(hidden, weight, targets, chunk_rows=c, backend=sys.argv[1])
        (logp + entropy).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

run(64, 8, 999, 32)  # code and thread pools are loaded
print(run(*map(int, sys.argv[3:])) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [n for n, info in backend_info().items() if info["available"] and n != "triton"]
)
@pytest.mark.parametrize("function", ["policy_loss", "linear_logprob"])
def test_training_takes_one_chunk_of_logits_and_dw(backend: str, function: str) -> None:
    n, h, v, c = 600, 8, 40_013, 50
    command = [sys.executable, "-c", PROGRAM, backend, function, *map(str, (n, h, v, c))]
    # in some processes the allocator keeps 6 MB more than is needed: another then shows what is
    peaks = (int(subprocess.check_output(command, text=True)) for _ in range(3))
    chunk, d_weight, d_hidden = 4 * c * v, 4 * v * h, 4 * n * h
    # the backends' own scratch: 2 × 6 MB of rows (torch), packed panels (cpu)
    assert any(peak <= chunk + d_weight + d_hidden + 20 * MIB for peak in peaks)
    assert chunk + d_weight + 20 * MIB < 4 * n * v / 3  # it would notice the whole logits, or a second chunk
