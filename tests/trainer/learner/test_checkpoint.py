"""Promises of checkpoints: whole or not at all, and a resume continues bit for bit."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import training
from fakes import having
from training import MODELS, make_model, of_the_data, plain_logprobs, same, scored, sequences, weights_of
from transformers import AutoModelForCausalLM

from trainer import run_folder
from trainer.beginning import checkpoint_state
from trainer.config import Config, ConfigError, CriticConfig, LearnerConfig, LoraConfig
from trainer.controller.journal import oldest_group
from trainer.learner import checkpoint
from trainer.learner.learner import Learner
from trainer.run_folder import checkpoints, damage
from trainer.types import TrainBatch

TOKENIZER: Any = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer.json").write_text("{}"))


def learner(model_dir: str | Path, resume_from: Path | None = None) -> Learner:
    return training.learner(model_dir, training.config(lr=1e-2), resume_from)


def batch(step: int) -> TrainBatch:
    return TrainBatch(step, scored(sequences(step, step - 1)), {})


def save(one: Learner, path: Path, state: dict[str, Any] | None = None) -> None:
    state = state or {"version": one.version}
    checkpoint.save(
        path, one.model.lm, TOKENIZER, one.weights, one.networks, one.version, state, one.ranks, one.adapter
    )


CASES = {
    "a warm-up": {"learner": {"warmup_steps": 3}},
    "a course": {"learner": {"schedule": "linear"}, "pipeline": {"steps": 4}},
    "a critic, float16": {
        "model": {"dtype": "float16"},
        "objective": {"critic": CriticConfig(body="own", dtype="float16")},
    },
    "a shared critic": {"objective": {"critic": CriticConfig(body="shared")}},
    "LoRA": {"model": {"lora": LoraConfig(rank=3)}},
    "LoRA, bfloat16": {"model": {"lora": LoraConfig(rank=3), "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_learner_goes_on_bit_for_bit(case: str, model_dir: str, tmp_path: Path) -> None:
    c, path = having(training.config(lr=1e-2), **CASES[case]), tmp_path / "step-000002"
    c = having(c, model={"path": model_dir})  # of which LoRA's frozen base is
    unbroken = training.learner(model_dir, c)
    torch.rand(5)
    for network in unbroken.networks.values():
        network.scale.state[0] *= 2**network.scale.dynamic  # a scale that is not the first
    for step in (1, 2):
        unbroken.train(batch(step))
    save(unbroken, path)
    random = torch.get_rng_state()
    resumed = training.learner(path, c, path)
    assert torch.equal(torch.get_rng_state(), random)
    assert resumed.version == 2 and same(weights_of(resumed), weights_of(unbroken))
    for step in (3, 4):
        theirs, ours = unbroken.train(batch(step)), resumed.train(batch(step))
        assert of_the_data(ours) == of_the_data(theirs)
    for ours, theirs in zip(resumed.networks.values(), unbroken.networks.values(), strict=True):
        assert torch.equal(ours.scale.state, theirs.scale.state)
    assert same(weights_of(resumed), weights_of(unbroken))


def test_a_resume_takes_the_optimizers_settings_of_today(model_dir: str, tmp_path: Path) -> None:
    one = learner(model_dir)
    one.train(batch(1))
    save(one, tmp_path / "step-000001")
    today = LearnerConfig(lr=2e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.5)
    resumed = training.learner(
        model_dir, replace(training.config(), learner=today), str(tmp_path / "step-000001")
    )
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-3, (0.8, 0.9), 1e-7, 0.5)
    assert len(resumed.optimizer.state) == len(resumed.parameters)  # the moments are those of the checkpoint


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_is_a_hugging_face_model_with_the_same_logits(kind: str, tmp_path: Path) -> None:
    one = learner(make_model(kind, tmp_path / kind))
    one.train(batch(1))
    save(one, tmp_path / "step-000001")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "step-000001")
    s = batch(1).sequences[0]
    expected = plain_logprobs(lm, s.prompt_ids, s.token_ids).numpy()
    np.testing.assert_allclose(one.score([s])[0].logprobs, expected, atol=1e-5)


FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    ("breaks", "error", "says"),
    [
        ("state", FULL, "no space left for the checkpoint .*{}"),
        ("weights", FULL, "no space left for the checkpoint .*{}"),
        ("state", READ_ONLY, "cannot write .*Read-only file system.*{}"),  # torch wraps it in no `Exception`
    ],
)
def test_what_cannot_be_written_is_one_line_and_leaves_the_older_checkpoint(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str, error: OSError, says: str
) -> None:
    one, folder = learner(model_dir), tmp_path / "checkpoints"
    save(one, folder / "step-000001")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(*((torch, "save") if breaks == "state" else (one.model.lm, "save_pretrained")), fail)
    for name in ("step-000001", "step-000002"):
        with pytest.raises(ConfigError, match=says.format(name) + "; older ones are whole"):
            save(one, folder / name)
    assert [p.name for p in folder.iterdir()] == ["step-000001"]
    assert learner(model_dir, folder / "step-000001").version == 0
    shard = next((folder / "step-000001" / "state").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="state: cannot be read: "):
        learner(model_dir, folder / "step-000001")


def test_the_newest_and_those_for_good_are_kept_and_hold_no_journal(model_dir: str, tmp_path: Path) -> None:
    one, folder = learner(model_dir), tmp_path / "checkpoints"
    assert run_folder.latest(tmp_path) is None
    for step in (2, 10, 10, 9, 5):  # 10 is saved again
        state = {"version": 0, "group_id": step} | ({"kept": 0.5} if step == 2 else {})
        save(one, folder / f"step-{step:06d}", state)
    (folder / "step-000011").mkdir()  # no controller.json: not one of ours, or broken
    (folder / ".step-000012.123").mkdir()  # a killed process left it
    assert run_folder.latest(tmp_path) == folder / "step-000010"
    checkpoint.prune(tmp_path, 2)
    assert sorted(p.name[-2:] for p in folder.iterdir()) == ["02", "09", "10", "11"]
    assert [int(p.name[-2:]) for p in checkpoints(tmp_path)] == [2, 9, 10]
    assert oldest_group(str(tmp_path), 99) == 9


def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_one_before_it_is_used(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, folders = learner(model_dir), [tmp_path / "checkpoints" / f"step-{i:06d}" for i in range(6)]
    for path in folders:
        save(one, path, {"version": 0, "group_id": int(path.name[-1])})
    assert not any(map(damage, folders))
    config = Config(run_dir=str(tmp_path))
    capsys.readouterr()
    assert checkpoint_state(config, set_aside=True)["group_id"] == 5 and not capsys.readouterr().err
    (folders[5] / "controller.json").write_text('{"group')
    (folders[4] / "model.safetensors").unlink()
    shard = next((folders[3] / "state").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    weights = folders[2] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1  # a single bit
    weights.write_bytes(content)
    (folders[1] / "checksums.json").write_text("{")
    assert checkpoint_state(config, set_aside=False)["group_id"] == 0 and len(checkpoints(tmp_path)) == 6
    assert checkpoint_state(config, set_aside=True)["group_id"] == 0
    said = capsys.readouterr().err.splitlines()[5:]
    expected = (
        "controller.json has", "model.safetensors is missing", "distcp has", "model.safetensors is corrupt",
        "not readable",
    )  # fmt: skip
    for line, path, why in zip(said, reversed(folders[1:]), expected, strict=True):
        assert str(path) in line and why in line and "the checkpoint before it is used" in line
    assert checkpoints(tmp_path) == folders[:1] and oldest_group(str(tmp_path), 9) == 0
    shutil.rmtree(folders[0])
    save(one, folders[1])
    (folders[1] / "tokenizer.json").write_text("{ }")
    with pytest.raises(ConfigError, match="holds no checkpoint that is whole"):
        checkpoint_state(config, set_aside=True)
