"""Promise of memory: one chunk of FP32 logits and dW are all that training holds for a while."""

from __future__ import annotations

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from losses import LOSSES

from kernels import backend_info

MIB = 1 << 20
FORKS = multiprocessing.get_context("forkserver")  # a process with this module's imports, and little more


def growth(backend: str, function: str, n: int, h: int, v: int, c: int) -> int:
    """Bytes by which the memory of this process is larger at its height than before."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, h, generator=g).requires_grad_() for rows in (n, v))
    p = {k: torch.rand(n, generator=g) for k in ("logprobs_gen", "advantages", "token_weights")}
    p["targets"] = torch.randint(v, (n,), generator=g)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    LOSSES[function](hidden, weight, p, chunk_rows=c, backend=backend).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def growth_after_a_small_problem(backend: str, function: str, *shape: int) -> int:
    growth(backend, function, 64, 8, 999, 32)  # code and thread pools are loaded
    return growth(backend, function, *shape)


@pytest.mark.parametrize(
    "backend", [x for x, i in backend_info().items() if i["available"] and x != "triton"]
)
@pytest.mark.parametrize("function", LOSSES)
def test_training_takes_one_chunk_of_logits_and_dw(backend: str, function: str) -> None:
    n, h, v, c = 600, 8, 40_013, 50
    FORKS.set_forkserver_preload(["kernels.loss", "kernels.scoring"])
    chunk, d_weight, d_hidden = 4 * c * v, 4 * v * h, 4 * n * h
    # the backends' own scratch: 2 × 6 MB of rows (torch), packed panels (cpu)
    most = chunk + d_weight + d_hidden + 20 * MIB
    # in some processes the allocator keeps 6 MB more than is needed: another then shows what is
    with ProcessPoolExecutor(1, FORKS, max_tasks_per_child=1) as pool:
        call = lambda: pool.submit(growth_after_a_small_problem, backend, function, n, h, v, c)  # noqa: E731
        assert any(call().result() <= most for _ in range(8))
    assert chunk + d_weight + 20 * MIB < 4 * n * v / 3  # it would notice the whole logits, or a second chunk
