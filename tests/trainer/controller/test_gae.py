"""Promises of generalised advantage estimation, worked by hand, and of the batch that is made with it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import rollout

from trainer.config import ConfigError, CriticConfig, KLConfig, ObjectiveConfig
from trainer.config.objective import check_objective
from trainer.controller.batch import Moments, build_batch
from trainer.controller.gae import gae
from trainer.types import Group, Prompt, TokenScores, TrainBatch

ALL = np.ones(3, bool)
KL_REWARD = KLConfig(coefficient=0.5, estimator="k1", place="reward")


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def test_gae_is_as_worked_by_hand() -> None:
    # δ = (½·2 − 1, ½·4 − 2, 8 − 4) = (0, 0, 4); γλ = ¼: Â = (¼·1, ¼·4, 4).
    advantages, returns = gae(np.array([0.0, 0, 8]), floats(1, 2, 4), ALL, 0.5, 0.5)
    assert advantages.tolist() == [0.25, 1, 4] and returns.tolist() == [1.25, 3, 8]
    # λ = 1: all that is still to come, less the value; λ = 0: one step.
    rewards, values = np.array([1.0, 2, 3]), floats(5, 7, 9)
    assert gae(rewards, values, ALL, 1, 1)[0].tolist() == [6 - 5, 5 - 7, 3 - 9]
    assert gae(rewards, values, ALL, 1, 0)[0].tolist() == [1 + 7 - 5, 2 + 9 - 7, 3 - 9]


def test_an_injected_token_is_no_step_and_its_value_is_not_read() -> None:
    sampled = np.array([True, False, True, False, True])
    advantages, returns = gae(np.array([0.0, 0, 0, 0, 8]), floats(1, 99, 2, np.nan, 4), sampled, 0.5, 0.5)
    assert advantages.tolist() == [0.25, 0, 1, 0, 4] and returns.tolist() == [1.25, 0, 3, 0, 8]
    for n in (0, 2):
        assert not np.any(gae(np.zeros(n), np.ones(n, np.float32), np.zeros(n, bool), 1, 1))


GROUP = Group(
    0, 0, Prompt("0", "", (1, 2), "", {}),
    (rollout(1, [True, True]), rollout(1, [True, False, True]), rollout(1, [True], truncated=True)),
)  # fmt: skip
SCORES = [
    TokenScores(floats(-1, -1), floats(-1, -3), floats(0, 2)),
    TokenScores(floats(-1, -9, -1), floats(-2, 0, -1), floats(1, 9, 3)),
    TokenScores(floats(-1), floats(-1), floats(-8)),
]
CRITIC = CriticConfig(body="own", gamma=1.0, gae_lambda=1.0)
# With γ = λ = 1 every return is the reward, 1. Advantages: (1, −1), (0, ·, −2); (9) of the truncated one.


def batch(moments: Moments | None = None, **objective: Any) -> TrainBatch:
    settings = {"critic": CRITIC, "advantage_norm": "none", "aggregation": "token", "drop_truncated": True}
    made = ObjectiveConfig(**settings | objective)
    scores = SCORES if made.has_critic else [replace(s, values=None) for s in SCORES]
    return build_batch([GROUP], 1, made, 0, scores, moments=moments)


def advantages(b: TrainBatch) -> list[list[float]]:
    return [s.advantages.tolist() for s in b.sequences]


def test_a_group_of_equal_rewards_stays_where_a_critic_is_the_baseline() -> None:
    for zero_variance in ("drop", "keep"):
        b = batch(zero_variance=zero_variance)
        assert advantages(b) == [[1, -1], [0, 0, -2]]
        assert [s.returns.tolist() for s in b.sequences] == [[1, 1], [1, 0, 1]]  # type: ignore[union-attr]
        assert [s.values.tolist() for s in b.sequences] == [[0, 2], [1, 9, 3]]  # type: ignore[union-attr]
        assert [s.token_weights.tolist() for s in b.sequences] == [[0.25] * 2, [0.25, 0, 0.25]]


@pytest.mark.axis("objective.critic.body", "none")
def test_without_a_critic_the_same_group_is_dropped_and_nothing_is_returned() -> None:
    assert batch(critic=CriticConfig()).sequences == ()
    kept = batch(critic=CriticConfig(), zero_variance="keep")
    assert advantages(kept) == [[0, 0], [0, 0, 0]]
    assert all(s.values is None and s.returns is None for s in kept.sequences)


def test_the_norms_are_over_loss_tokens_and_take_the_mean_away() -> None:
    assert advantages(batch(advantage_norm="global", global_std=0.5)) == [[2, -2], [0, 0, -4]]
    # 1, −1, 0, −2 have the mean −½ and the variance 5/4.
    expected = [(x + 0.5) / np.sqrt(1.25) for x in (1, -1, 0, -2)]
    moments = Moments()
    for norm in ("batch", "running"):
        b = batch(moments, advantage_norm=norm)
        got = np.concatenate([s.advantages[s.token_weights > 0] for s in b.sequences])
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert (moments.count, moments.mean) == (4, -0.5)
    # With those of the truncated completion: 1, −1, 0, −2, 9 have the mean 1.4 and the variance 87/5 − 1.96.
    everything = batch(advantage_norm="batch", std_over="all")
    expected = (np.array([1, -1]) - 1.4) / np.sqrt(17.4 - 1.96)
    np.testing.assert_allclose(everything.sequences[0].advantages, expected, rtol=1e-6)


def test_a_kl_penalty_in_the_reward_is_each_tokens_own() -> None:
    # k1 = log π − log π_ref: (0, 2), (1, ·, 0). With β = ½ the rewards are (0, −1 + 1), (−½, ·, 1).
    b = batch(kl=KL_REWARD)
    assert [s.returns.tolist() for s in b.sequences] == [[0, 0], [0.5, 0, 1]]  # type: ignore[union-attr]
    assert advantages(b) == [[0, -2], [-0.5, 0, -2]]


def test_the_reward_is_of_the_last_token_that_was_sampled() -> None:
    ends_with_the_phrase = replace(GROUP, rollouts=(rollout(3, [True, True, False]),))
    scores = [TokenScores(floats(0, 0, 0), None, floats(1, 2, 7))]
    objective = ObjectiveConfig(critic=replace(CRITIC, gamma=0.5), advantage_norm="none")
    (s,) = build_batch([ends_with_the_phrase], 1, objective, 0, scores).sequences
    assert (s.returns.tolist(), s.advantages.tolist()) == ([1.5, 3, 0], [0.5, 1, 0])  # type: ignore[union-attr]


NO_CRITIC = {"critic": CriticConfig(), "kl": KL_REWARD}
SHARED = replace(CRITIC, body="shared", dtype="float16")


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ({"advantage_norm": "group"}, "expected advantage_norm batch, running, global or none.* given group"),
        ({"zero_variance": "resample"}, "zero_variance drop or keep; given batch and resample"),
        (NO_CRITIC | {"zero_variance": "resample"}, "kl.place reward does not go"),
        (NO_CRITIC | {"advantage_norm": "group"}, "kl.place reward does not go"),
        ({"loss": "gspo"}, "gspo needs one advantage a completion"),
        ({"critic": SHARED}, "critic.dtype is float16; expected float32, as a shared body"),
        ({"critic": replace(CRITIC, coefficient=0.1)}, "critic.coefficient is 0.1, but a value network"),
    ],
)
def test_senseless_settings_beside_a_critic_or_kl_in_the_reward_are_refused(
    objective: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_objective(ObjectiveConfig(**{"critic": CRITIC} | objective))
