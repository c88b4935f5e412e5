"""Promises of the learner: exact gradients however packed, refusals that change nothing."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import having
from training import (
    config,
    error,
    gradients_of_step,
    learner,
    make_model,
    of_the_data,
    oracle,
    plain_logprobs,
    same,
    scored,
    sequences,
    weights_of,
)
from transformers import AutoModelForCausalLM

from kernels import NonFiniteError
from trainer.config import ConfigError, CriticConfig
from trainer.learner.statistics import lag_histogram
from trainer.types import TrainBatch

BUDGETS = {1: 4096, 2: 80, 7: 19}


@pytest.mark.parametrize("micro_batches", BUDGETS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_is_the_oracles_for_any_number_of_micro_batches(
    model_dir: str, micro_batches: int, checkpointing: bool
) -> None:
    batch = sequences(seed=1)
    c = config(micro_batch_tokens=BUDGETS[micro_batches], checkpoint_activations=checkpointing)
    metrics, gradients = gradients_of_step(learner(model_dir, c), TrainBatch(1, batch, {}))
    assert metrics["learner/micro_batches"] == micro_batches
    assert metrics["learner/tokens"] == sum(int((s.token_weights > 0).sum()) for s in batch)
    assert error(gradients["policy"], oracle(model_dir, batch, 2.0)[1]) < 1e-5


def test_ratio_is_one_on_the_models_own_logprobs(model_dir: str) -> None:
    one = learner(model_dir)
    batch = sequences()
    scores = one.score(batch)
    own = tuple(replace(s, logprobs_gen=x.logprobs) for s, x in zip(batch, scores, strict=True))
    metrics = one.train(TrainBatch(1, own, {}))
    assert abs(metrics["ratio/max"] - 1) < 1e-4 and abs(metrics["ratio/min"] - 1) < 1e-4
    for i, s in enumerate(own):  # each loss token's log ratio and entropy, as the journal gets them
        weighted = int((s.token_weights != 0).sum())
        tokens = one.tokens.get(i, np.zeros((2, 0)))
        assert tokens.shape == (2, weighted) and abs(tokens[0]).max(initial=0) < 1e-4
    entropies = np.concatenate([x[1] for x in one.tokens.values()])
    assert entropies.mean(dtype=float) == pytest.approx(metrics["learner/entropy"], rel=1e-3)
    assert abs(metrics["kl/k1"]) < 1e-5 and metrics["ratio/ess"] == pytest.approx(1, abs=1e-6)


def test_score_is_plain_transformers_for_every_token(model_dir: str) -> None:
    batch = sequences()
    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for s, got in zip(batch, learner(model_dir, config(micro_batch_tokens=50)).score(batch), strict=True):
        expected = plain_logprobs(lm, s.prompt_ids, s.token_ids).numpy()
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)


def test_clipping_is_that_of_torch(model_dir: str) -> None:
    gradient = gradients_of_step(learner(model_dir), TrainBatch(1, sequences(), {}))[1]["policy"]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradient.values()]
    for p, g in zip(parameters, gradient.values(), strict=True):
        p.grad = g
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 0.05))
    assert norm > 0.1
    for clip in (0.05, 2 * norm, 0.0):  # the last two leave the gradient as it is
        one = learner(model_dir, config(grad_clip=clip))
        one.train(TrainBatch(1, sequences(), {}))
        for ours, p in zip(one.parameters, parameters, strict=True):
            assert p.grad is not None
            used = one.optimizer.state[ours]["exp_avg"] / 0.1  # 1 - beta1: AdamW's own step hides the scale
            expected = p.grad if clip == 0.05 else p.grad * norm / 0.05
            torch.testing.assert_close(used, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_a_frozen_weight_stays_and_the_others_learn_as_without_it(tmp_path: Path, name: str) -> None:
    folder, batch = make_model("untied", tmp_path), TrainBatch(1, sequences(), {})
    whole, one = learner(folder), learner(folder, config(freeze=(name.replace("model.embed", "*"),)))
    before = {n: w.detach().clone() for n, w in one.model.lm.named_parameters()}
    whole.train(batch)
    one.train(batch)
    learned, kept = (dict(x.model.lm.named_parameters()) for x in (whole, one))
    assert torch.equal(kept[name], before[name]) and not torch.equal(learned.pop(name), kept.pop(name))
    torch.testing.assert_close(kept, learned, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("pattern", "problem"), [("*embed", "no weight of"), ("*", "every weight that")])
def test_a_pattern_that_freezes_nothing_or_everything_is_refused(
    model_dir: str, pattern: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"learner.freeze '\{pattern}' is {problem}.* 'model.norm.weight'"):
        learner(model_dir, config(freeze=(pattern,)))


PROBLEMS = dict.fromkeys(("advantage", "weights"), ("NaN or infinity", "learner.lr")) | {
    "loss": ("loss is -?inf", "learner.lr"),
    "gradient": ("the gradient norm is nan", "learner.lr"),
    "own": ("the critic's loss is inf", "objective.critic.lr"),
    "shared": ("the critic's loss is inf", "objective.critic.lr"),
}


@pytest.mark.parametrize("where", PROBLEMS)
def test_a_non_finite_step_is_skipped_and_the_third_in_a_row_refused(model_dir: str, where: str) -> None:
    body: Any = where if where in ("own", "shared") else "none"
    one = learner(model_dir, having(config(), objective={"critic": CriticConfig(body=body)}))
    first, *rest = scored(sequences())
    problem, key = PROBLEMS[where]
    if body != "none":
        first = replace(first, returns=np.full(len(first.token_ids), np.inf, np.float32))
    elif where == "advantage":
        first = replace(first, advantages=first.advantages * np.nan)
    elif where == "weights":
        dict(one.model.lm.named_parameters())["model.norm.weight"].data[0] = np.inf
    elif where == "loss":
        huge = np.full(len(first.advantages), 3e38, np.float32)
        first = replace(first, advantages=huge, token_weights=huge)
    else:
        one.parameters[0].register_hook(lambda g: g * np.nan)
    before = weights_of(one)
    for step in (1, 2):
        metrics = one.train(TrainBatch(step, (first, *rest), {}))
        assert metrics["learner/skipped_steps"] == 1 and re.search(problem, metrics["learner/skipped_why"])
        assert np.isnan(metrics["learner/loss"]) and metrics["learner/tokens"] == 0 and one.version == step
    with pytest.raises(ConfigError, match=rf"step 3: .*{problem}.* nothing was updated\. Lower {key}"):
        one.train(TrainBatch(3, (first, *rest), {}))
    assert one.version == 2 and not any(network.adamw.state for network in one.networks.values())
    assert same(weights_of(one), before)


def test_a_refusal_depends_on_an_errors_class(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner(model_dir)

    def fail_with(error: Exception) -> None:
        def loss(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("trainer.learner.policy_model.policy_loss", loss)

    fail_with(NonFiniteError("the head overflows"))
    assert one.train(TrainBatch(1, sequences(), {}))["learner/skipped_why"] == "the head overflows"
    fail_with(ValueError("targets hold ids that are no token, NaN or infinity"))
    with pytest.raises(ValueError, match="targets hold ids"):
        one.train(TrainBatch(2, sequences(), {}))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_after_a_skipped_step_the_next_is_as_if_it_had_not_been(model_dir: str, dtype: str) -> None:
    one, other = (learner(model_dir, having(config(), model={"dtype": dtype})) for _ in range(2))
    other.train(TrainBatch(1, (), {}))
    hook = one.parameters[0].register_hook(lambda g: g * np.nan)
    assert one.train(TrainBatch(1, sequences(), {}))["learner/skipped_steps"] == 1
    hook.remove()
    assert one.policy.scale.value == other.policy.scale.value
    for step in (2, 3, 4):  # and they count as skipped in a row no more
        ours, theirs = (x.train(TrainBatch(step, sequences(step, step - 1), {})) for x in (one, other))
        assert of_the_data(ours) == of_the_data(theirs) and ours["learner/skipped_steps"] == 0
    assert same(weights_of(one), weights_of(other))


def test_a_batch_too_old_or_out_of_order_is_refused_with_its_numbers(model_dir: str) -> None:
    one = learner(model_dir)
    with pytest.raises(RuntimeError, match="step 3 came to a learner of version 0"):
        one.train(TrainBatch(3, sequences(), {}))
    one.version = 3
    with pytest.raises(RuntimeError, match=r"step 4: a token's lag is 3, above the bound of pipeline_rl: 2"):
        one.train(TrainBatch(4, sequences(), {}))


def test_lag_histogram_counts_loss_tokens(model_dir: str) -> None:
    s = sequences()[2]  # nine tokens, one of them unsampled
    mixed = replace(s, versions=np.array([2, 2, 2, 3, 3, 3, 3, 4, 4], np.int32))
    assert lag_histogram(TrainBatch(5, (mixed,), {}), 4) == {0: 2, 1: 4, 2: 2}


def test_an_empty_batch_advances_the_version_and_nothing_else(model_dir: str) -> None:
    one = learner(model_dir)
    before = weights_of(one)
    metrics = one.train(TrainBatch(1, (), {}))
    assert one.version == 1 and metrics["learner/loss"] == 0 and metrics["learner/tokens"] == 0
    assert same(weights_of(one), before)
