"""Promises of leaving a GPU: nothing of it stays there, and what comes back is what left, bit for bit.

On a CPU storages are freed and made again just so; that a card's memory is then free to others is not shown.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import on_ranks
from training import NoClock, config, make_model, sequences

from trainer.config import Config
from trainer.learner.learner import Learner
from trainer.learner.offload import Offload
from trainer.learner.ranks import Ranks
from trainer.learner.sharding import gathered
from trainer.types import TrainBatch


def test_tensors_that_share_memory_leave_once_and_come_back_as_the_objects_they_were() -> None:
    whole = torch.randn(40, 3)
    part, other = torch.nn.Parameter(whole[10:20]), torch.randn(7, dtype=torch.bfloat16)
    before = [t.detach().clone() for t in (whole, part, other)]
    pointer, offload = part.untyped_storage()._cdata, Offload()
    for _ in range(2):
        offload.away([whole, part, other])
        assert [t.untyped_storage().nbytes() for t in (whole, part, other)] == [0, 0, 0]
        offload.away([part])  # away already
        offload.back([part, whole, other])
        assert all(torch.equal(a, b) for a, b in zip((whole, part, other), before, strict=True))
    assert part.untyped_storage()._cdata == pointer == whole.untyped_storage()._cdata
    whole[10] = 5.0
    assert (part[0] == 5.0).all()
    before = whole.clone()
    offload.away([whole])
    offload.back([other])  # what is here stays as it is
    offload.back([whole])
    assert torch.equal(whole, before)  # what changed since the first time has travelled too


def colocated(c: Config) -> Config:
    return replace(c, engine=replace(c.engine, colocate=True))


def three_steps(model_dir: str, c: Config, ranks: Ranks | None) -> dict[str, Any]:
    """Weights and moments after three steps and a scoring, and the bytes held between them."""
    one = Learner(c, model_dir, NoClock(), None, ranks)  # type: ignore[arg-type]
    if ranks is None:  # on a CPU its weights lie in the mapped file still, on a GPU in memory of their own
        for p in one.parameters:
            p.data = p.data.clone()
    held = []
    for step in (1, 2, 3):
        with one.on_device():
            one.train(TrainBatch(step, sequences(seed=step, version=step - 1), {}))
        held.append(sum(t.untyped_storage().nbytes() for t in [*one.parameters, *one._moments()]))
        with one.on_device(moments=False):
            scores = one.score(sequences())
            held.append(sum(t.untyped_storage().nbytes() for t in one._moments()))
    with one.on_device():
        weights = {name: gathered(w, torch.float32).clone() for name, w in one.weights.items()}
        moments = [m.clone() for m in one._moments()]
    return {"weights": weights, "moments": moments, "scores": scores, "held": held}


def check(away: dict[str, Any], stayed: dict[str, Any]) -> None:
    assert set(away["held"]) == {0} and min(stayed["held"]) > 0
    assert len(away["moments"]) == 2 * len(away["weights"])
    for a, b in zip(away["moments"], stayed["moments"], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(away["weights"][n], w) for n, w in stayed["weights"].items())
    assert all((a == b).all() for a, b in zip(away["scores"], stayed["scores"], strict=True))


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_learner_that_leaves_between_its_steps_trains_the_same_bits(kind: str, tmp_path: Path) -> None:
    model_dir = make_model(kind, tmp_path)
    check(three_steps(model_dir, colocated(config()), None), three_steps(model_dir, config(), None))


def both(model_dir: str, ranks: Ranks) -> dict[str, Any]:
    return {name: three_steps(model_dir, c, ranks) for name, c in CONFIGS.items()}


CONFIGS = {"away": colocated(config()), "stayed": config()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_so_do_sharded_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_model(kind, tmp_path)
    for results in on_ranks(2, tmp_path, partial(both, model_dir), monkeypatch):
        check(results["away"], results["stayed"])
