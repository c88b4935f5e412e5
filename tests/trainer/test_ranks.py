"""Promises of a learner on several ranks: the gradient, the scores and the weights are those of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from training import MODELS, NoClock, config, error, make_model, oracle, sequences
from transformers.utils import logging as transformers_logging

import trainer.learner
from trainer import ranks as ranks_module
from trainer.config import Config, ModelConfig
from trainer.learner import Learner
from trainer.ranks import Ranks
from trainer.sharding import gathered, like
from trainer.shares import IDLE, rounds
from trainer.types import TrainBatch, TrainSequence

Results = dict[str, Any]
FEW = 45  # tokens of a micro-batch: several to each of three ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: make_model(kind, tmp_path_factory.mktemp(kind)) for kind in MODELS}


def _start(rank: int, size: int, folder: str, work: Callable[[Ranks], Results]) -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    ranks = ranks_module.join(60)
    torch.save(work(ranks), f"{folder}/{rank}.pt")
    ranks_module.leave(ranks)


def free_port() -> str:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def on_ranks(
    size: int, folder: Path, work: Callable[[Ranks], Results], monkeypatch: pytest.MonkeyPatch
) -> list[Results]:
    """What each of `size` processes made."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free_port())
    mp.spawn(_start, (size, str(folder), work), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def case(kind: str, dtype: str = "float32", count: int | None = None, **learner: Any) -> tuple[Any, ...]:
    """(model, config, the batch's sequences)."""
    c = replace(config(**{"micro_batch_tokens": FEW, **learner}), model=ModelConfig(dtype=dtype))  # type: ignore[arg-type]
    return kind, c, sequences(seed=1)[:count]


CASES = {
    "tied": case("tied"),
    "tied, one row each": case("tied", micro_batch_tokens=9),
    "tied, an empty rank": case("tied", count=1, grad_clip=0.05),
    "tied, bfloat16": case("tied", "bfloat16"),
    "untied": case("untied", grad_clip=0.05),
    "untied, checkpointed": case("untied", checkpoint_activations=True),
    "untied, bfloat16, checkpointed": case("untied", "bfloat16", checkpoint_activations=True),
    "tied, vocabulary split": case("tied", vocab_parallel=True, count=5),
    "untied, vocabulary split": case("untied", vocab_parallel=True, grad_clip=0.05),
    "untied, bfloat16, vocabulary split, empty": case("untied", "bfloat16", count=1, vocab_parallel=True),
    "experts": case("moe"),
    "experts, bfloat16": case("moe", "bfloat16"),
}


def one_step(model_dir: str, c: Config, batch: tuple[TrainSequence, ...], ranks: Ranks | None) -> Results:
    """Scores, then an optimizer step: its gradient, its metrics and the weights after it."""
    one = Learner(c, model_dir, NoClock(), None, ranks)  # type: ignore[arg-type]
    gradient: dict[str, torch.Tensor] = {}
    update = one._update

    def keep(parts: Any) -> tuple[float, float]:
        for (name, weight), part in zip(one.weights.items(), one.parameters, strict=True):
            gradient[name] = gathered(like(weight, part.grad), torch.float32).clone()  # type: ignore[arg-type]
        return update(parts)

    one._update = keep  # type: ignore[method-assign]
    scores = one.score(batch)
    metrics = one.train(TrainBatch(1, batch, {}))
    weights = {name: gathered(w, torch.float32).clone() for name, w in one.weights.items()}
    return {"gradient": gradient, "weights": weights, "scores": scores, "metrics": metrics}


def all_cases(models: dict[str, str], ranks: Ranks) -> dict[str, Results]:
    results = {name: one_step(models[kind], c, batch, ranks) for name, (kind, c, batch) in CASES.items()}
    if ranks.size == 2:  # as on two machines of one rank each
        two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for name in ("tied, bfloat16", "untied, vocabulary split"):
            kind, c, batch = CASES[name]
            results[f"{name}, two machines"] = one_step(models[kind], c, batch, replace(ranks, mesh=two))
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_do_what_one_does(
    size: int, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = on_ranks(size, tmp_path, partial(all_cases, models), monkeypatch)

    def all_of_them(batch: Any, budget: int, ranks: int) -> list[Any]:
        """The same micro-batches on one rank: in bfloat16 each rounds its gradients."""
        return [(m,) for share in rounds(batch, budget, size) for m in share if m is not IDLE]

    monkeypatch.setattr(trainer.learner, "rounds", all_of_them)
    for name, ours in got[0].items():
        kind, c, batch = CASES[name.removesuffix(", two machines")]
        one = one_step(models[kind], c, batch, None)
        assert error(ours["gradient"], one["gradient"]) < 1e-5, name
        if c.model.dtype == "float32":
            assert error(ours["gradient"], oracle(models[kind], batch, 2.0)[1]) < 1e-5, name
        step = {n: w - gathered for n, w, gathered in _moved(models[kind], one["weights"])}
        ours_step = {n: w - gathered for n, w, gathered in _moved(models[kind], ours["weights"])}
        assert error(ours_step, step) < 1e-3, name
        for a, b in zip(ours["scores"], one["scores"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=name)
        for key, value in one["metrics"].items():
            if not key.startswith(("learner/seconds", "learner/tokens_per_s", "learner/padding")):
                assert ours["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)
        for other in got[1:]:
            assert all(torch.equal(ours["weights"][n], w) for n, w in other[name]["weights"].items()), name
            assert other[name]["metrics"]["learner/grad_norm"] == ours["metrics"]["learner/grad_norm"]


def _moved(model_dir: str, weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    before = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters())
    return [(n, w, before[n].detach()) for n, w in weights.items()]
