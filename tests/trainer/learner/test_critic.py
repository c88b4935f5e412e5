"""Promises of the critic: it learns, in any packing, precision and number of ranks, beside the policy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training
from safetensors.torch import load_file
from test_ranks import FEW, on_ranks
from torch import Tensor
from training import config, error, gradients_of_step, of_the_data, same, save, sequences, weights_of
from transformers import AutoModelForCausalLM

from trainer.config import Config, ConfigError, CriticConfig, ObjectiveConfig
from trainer.learner.critic import value_term
from trainer.learner.learner import Learner
from trainer.learner.ranks import Ranks
from trainer.learner.weight_file import WeightFiles
from trainer.types import TrainBatch, TrainSequence

BODIES = ["own", "shared"]


@pytest.fixture
def model_dir(models: dict[str, str]) -> str:
    return models["untied"]


def settings(body: Any = "own", dtype: Any = "float32", **learner: Any) -> Config:
    critic = CriticConfig(body=body, dtype=dtype, lr=learner.pop("critic_lr", 1e-3), value_clip=0.1)
    return replace(config(**learner), objective=ObjectiveConfig(max_ratio=2.0, critic=critic))


def learner(
    model_dir: str, c: Config, resume_from: Path | None = None, ranks: Ranks | None = None
) -> Learner:
    """One whose value head is not zero, so that the body has a gradient from the start."""
    one = training.learner(model_dir, c, resume_from, ranks)
    assert one.critic is not None
    if resume_from is None:
        torch.manual_seed(1)
        for name, weight in one.critic.optimizer.weights.items():
            if name.removeprefix("head.") in ("weight", "bias"):
                weight.data.copy_(torch.randn(weight.shape) / 4)
    return one


def batch(step: int = 1, seed: int = 0) -> TrainBatch:
    """Returns that depend on prompt and position; old values near what a network says, or far."""
    rng = np.random.default_rng(seed)

    def with_values(s: TrainSequence) -> TrainSequence:
        n = len(s.token_ids)
        returns = len(s.prompt_ids) / 5 - 1 + np.arange(n) / 10
        columns = rng.normal(0, 0.3, n), returns
        return replace(s, values=columns[0].astype(np.float32), returns=columns[1].astype(np.float32))

    return TrainBatch(step, tuple(with_values(s) for s in sequences(seed, step - 1)), {})


def gradient(one: Learner, b: TrainBatch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metrics of a step, and the gradients of policy and critic it was taken with."""
    metrics, gradients = gradients_of_step(one, b)
    return metrics, {f"{network} {n}": g for network, named in gradients.items() for n, g in named.items()}


def of_critic(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g for name, g in gradients.items() if name.startswith("critic")}


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
    c = replace(settings(body, critic_lr=1e-2), pipeline=replace(config().pipeline, max_lag=99))
    c = replace(c, objective=replace(c.objective, critic=replace(c.objective.critic, value_clip=0.0)))
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
    whole, one = gradient(learner(model_dir, settings(body)), batch())
    parts, several = gradient(learner(model_dir, settings(body, micro_batch_tokens=19)), batch())
    assert parts["learner/micro_batches"] > 4 and error(several, one) < 1e-5
    assert 0 < whole["critic/clipped"] < 1
    assert {k: parts[k] for k in parts if k.startswith("critic/")} == pytest.approx(
        {k: whole[k] for k in whole if k.startswith("critic/")}, rel=1e-5
    )
    _, checkpointed = gradient(learner(model_dir, settings(body, checkpoint_activations=True)), batch())
    assert error(checkpointed, one) < 1e-5


def test_a_policy_learns_the_same_beside_a_critic_of_its_own(model_dir: str) -> None:
    """The critic's gradient and its clipping leave the policy's alone."""
    c = settings(grad_clip=0.05)
    alone = training.learner(model_dir, replace(c, objective=ObjectiveConfig(max_ratio=2.0)))
    both = learner(model_dir, c)
    a, b = alone.train(batch()), both.train(batch())
    assert a["learner/grad_norm"] == b["learner/grad_norm"] and b["critic/grad_norm"] > 0.05
    assert all(torch.equal(w, both.weights[n]) for n, w in alone.weights.items())


@pytest.mark.axis("objective.critic.dtype", "bfloat16", "float16")
def test_16_bits_are_near_32_and_float16_is_nearer(model_dir: str) -> None:
    """float16 has 11 significant bits, bfloat16 8: rounding errors are 8 times as large."""
    exact = learner(model_dir, settings())
    values = np.concatenate([x.values for x in exact.score(batch().sequences)])  # type: ignore[misc]
    _, expected = gradient(exact, batch())
    gaps, errors = {}, {}
    for dtype in ("bfloat16", "float16"):
        one = learner(model_dir, settings(dtype=dtype))
        ours = np.concatenate([x.values for x in one.score(batch().sequences)])  # type: ignore[misc]
        gaps[dtype] = float(np.abs(ours - values).mean())
        errors[dtype] = error(of_critic(gradient(one, batch())[1]), of_critic(expected))
        assert all(w.dtype == torch.float32 for w in one.networks["critic"].parameters)
    assert 1e-5 < gaps["float16"] < gaps["bfloat16"] / 4 < 0.02
    assert errors["float16"] < errors["bfloat16"] / 4 < 0.05


def test_float16_scales_its_loss_and_repeats_a_step_that_overflows(model_dir: str) -> None:
    small = replace(batch(), sequences=tuple(
        replace(s, token_weights=s.token_weights / 1e4) for s in batch().sequences
    ))  # fmt: skip
    _, expected = gradient(learner(model_dir, settings()), small)
    one = learner(model_dir, settings(dtype="float16"))
    scale = one.networks["critic"].scale
    assert scale.value == 2**16
    metrics, scaled = gradient(one, small)
    assert error(of_critic(scaled), of_critic(expected)) < 0.01 and scale.value == 2**16
    scale.state[0] = 2.0**40  # whose gradients overflow
    metrics = one.train(batch(2))
    assert np.isfinite(metrics["critic/grad_norm"]) and 1 < scale.value < 2**30 and one.version == 2
    none = learner(model_dir, settings(dtype="float16"))
    none.networks["critic"].scale.state[0] = 1.0
    assert error(of_critic(gradient(none, small)[1]), of_critic(expected)) > 0.02  # small gradients vanish


@pytest.mark.parametrize("body", BODIES)
def test_a_step_whose_value_loss_is_not_finite_is_skipped_and_changes_nothing(
    model_dir: str, body: str
) -> None:
    one, b = learner(model_dir, settings(body)), batch()
    assert b.sequences[0].returns is not None
    b.sequences[0].returns[0] = np.inf
    before = weights_of(one)
    for step in (1, 2):
        why = one.train(replace(b, step=step))["learner/skipped_why"]
        assert why.startswith("the critic's loss is inf")
    with pytest.raises(ConfigError, match=r"step 3: the critic's loss is inf.* Lower objective\.critic\.lr"):
        one.train(replace(b, step=3))
    assert same(weights_of(one), before)
    assert one.version == 2 and not any(network.adamw.state for network in one.networks.values())
    assert one.train(replace(batch(), step=3))["learner/skipped_steps"] == 0


@pytest.mark.parametrize(("body", "dtype"), [("own", "float16"), ("shared", "float32")])
def test_a_resumed_critic_goes_on_bit_for_bit(model_dir: str, tmp_path: Path, body: str, dtype: str) -> None:
    c = settings(body, dtype)
    unbroken = learner(model_dir, c)
    unbroken.networks["critic"].scale.state[0] *= 2 ** (dtype == "float16")
    unbroken.train(batch(1))
    path = tmp_path / "step-000001"
    save(unbroken, path)
    resumed = learner(str(path), c, path)
    assert resumed.networks["critic"].scale.value == unbroken.networks["critic"].scale.value
    for step in (2, 3):
        theirs, ours = unbroken.train(batch(step, step)), resumed.train(batch(step, step))
        assert of_the_data(ours) == of_the_data(theirs)
    assert same(weights_of(resumed), weights_of(unbroken))


@pytest.mark.parametrize("body", BODIES)
def test_engines_and_the_hugging_face_folder_get_the_policy_alone(
    model_dir: str, tmp_path: Path, body: str
) -> None:
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


CASES = {
    "own": settings("own", micro_batch_tokens=FEW, grad_clip=0.05),
    "own, bfloat16": settings("own", "bfloat16", micro_batch_tokens=FEW),
    "own, float16, checkpointed": settings(
        "own", "float16", micro_batch_tokens=FEW, checkpoint_activations=True
    ),
    "shared": settings("shared", micro_batch_tokens=FEW),
    "shared, vocabulary split": settings("shared", micro_batch_tokens=FEW, vocab_parallel=True),
}


def one_step(model_dir: str, c: Config, ranks: Ranks | None) -> dict[str, Any]:
    one = learner(model_dir, c, None, ranks)
    values = [x.values for x in one.score(batch().sequences)]
    metrics, gradients = gradient(one, batch())
    return {"values": values, "metrics": metrics, "gradients": gradients}


def all_cases(model_dir: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    results = {name: one_step(model_dir, c, ranks) for name, c in CASES.items()}
    for body in BODIES:  # goes on from a checkpoint of one rank
        resumed = learner(model_dir, CASES[body], folder / body, ranks)
        resumed.train(batch(2))
        results[f"{body} resumed"] = weights_of(resumed)
    return results


@pytest.mark.slow
def test_two_ranks_are_one(model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken: dict[str, dict[str, Tensor]] = {}
    for body in BODIES:
        one = learner(model_dir, CASES[body])
        one.train(batch(1))
        save(one, tmp_path / body)
        one.train(batch(2))
        unbroken[body] = weights_of(one)
    got, other = on_ranks(2, tmp_path, partial(all_cases, model_dir, tmp_path), monkeypatch)
    for name, c in CASES.items():
        alone, ours = one_step(model_dir, c, None), got[name]
        exact = c.objective.critic.dtype == "float32"
        assert error(ours["gradients"], alone["gradients"]) < (1e-5 if exact else 0.02), name
        for a, b in zip(ours["values"], alone["values"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 if exact else 0.02, err_msg=name)
        for key in ("loss", "explained_variance", "clipped", "grad_norm"):
            value = alone["metrics"][f"critic/{key}"]
            tolerance = 1e-5 if exact else 0.02
            assert ours["metrics"][f"critic/{key}"] == pytest.approx(value, rel=tolerance), (name, key)
            assert other[name]["metrics"][f"critic/{key}"] == ours["metrics"][f"critic/{key}"]
    for body in BODIES:
        for n, w in unbroken[body].items():
            torch.testing.assert_close(got[f"{body} resumed"][n], w, rtol=0, atol=2e-6, msg=n)
