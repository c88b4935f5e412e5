"""Promises over ranks: a vocabulary in shards is the whole one; FSDP2's sharded head gets its gradient."""

import random
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import forked
import losses
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from backends import BACKENDS as VARIANTS
from backends import TAKE_FP16, on_backend
from losses import Watch, error, in_float64, leaves, run, scored
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from kernels import GSPO, KL, backend_info, topk_logprob

BACKENDS = [name for name, info in backend_info().items() if info["available"] and name != "triton"]
N, H, V = 19, 9, 43  # on 3 ranks 15, 15 and 13


def problem() -> dict[str, Tensor]:
    p = losses.problem(N, H, V, seed=3, std=3.0, dtype=torch.float32)
    p["logprobs_gen"][4] -= 95.0  # a token whose ratio is far out
    p["token_weights"][::6] = 0
    return p


def train(p: dict[str, Tensor], **options: Any) -> list[Any]:
    more = {"sequences": torch.arange(N) // 6, "logprobs_ref": p["logprobs_gen"] + 0.3}
    return run(p | more, kl=KL(0.1), entropy_bonus=0.2, exact=True, **options)


def distilled(p: dict[str, Tensor], **options: Any) -> list[Any]:
    """Log-probs of three tokens a row, a soft cap below, and the gradients of a loss on them."""
    y, q = p["targets"], leaves(p)
    ids = torch.stack([y, (y + 17) % V, 3 * y % V], 1)
    logprobs = topk_logprob(q["hidden"], q["weight"], ids, softcap=5.0, temperature=0.8, **options)
    (logprobs * p["advantages"][:, None]).square().sum().backward()
    return [logprobs.detach(), q["hidden"].grad, q["weight"].grad]


def _start(rank: int, size: int, folder: str, work: Callable[[int, int], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size)
    torch.save(work(rank, size), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_ranks(size: int, folder: Path, work: Callable[[int, int], Any]) -> list[Any]:
    mp.start_processes(_start, (size, str(folder), work), nprocs=size, start_method=forked.METHOD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def sharded_vocabulary(rank: int, size: int) -> list[Tensor]:
    results: list[Tensor] = []
    p = problem()
    p["weight"] = p["weight"].chunk(size)[rank]
    for backend in BACKENDS:
        for objective in (None, GSPO()):
            results += train(p, group=dist.group.WORLD, backend=backend, chunk_rows=5, objective=objective)
        results += scored(p, group=dist.group.WORLD, backend=backend, chunk_rows=5)
        results += distilled(p, group=dist.group.WORLD, backend=backend)
    return results


@pytest.mark.parametrize("size", [3])
def test_a_vocabulary_over_ranks_gives_what_one_rank_gives(size: int, tmp_path: Path) -> None:
    got = on_ranks(size, tmp_path, sharded_vocabulary)
    p, expected = problem(), []
    for backend in BACKENDS:
        for objective in (None, GSPO()):
            expected += train(p, backend=backend, objective=objective)
        expected += scored(p, backend=backend) + distilled(p, backend=backend)
    assert all(len(rank) == len(expected) for rank in got)
    for i, whole in enumerate(expected):
        parts = [rank[i] for rank in got]
        if whole.shape == (V, H):  # the weight's gradient is each rank's shard
            parts = [torch.cat(parts)]
        for part in parts:
            scale = max(1.0, float(whole.abs().max()))
            torch.testing.assert_close(part, whole, rtol=1e-5, atol=2e-6 * scale)
        assert all(torch.equal(part, parts[0]) for part in parts)


RANDOM_CASES = 40
BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2.5e-3}  # beside the result's rounding


def random_case(seed: int) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
    """A problem, the options of `linear_logprob` and a frozen part, and if the vocabulary is in shards."""
    draw = random.Random(seed)
    n, h, v, std = draw.randint(1, 40), draw.randint(1, 30), draw.randint(2, 300), draw.choice([0.3, 1, 6])
    p, backend = losses.problem(n, h, v, std, seed), VARIANTS[seed % len(VARIANTS)]
    types = [torch.float32, torch.bfloat16, *[torch.float16] * (backend in TAKE_FP16)]
    p |= {k: p[k].to(draw.choice(types)) for k in ("hidden", "weight")}
    options: dict[str, Any] = {
        "backend": backend, "frozen": draw.choice(["", "", "hidden", "weight"]),
        "softcap": draw.choice([None, 3.0, 30.0]), "chunk_rows": draw.choice([None, 7]),
        "temperature": draw.choice([1.0, 0.7, torch.linspace(0.5, 2, n)]), "exact": draw.random() < 0.3,
    }  # fmt: skip
    return p, options, draw.random() < 0.5


def random_cases(rank: int, size: int) -> list[list[Any]]:
    results = []
    for seed in range(RANDOM_CASES):
        p, options, sharded = random_case(seed)
        if sharded:
            p["weight"], options["group"] = p["weight"].tensor_split(size)[rank], dist.group.WORLD
        with on_backend(options["backend"]) as name:
            results.append(scored(p, **options | {"backend": name}))
    return results


@pytest.mark.slow
def test_random_cases_over_backends_types_shards_and_options_are_those_of_float64(tmp_path: Path) -> None:
    wrong: dict[tuple[int, str], Any] = {}
    got = on_ranks(2, tmp_path, random_cases)
    for seed in range(RANDOM_CASES):
        p, options, sharded = random_case(seed)
        *values, dx64, dw64 = in_float64(p, **options)
        bound = max(BOUNDS[p[k].dtype] for k in ("hidden", "weight"))
        for rank in got:
            for value, expected in zip(rank[seed], values, strict=False):
                torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-5, msg=f"{seed}")
        (*_, dx, dw), (*_, dw_2) = got[0][seed], got[1][seed]
        if sharded and dw is not None:
            dw = torch.cat([dw, dw_2])
        for name, mine, expected in (("hidden", dx, dx64), ("weight", dw, dw64)):
            assert (mine is None) == (options["frozen"] == name), (seed, name)
            if mine is None:
                continue
            rounding = error(expected.to(p[name].dtype), expected)
            distance = max(0.0, error(mine, expected) ** 2 - rounding**2) ** 0.5
            if mine.dtype != p[name].dtype or not distance < bound:
                wrong[seed, name] = (distance, options)
    assert wrong == {}


class Policy(nn.Module):
    """An embedding, a body, and a head, tied or not; the forward may contain the loss."""

    def __init__(self, tied: bool = False, loss: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(V, H), nn.Linear(H, H)
        self.head = nn.Linear(H, V, bias=False)
        self.loss = loss
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, p: dict[str, Tensor]) -> Tensor:
        hidden = self.body(self.embedding(p["targets"].flip(0)) + p["hidden"])
        return hidden if self.loss is None else self.loss(hidden, self.head.weight, p)


def rows_of(p: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    return {k: x if k == "weight" else x.chunk(size)[rank] for k, x in p.items()}


LOSSES = {name: partial(loss, exact=True) for name, loss in losses.LOSSES.items()}
fused = LOSSES["policy_loss"]
WAYS = {  # tied; the modules that are wrapped beside the root; the loss is in the root's forward
    "the root alone": (False, [], True),
    "the head by itself, as torchtitan": (False, [["body"], ["head"]], True),
    "after the root's forward, as accelerate": (False, [["body"]], False),
    "tied, after the root's forward": (True, [["body"]], False),
    "tied, with the embedding": (True, [["body"], ["embedding", "head"]], True),
}
DDP = {f"DDP, tied {t}, inside {i}": (t, i) for t, i in product((False, True), (False, True))}


def ways(rank: int, size: int) -> dict[str, Tensor]:
    """The gradients of every parameter, in every way, with FSDP2's mean and with its sum."""
    mesh, p, results = init_device_mesh("cpu", (size,)), rows_of(problem(), rank, size), {}
    for (way, (tied, wrapped, inside)), name, reduce in product(WAYS.items(), LOSSES, ("mean", "sum")):
        loss = partial(LOSSES[name], reduce=reduce)
        policy = Policy(tied, loss if inside else None)
        for names in wrapped:
            fully_shard([getattr(policy, module) for module in names], mesh=mesh)
        fully_shard(policy, mesh=mesh, reshard_after_forward=True)
        for module in policy.modules():
            if reduce == "sum" and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        out = policy(p)
        (out if inside else loss(out, policy.head.weight, p)).backward()
        for parameter, x in policy.named_parameters():
            assert isinstance(x.grad, DTensor)
            results[f"{way}: {name} {reduce} {parameter}"] = x.grad.full_tensor()
    for (way, (tied, inside)), (name, loss) in product(DDP.items(), LOSSES.items()):
        policy = Policy(tied, loss if inside else None)
        parallel = DistributedDataParallel(policy)  # it must live until the backward
        out = parallel(p)
        (out if inside else loss(out, policy.head.weight, p)).backward()
        results |= {f"{way}: {name} mean {k}": x.grad for k, x in policy.named_parameters()}
    return results


def test_parameters_get_the_gradient_of_all_ranks_tokens_in_every_way(tmp_path: Path) -> None:
    expected = {}
    for (way, (tied, *_)), (name, loss) in product({**WAYS, **DDP}.items(), LOSSES.items()):
        policy = Policy(tied, loss)
        sum(policy(rows_of(problem(), rank, 2)) for rank in range(2)).backward()  # type: ignore[attr-defined]
        for parameter, x in policy.named_parameters():
            assert x.grad is not None
            if way not in DDP:
                expected[f"{way}: {name} sum {parameter}"] = x.grad
            expected[f"{way}: {name} mean {parameter}"] = x.grad / 2
    for got in on_ranks(2, tmp_path, ways):
        assert got.keys() == expected.keys()
        assert {k: e for k, x in got.items() if not (e := error(x, expected[k])) < 1e-6} == {}


def other_shards(rank: int, size: int) -> dict[str, Any]:
    """What is refused, a head in another type than the hidden states, and a tensor-parallel head."""
    p, results = problem(), {}
    data, tp = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    both = init_device_mesh("cpu", (1, size))

    def sharded(mesh: DeviceMesh) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(p["weight"], mesh, [Shard(0)] * mesh.ndim))

    weight = sharded(data)
    for mesh, options in (
        (data, {}), (data, {"reduce": "avg"}), (tp, {"reduce": "mean"}), (both, {"reduce": "mean"}),
    ):  # fmt: skip
        for loss in LOSSES.values():
            with pytest.raises(ValueError) as refused:
                loss(p["hidden"], sharded(mesh), p, **options)
            results.setdefault(f"{len(results)}", str(refused.value))
    with pytest.raises(ValueError, match="hidden is a DTensor"):
        fused(distribute_tensor(p["hidden"], tp), sharded(tp), p, group=tp.get_group())
    for placement in (Replicate(), Shard(1)):
        weight_of = nn.Parameter(distribute_tensor(p["weight"], tp, [placement]))
        with pytest.raises(ValueError, match=r"expected Shard\(0\)"):
            fused(p["hidden"], weight_of, p, group=tp.get_group())
    named = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))  # every rank has the same tokens
    for reduce in ("mean", "sum"):
        whole = nn.Parameter(distribute_tensor(p["weight"], named, [Shard(0), Replicate()]))
        fused(p["hidden"], whole, p, reduce=reduce).backward()
        results[f"replicated, {reduce}"] = whole.grad.full_tensor()  # type: ignore[union-attr,operator]
    with torch.no_grad():  # no gradient, nothing to say
        results["loss"] = fused(p["hidden"], weight, p)
    with Watch() as watch:
        fused(p["hidden"].bfloat16(), weight, p, reduce="mean").backward()
    gathered = [dtype for name, dtype in watch.ops if "all_gather" in name]
    assert gathered == [torch.bfloat16] and weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    results["bf16"] = weight.grad.full_tensor()  # type: ignore[union-attr,operator]
    for name, loss in LOSSES.items():
        hidden, weight = p["hidden"].clone().requires_grad_(), sharded(tp)
        loss(hidden, weight, p, group=tp.get_group()).backward()
        results |= {f"tp {name} weight": weight.grad.full_tensor(), f"tp {name} hidden": hidden.grad}  # type: ignore[union-attr,operator]
    return results


REFUSED = (
    "reduce='mean', which is FSDP2's default.*give group= instead",
    "reduce is 'avg'; expected 'mean'",
    "tensor-parallel shard.*give group=",
    "sharded by FSDP2 and tensor parallelism .* give group=",
)


def test_shards_of_tensor_parallelism_are_refused_without_their_group_and_right_with_it(
    tmp_path: Path,
) -> None:
    p, expected = problem(), {}
    h, w = (p[k].bfloat16().float().requires_grad_() for k in ("hidden", "weight"))
    (expected["bf16"],) = torch.autograd.grad(fused(h, w, p), w)
    for name, loss in LOSSES.items():
        hidden, weight = (p[k].clone().requires_grad_() for k in ("hidden", "weight"))
        out = loss(hidden, weight, p)
        gradients = torch.autograd.grad(out, (hidden, weight))
        expected |= {f"tp {name} {k}": x for k, x in zip(("hidden", "weight"), gradients, strict=True)}
        if name == "policy_loss":
            expected["loss"] = out.detach()
            expected |= {f"replicated, {reduce}": gradients[1] for reduce in ("mean", "sum")}
    for got in on_ranks(2, tmp_path, other_shards):
        says = [got.pop(str(i)) for i in range(8)]
        for message, words in zip(says[::2], REFUSED, strict=True):
            assert re.search(words, message) and "\n" not in message
        assert says[::2] == says[1::2] and got.keys() == expected.keys()
        for key, x in got.items():
            assert error(x, expected[key]) < (2.5e-3 if key == "bf16" else 1e-6), key
