"""Promises of offloading: no memory stays on the GPU, and every bit comes back.

On a CPU storages are freed and allocated in the same way; that other processes can then use a GPU's memory is
not tested.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import having
from test_ranks import on_ranks
from training import config, learner, same, sequences, weights_of

from trainer.config import Config
from trainer.learner.offload import Offload
from trainer.learner.ranks import Ranks
from trainer.types import TrainBatch


def test_tensors_that_share_memory_are_offloaded_once_and_remain_the_same_objects() -> None:
    whole = torch.randn(40, 3)
    part, other = torch.nn.Parameter(whole[10:20]), torch.randn(7, dtype=torch.bfloat16)
    before = [t.detach().clone() for t in (whole, part, other)]
    pointer, offload = part.untyped_storage()._cdata, Offload()
    for _ in range(2):
        offload.offload([whole, part, other])
        assert [t.untyped_storage().nbytes() for t in (whole, part, other)] == [0, 0, 0]
        offload.offload([part])  # already offloaded
        offload.reload([part, whole, other])
        assert all(torch.equal(a, b) for a, b in zip((whole, part, other), before, strict=True))
    assert part.untyped_storage()._cdata == pointer == whole.untyped_storage()._cdata
    whole[10] = 5.0
    assert (part[0] == 5.0).all()
    before = whole.clone()
    offload.offload([whole])
    offload.reload([other])  # not offloaded: it stays as it is
    offload.reload([whole])
    assert torch.equal(whole, before)  # changes since the first time are kept


def three_steps(model_dir: str, c: Config, ranks: Ranks | None) -> dict[str, Any]:
    """Weights, moments and scores after three steps, and the bytes held between them."""
    one = learner(model_dir, c, None, ranks)
    if ranks is None:  # on a CPU its weights are in the mapped file, on a GPU in memory of their own
        for p in one.parameters:
            p.data = p.data.clone()
    held = []
    for step in (1, 2, 3):
        with one.on_device():
            one.train(TrainBatch(step, sequences(seed=step, version=step - 1), {}))
        held.append(sum(t.untyped_storage().nbytes() for t in [*one.parameters, *one.policy.moments()]))
        with one.on_device(moments=False):
            scores = [x.logprobs for x in one.score(sequences())]
            held.append(sum(t.untyped_storage().nbytes() for t in one.policy.moments()))
    with one.on_device():
        weights = weights_of(one)
        moments = [m.clone() for m in one.policy.moments()]
    return {"weights": weights, "moments": moments, "scores": scores, "held": held}


def check(offloaded: dict[str, Any], stayed: dict[str, Any]) -> None:
    assert set(offloaded["held"]) == {0} and min(stayed["held"]) > 0
    assert len(offloaded["moments"]) == 2 * len(offloaded["weights"])
    for a, b in zip(offloaded["moments"], stayed["moments"], strict=True):
        assert torch.equal(a, b)
    assert same(offloaded["weights"], stayed["weights"])
    assert all((a == b).all() for a, b in zip(offloaded["scores"], stayed["scores"], strict=True))


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_learner_offloaded_between_steps_trains_the_same_bits(kind: str, models: dict[str, str]) -> None:
    results = (three_steps(models[kind], CONFIGS[name], None) for name in ("offloaded", "stayed"))
    check(*results)


def both(model_dir: str, ranks: Ranks) -> dict[str, Any]:
    return {name: three_steps(model_dir, c, ranks) for name, c in CONFIGS.items()}


CONFIGS = {"offloaded": having(config(), engine={"colocate": True}), "stayed": config()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_so_do_sharded_ranks(kind: str, models: dict[str, str], tmp_path: Path) -> None:
    for results in on_ranks(2, tmp_path, partial(both, models[kind])):
        check(results["offloaded"], results["stayed"])
