"""Promises of the critic: it learns, in any packing, precision and number of ranks, beside the policy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training
from fakes import having
from safetensors.torch import load_file
from training import config, error, gradients_of_step, save, scored, sequences, with_values
from transformers import AutoModelForCausalLM

from trainer.config import Config, ConfigError, CriticConfig
from trainer.learner.critic import value_term
from trainer.learner.learner import Learner
from trainer.learner.weight_file import WeightFiles
from trainer.types import TrainBatch

BODIES = ["own", "shared"]


@pytest.fixture
def model_dir(models: dict[str, str]) -> str:
    return models["untied"]


def settings(body: Any = "own", dtype: Any = "float32", critic: Any = None, **learner: Any) -> Config:
    critic = CriticConfig(body=body, dtype=dtype, **{"lr": 1e-3, "value_clip": 0.1, **(critic or {})})
    return having(config(**learner), objective={"critic": critic})


def learner(model_dir: str, c: Config, resume_from: Path | None = None) -> Learner:
    """One whose value head is not zero, so that the body has a gradient from the start."""
    one = training.learner(model_dir, c, resume_from)
    return with_values(one) if resume_from is None else one


def batch(step: int = 1, seed: int = 0) -> TrainBatch:
    return TrainBatch(step, scored(sequences(seed, step - 1), seed), {})


def test_the_value_term_is_as_worked_by_hand() -> None:
    # R = 1, V_old = 0, ε = ½. Plain: ½ (V − 1)². V = 2 moved too far: clipped to ½, whose error ½ is smaller
    # than 1. V = 1.2, clipped to ½: the larger error ½ counts, without a gradient. V = ¼ is inside.
    values = torch.tensor([2.0, 1.2, 0.25], requires_grad=True)
    term, clipped = value_term(values, torch.zeros(3), torch.ones(3), 0.5)
    assert term.tolist() == pytest.approx([1 / 2, 1 / 8, 9 / 32]) and clipped.tolist() == [False, True, False]
    term.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1, 0, -0.75]
    plain, clipped = value_term(values, torch.zeros(3), torch.ones(3), 0)
    assert plain.tolist() == pytest.approx([1 / 2, 0.02, 9 / 32]) and not clipped.any()


@pytest.mark.parametrize("body", BODIES)
def test_a_critic_learns(model_dir: str, body: str) -> None:
    c = having(settings(body, critic={"lr": 1e-2, "value_clip": 0.0}), pipeline={"max_lag": 99})
    one = training.learner(model_dir, c)
    metrics = [one.train(replace(batch(), step=step)) for step in range(1, 41)]
    explained = [m["critic/explained_variance"] for m in metrics]
    assert explained[0] == 0  # all values are 0
    assert explained[-1] > 0.8
    assert metrics[-1]["critic/loss"] < 0.2 * metrics[0]["critic/loss"]
    values = np.concatenate([x.values for x in one.score(batch().sequences)])  # type: ignore[misc]
    returns = np.concatenate([s.returns for s in batch().sequences])  # type: ignore[misc]
    assert np.corrcoef(values, returns)[0, 1] > 0.8


@pytest.mark.parametrize("body", BODIES)
def test_micro_batches_do_not_change_the_gradient(model_dir: str, body: str) -> None:
    whole, expected = gradients_of_step(learner(model_dir, settings(body)), batch())
    assert 0 < whole["critic/clipped"] < 1
    for more in ({"micro_batch_tokens": 19}, {"checkpoint_activations": True}):
        metrics, gradients = gradients_of_step(learner(model_dir, settings(body, **more)), batch())
        assert (metrics["learner/micro_batches"] > 4) == ("micro_batch_tokens" in more)
        for network, exact in expected.items():
            assert error(gradients[network], exact) < 1e-5
        for key in (key for key in whole if key.startswith("critic/")):
            assert metrics[key] == pytest.approx(whole[key], rel=1e-5)


def test_its_learning_rate_follows_the_policys_unless_it_is_set(model_dir: str) -> None:
    for rate, expected in ((None, 5 * 6e-4), (2e-5, 2e-5)):
        c = having(settings("own", critic={"lr": rate}, lr=6e-4, warmup_steps=2), pipeline={"max_lag": 99})
        one = learner(model_dir, c)
        one.train(batch())
        assert one.networks["critic"].adamw.param_groups[0]["lr"] == pytest.approx(expected / 2)  # warm-up


@pytest.mark.axis("objective.critic.dtype", "bfloat16", "float16")
def test_16_bits_are_near_32_and_float16_is_nearer(model_dir: str) -> None:
    """float16 has 11 significant bits, bfloat16 8: rounding errors are 8 times as large."""
    exact = learner(model_dir, settings())
    values = np.concatenate([x.values for x in exact.score(batch().sequences)])  # type: ignore[misc]
    expected = gradients_of_step(exact, batch())[1]["critic"]
    gaps, errors = {}, {}
    for dtype in ("bfloat16", "float16"):
        one = learner(model_dir, settings(dtype=dtype))
        ours = np.concatenate([x.values for x in one.score(batch().sequences)])  # type: ignore[misc]
        gaps[dtype] = float(np.abs(ours - values).mean())
        errors[dtype] = error(gradients_of_step(one, batch())[1]["critic"], expected)
        assert all(w.dtype == torch.float32 for w in one.networks["critic"].parameters)
    assert 1e-5 < gaps["float16"] < gaps["bfloat16"] / 4 < 0.02
    assert errors["float16"] < errors["bfloat16"] / 4 < 0.05


def test_float16_scales_its_loss_and_repeats_a_step_that_overflows(model_dir: str) -> None:
    small = replace(batch(), sequences=tuple(
        replace(s, token_weights=s.token_weights / 1e4) for s in batch().sequences
    ))  # fmt: skip
    expected = gradients_of_step(learner(model_dir, settings()), small)[1]["critic"]
    one = learner(model_dir, settings(dtype="float16"))
    scale = one.networks["critic"].scale
    assert scale.value == 2**16
    scaled = gradients_of_step(one, small)[1]["critic"]
    assert error(scaled, expected) < 0.01 and scale.value == 2**16
    scale.state[0] = 2.0**40  # whose gradients overflow
    metrics = one.train(batch(2))
    assert np.isfinite(metrics["critic/grad_norm"]) and 1 < scale.value < 2**30 and one.version == 2
    none = learner(model_dir, settings(dtype="float16"))
    none.networks["critic"].scale.state[0] = 1.0
    assert error(gradients_of_step(none, small)[1]["critic"], expected) > 0.02  # small gradients vanish


@pytest.mark.parametrize("body", BODIES)
def test_engines_and_the_model_folder_get_the_policy_alone(model_dir: str, tmp_path: Path, body: str) -> None:
    one = learner(model_dir, settings(body))
    one.train(batch())
    policy = {name for name, _ in AutoModelForCausalLM.from_pretrained(model_dir).named_parameters()}
    assert set(one.weights) == policy
    files = WeightFiles(str(tmp_path), 4 * sum(w.numel() for w in one.weights.values()), 1, torch.float32)
    assert set(load_file(files.write(one.weights, 1))) == policy
    files.close()
    save(one, tmp_path / "step-000001")
    assert set(load_file(tmp_path / "step-000001" / "model.safetensors")) == policy


def test_a_checkpoint_without_a_critic_does_not_make_one(model_dir: str, tmp_path: Path) -> None:
    alone = training.learner(model_dir)
    save(alone, tmp_path / "step-000000")
    with pytest.raises(ConfigError, match=r"checkpoint holds no critic; resume with the objective\.critic"):
        learner(model_dir, settings(), tmp_path / "step-000000")
    with_critic = learner(model_dir, settings())
    with_critic.train(batch())
    save(with_critic, tmp_path / "step-000001")
    again = training.learner(model_dir, None, tmp_path / "step-000001")
    assert again.version == 1 and again.critic is None
