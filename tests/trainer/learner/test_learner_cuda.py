"""On a GPU: the learner computes what it does on a CPU, alone and as a rank of an NCCL group.

A rank of one proves that FSDP2's wrapping changes nothing; it moves no byte by NCCL. Two ranks on one GPU do,
where NCCL can be made to take them for two machines.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import Group, lone_rank, on_ranks, one_step
from training import MODELS, config, error, learner, make_model, oracle, sequences
from transformers import AutoModelForCausalLM

from trainer.config import ModelConfig
from trainer.learner.ranks import Ranks
from trainer.messages import Ack, Save, Shutdown, StepDone
from trainer.types import TrainBatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of the gradient, to float64; bfloat16: every layer rounds


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", MODELS)
def test_gradient_on_the_gpu_is_the_oracles(kind: str, dtype: Any, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    model_dir = make_model(kind, tmp_path)
    c = replace(config(micro_batch_tokens=45), model=ModelConfig(dtype=dtype))
    result = one_step(model_dir, c, sequences(seed=1), None)
    gradient = {name: g.cpu() for name, g in result["gradient"].items()}
    assert error(gradient, oracle(model_dir, sequences(seed=1), 2.0)[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_rank_of_one_does_what_the_learner_alone_does(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_model("tied", tmp_path)
    c = replace(config(micro_batch_tokens=45, checkpoint_activations=True), model=ModelConfig(dtype=dtype))
    alone = one_step(model_dir, c, sequences(), None)
    with lone_rank(monkeypatch) as ranks:
        assert ranks.device.type == "cuda"
        ranked = one_step(model_dir, c, sequences(), ranks)
    assert error(ranked["gradient"], alone["gradient"]) < 1e-4
    assert error(ranked["weights"], alone["weights"]) < 1e-5


def by_nccl(model_dir: str, ranks: Ranks) -> dict[str, Any]:
    """A step, or why NCCL refuses the GPU."""
    try:
        torch.distributed.all_reduce(torch.ones(1, device=ranks.device))
    except torch.distributed.DistError as e:
        return {"refused": str(e)}
    c = config(micro_batch_tokens=45, checkpoint_activations=True)
    return one_step(model_dir, c, sequences(), ranks)


def test_two_ranks_by_nccl_do_what_a_learner_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_model("tied", tmp_path)
    for name, value in {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}.items():
        monkeypatch.setenv(name, value)
    got = on_ranks(2, tmp_path, partial(by_nccl, model_dir))
    if refusal := got[0].get("refused"):
        pytest.skip(f"NCCL takes no two ranks of one GPU: {refusal.splitlines()[0]}")
    alone = one_step(model_dir, config(micro_batch_tokens=45, checkpoint_activations=True), sequences(), None)
    assert error(got[0]["gradient"], alone["gradient"]) < 1e-4
    for ranked in got:
        assert error(ranked["weights"], alone["weights"]) < 1e-5


def test_the_process_steps_and_saves_from_the_gpu(tmp_path: Path) -> None:
    model_dir = make_model("tied", tmp_path / "model")
    group = Group(replace(config(), run_dir=str(tmp_path)), model_dir, size=1)
    done = group.ask(TrainBatch(1, sequences(), {}))
    assert isinstance(done, StepDone) and Path(done.weights_path).is_file()
    path = tmp_path / "checkpoints" / "step-000001"
    assert group.ask(Save(str(path), {"version": 1})) == Ack()
    AutoModelForCausalLM.from_pretrained(path)
    resumed = learner(path, None, path)
    assert resumed.version == 1 and resumed.parameters[0].is_cuda
    group.conn.send(Shutdown())
    assert not group.failures(0)
