"""Promises over ranks: a vocabulary in shards is the whole one; FSDP2's sharded head gets its gradient."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from losses import run, scored
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from kernels import GSPO, KL, backend_info, linear_logprob, policy_loss

BACKENDS = [name for name, info in backend_info().items() if info["available"] and name != "triton"]
N, H, V = 19, 9, 43  # on 3 ranks 15, 15 and 13


def problem() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731  # a one-line shorthand
    p = {"hidden": rand(N, H), "weight": rand(V, H), "targets": torch.randint(V, (N,), generator=g)}
    logp = linear_logprob(p["hidden"], p["weight"], p["targets"], backend="torch")[0]
    logp[4] -= 95.0  # a token whose ratio is far out
    return p | {
        "logprobs_gen": logp + 0.5 * rand(N), "advantages": rand(N),
        "token_weights": torch.rand(N, generator=g) * (rand(N) < 1),
        "sequences": torch.arange(N) // 6, "logprobs_ref": logp + 0.3 * rand(N),
    }  # fmt: skip


train = partial(run, kl=KL(0.1), entropy_bonus=0.2, exact=True)


def _start(rank: int, size: int, folder: str, work: Callable[[int, int], list[Tensor]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size)
    torch.save(work(rank, size), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_ranks(size: int, folder: Path, work: Callable[[int, int], list[Tensor]]) -> list[list[Tensor]]:
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "kernels.loss"])  # not by each rank
    mp.start_processes(_start, (size, str(folder), work), nprocs=size, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def sharded_vocabulary(rank: int, size: int) -> list[Tensor]:
    results: list[Tensor] = []
    p = problem()
    p["weight"] = p["weight"].chunk(size)[rank]
    for backend in BACKENDS:
        for objective in (None, GSPO()):
            results += train(p, group=dist.group.WORLD, backend=backend, chunk_rows=5, objective=objective)
        results += scored(p, group=dist.group.WORLD, backend=backend, chunk_rows=5)
    return results


@pytest.mark.parametrize("size", [3])
def test_a_vocabulary_over_ranks_gives_what_one_rank_gives(size: int, tmp_path: Path) -> None:
    got = on_ranks(size, tmp_path, sharded_vocabulary)
    p, expected = problem(), []
    for backend in BACKENDS:
        for objective in (None, GSPO()):
            expected += train(p, backend=backend, objective=objective)
        expected += scored(p, backend=backend)
    assert all(len(rank) == len(expected) for rank in got)
    for i, whole in enumerate(expected):
        parts = [rank[i] for rank in got]
        if whole.shape == (V, H):  # the weight's gradient is each rank's shard
            parts = [torch.cat(parts)]
        for part in parts:
            scale = max(1.0, float(whole.abs().max()))
            torch.testing.assert_close(part, whole, rtol=1e-5, atol=2e-6 * scale)
        assert all(torch.equal(part, parts[0]) for part in parts)


class Policy(nn.Module):
    """A body and a head, as FSDP2 shards them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(H, H), nn.Linear(H, V, bias=False)

    def forward(self, p: dict[str, Tensor]) -> Tensor:
        rest = {k: p[k] for k in ("targets", "logprobs_gen", "advantages", "token_weights")}
        return policy_loss(self.body(p["hidden"]), self.head.weight, exact=True, **rest).loss  # type: ignore[arg-type]  # tensors


def rows_of(p: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    return {k: x if k == "weight" else x.chunk(size)[rank] for k, x in p.items()}


def sharded_parameters(rank: int, size: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (size,))
    results = []
    for whole_model in (True, False):
        policy = Policy()
        # the head's shard is gathered by FSDP2's hooks (whole_model), or is the DTensor that the op meets
        fully_shard(policy if whole_model else policy.body, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        if not whole_model:
            weight = dist.tensor.distribute_tensor(policy.head.weight.detach(), mesh, [dist.tensor.Shard(0)])
            policy.head.weight = nn.Parameter(weight)
        for module in policy.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)  # the losses' weights sum over ranks already
                module.set_force_sum_reduction_for_comms(True)
        policy(rows_of(problem(), rank, size)).backward()
        for parameter in (policy.head.weight, policy.body.weight):
            assert isinstance(parameter.grad, DTensor)
            results.append(parameter.grad.full_tensor())
    return results


@pytest.mark.parametrize("size", [2])
def test_fsdp2s_sharded_head_gets_the_gradient_of_all_ranks_tokens(size: int, tmp_path: Path) -> None:
    got = on_ranks(size, tmp_path, sharded_parameters)
    policy = Policy()
    sum(policy(rows_of(problem(), rank, size)) for rank in range(size)).backward()
    for rank in got:
        for i, parameter in enumerate([policy.head.weight, policy.body.weight] * 2):
            torch.testing.assert_close(rank[i], parameter.grad, rtol=1e-5, atol=1e-6)
