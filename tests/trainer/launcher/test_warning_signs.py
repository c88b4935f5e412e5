"""Promises of the warnings: a sign is reported once it has held for its steps; healthy runs have none."""

from typing import Any

import pytest

from trainer.launcher.warning_signs import SIGNS, Guards

# Steps 1, 13 and 25 of `--recipe tiny`.
NAMES = ("ratio/ess", "ratio/mean", "kl/k3", "learner/entropy", "train/truncated", "train/effective_prompts")
STEPS = (
    (1.0, 1.0, 0.0, 0.84, 0.0, 9),
    (0.998, 1.0004, 1e-3, 0.722, 2e-3, 9),
    (0.998, 0.9999, 1e-3, 0.638, 0.0, 1),
)
HEALTHY: list[dict[str, Any]] = [dict(zip(NAMES, values, strict=True)) for values in STEPS]
WRONG = {
    "skipped": {"learner/skipped_steps": 1.0},
    "ess": {"ratio/ess": 0.31},
    "ratio": {"ratio/mean": 1.4},
    "kl": {"kl/k3": 0.2},
    "entropy": {"learner/entropy": 0.02},
    "signal": {"train/effective_prompts": 0.0},
    "unread": {"verify/unparsable": 0.95, "train/effective_prompts": 0.0},
    "hard": {"train/all_wrong": 0.95},
    "truncation": {"train/truncated": 0.14},
    "repetition": {"train/repetitive": 0.5},
    "value": {"critic/explained_variance": 0.0007},
}


def test_healthy_steps_give_no_warning() -> None:
    guards = Guards()
    assert not any(guards.check(row | {"train/repetitive": 0.0}) for row in HEALTHY * 20)


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_is_reported_once_when_it_has_held_and_again_after_a_pause(name: str) -> None:
    guards, healthy = Guards(), HEALTHY[0]
    n = SIGNS[name].in_a_row
    rows = [healthy] * 5 + [healthy | WRONG[name]] * (n + 3) + [healthy] + [healthy | WRONG[name]] * n
    reported = [i for i, row in enumerate(rows) if name in guards.check(row)]
    assert reported == [5 + n - 1, 5 + n + 3 + n]
    assert n == {"skipped": 1, "signal": 5, "unread": 5, "hard": 10, "value": 20}.get(name, 3)


def test_a_model_that_learns_the_form_of_answers_gets_no_warning_of_it() -> None:
    guards, row = Guards(), HEALTHY[0] | {"verify/unparsable": 0.95}
    assert not any(guards.check(row | {"train/effective_prompts": i % 4}) for i in range(50))


def test_a_base_model_that_begins_with_almost_all_prompts_wrong_and_learns_is_not_told_to_stop() -> None:
    guards = Guards()
    assert not any(guards.check(HEALTHY[0] | {"train/all_wrong": 0.99 - i / 200}) for i in range(50))
    guards = Guards()
    assert any(guards.check(HEALTHY[0] | {"train/all_wrong": 1.0}) for _ in range(10))


def test_a_warning_says_what_was_found_and_what_to_do() -> None:
    guards = Guards()
    for row in HEALTHY:
        guards.check(row)
    for _ in range(3):
        found = guards.check(HEALTHY[0] | WRONG["truncation"])
    assert found == {
        "truncation": "14% of the completions are cut at the token limit; above 10 % runs became unstable. "
        "Raise engine.max_new_tokens, turn on engine.interruption or a length penalty"
    }


def test_completions_that_are_cut_from_the_start_are_a_setting_and_no_change() -> None:
    guards = Guards()
    assert not any(guards.check(HEALTHY[0] | {"train/truncated": 1.0 - i / 50}) for i in range(50))


def test_a_step_without_tokens_has_no_such_metrics() -> None:
    assert Guards().check({"learner/tokens": 0.0}) == {}
