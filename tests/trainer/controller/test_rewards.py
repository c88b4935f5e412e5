"""Promises of a reward: the sum of all scorers with the weights of its step, and the length penalty."""

import asyncio
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from trainer.config import JudgeConfig, LengthPenaltyConfig, ScorerConfig, VerifierConfig
from trainer.controller import rewards
from trainer.controller.rewards import Rewards, Scored, length_penalty, weight_at
from trainer.types import Prompt, Verdict
from trainer.verifiers import judge
from trainer.verifiers.pool import open_scorer

PROMPT = Prompt("id", "2+2=", (1, 2), "4", {})


VERDICTS = {"right": Verdict(1.0, "correct"), "wrong": Verdict(0.25, "wrong")}


class FakeScorer:
    """Scores by its kind; counts what it is asked."""

    asked: ClassVar[list[str]] = []

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def score(self, prompt: Prompt, text: str) -> Verdict:
        self.asked.append(self.kind)
        return VERDICTS.get(self.kind) or Verdict(0.5, "correct")

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def fake_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "open_scorer", lambda settings, *_: FakeScorer(settings.kind))
    FakeScorer.asked.clear()


def score(config: VerifierConfig, tokens: int = 10, step: int | None = 0) -> Scored:
    return asyncio.run(Rewards(config, print, {}).score(PROMPT, "4", tokens, step))


def test_one_scorer_gives_the_reward_between_wrong_and_correct() -> None:
    assert score(VerifierConfig(kind="right")) == Scored(1.0, "correct", {})
    # −1 + 2 · 0.25 = −0.5
    assert score(VerifierConfig(kind="wrong")) == Scored(-0.5, "wrong", {})


def test_extra_scorers_add_to_the_reward_and_never_decide_what_is_a_pass() -> None:
    # 2 · (−1 + 2 · 0.25) + 0.1 · 1 + (−0.4) · 0.5 = −1 + 0.1 − 0.2 = −1.1
    extra = (ScorerConfig(kind="right", weight=0.1), ScorerConfig(kind="style", weight=-0.4))
    scored = score(VerifierConfig(kind="wrong", weight=2.0, extra=extra))
    assert scored.reward == pytest.approx(-1.1)
    assert scored.outcome == "wrong"
    assert scored.scores == {"wrong": -0.5, "right": 1.0, "style": 0.5}


def test_weights_change_linearly_between_their_steps() -> None:
    curriculum = {10: 1.0, 30: 0.0, 40: 2.0}
    # 10 + 5 of 20 steps: 1 − 5/20 = 0.75; 35 is half-way from 0 to 2
    steps = {0: 1.0, 10: 1.0, 15: 0.75, 30: 0.0, 35: 1.0, 40: 2.0, 99: 2.0}
    assert {step: weight_at(curriculum, step) for step in steps} == steps
    assert weight_at(dict(reversed(curriculum.items())), 15) == 0.75
    assert weight_at(0.3, 7) == 0.3


def test_a_reward_curriculum_goes_from_one_scorer_to_another() -> None:
    simple_to_complex = VerifierConfig(
        kind="wrong", weight={0: 0.0, 4: 1.0}, extra=(ScorerConfig(kind="style", weight={0: 1.0, 4: 0.0}),)
    )
    # style .5, main −.5: step 0: .5 · 1; step 1: −.5 · .25 + .5 · .75 = .25; step 4: −.5
    assert [score(simple_to_complex, step=s).reward for s in (0, 1, 4)] == [0.5, 0.25, -0.5]
    assert FakeScorer.asked == ["wrong", "style", "wrong", "style", "wrong"]  # weight 0: not asked


def test_evaluations_ask_every_scorer_and_weigh_as_the_schedules_end() -> None:
    extra = ScorerConfig(kind="style", weight={0: 0.0, 8: 0.2}), ScorerConfig(kind="wrong", weight=0.0)
    penalty = LengthPenaltyConfig(max_tokens=12, cache_tokens=4)  # of 10 tokens: −.5
    config = VerifierConfig(kind="right", weight={0: 1.0, 9: 3.0}, extra=extra, length_penalty=penalty)
    scored = score(config, step=None)
    assert scored.reward == pytest.approx(3 * 1 + 0.2 * 0.5 + 0 * 0.25 - 0.5) and scored.outcome == "correct"
    assert scored.scores == {"right": 1.0, "style": 0.5, "wrong": 0.25, "length_penalty": -0.5}
    assert FakeScorer.asked == ["right", "style", "wrong"]


def test_the_length_penalty_is_the_papers() -> None:
    # L_max 14,000, L_cache 2,000: 0 up to 12,000; 13,000: 1000/2000 − 1 = −.5; −1 from 14,000 on
    paper = LengthPenaltyConfig(cache_tokens=2000)
    by_length = {100: 0.0, 12_000: 0.0, 12_500: -0.25, 13_000: -0.5, 14_000: -1.0, 20_000: -1.0}
    assert {tokens: length_penalty(tokens, paper) for tokens in by_length} == by_length


@pytest.mark.axis("verifier.length_penalty.applies_to", "correct", "all")
def test_the_length_penalty_is_for_correct_completions_unless_it_applies_to_all() -> None:
    penalty = LengthPenaltyConfig(max_tokens=12, cache_tokens=4)
    # 11 tokens: (12 − 11) / 4 − 1 = −.75
    right, wrong = (VerifierConfig(kind=kind, length_penalty=penalty) for kind in ("right", "wrong"))
    assert score(right, tokens=11) == Scored(0.25, "correct", {"right": 1.0, "length_penalty": -0.75})
    assert score(wrong, tokens=11) == Scored(-0.5, "wrong", {"wrong": -0.5, "length_penalty": 0.0})
    every = replace(wrong, length_penalty=replace(penalty, applies_to="all"))
    assert score(every, tokens=11).reward == -0.5 - 0.75


def test_a_judge_without_a_score_counts_nothing_and_an_evaluation_sees_that_it_gave_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = VerifierConfig(kind="right", extra=(ScorerConfig(kind="judge"),))
    monkeypatch.setitem(VERDICTS, "judge", Verdict(-2.5, "wrong"))
    assert score(config, step=None) == Scored(-1.5, "correct", {"right": 1.0, "judge": -2.5})
    monkeypatch.setitem(VERDICTS, "judge", Verdict(0.0, "unparsable"))
    assert score(config, step=None) == Scored(1.0, "correct", {"right": 1.0})
    assert score(config) == Scored(1.0, "correct", {"right": 1.0, "judge": 0.0})


def test_tasks_with_equal_judges_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[JudgeConfig] = []
    monkeypatch.setattr(rewards, "open_scorer", open_scorer)
    monkeypatch.setattr(judge, "Judge", lambda config, note: opened.append(config) or FakeScorer("judge"))
    one, other = JudgeConfig(path="a"), JudgeConfig(path="a", threshold=0.7)
    judges: dict[Any, Any] = {}
    tasks = [
        VerifierConfig(kind="judge", judge=one),
        VerifierConfig(kind="exact", extra=(ScorerConfig(kind="judge"),), judge=one),
    ]
    first, second, third = (Rewards(c, print, judges) for c in (*tasks, replace(tasks[0], judge=other)))
    assert opened == [one, other] and len(judges) == 2
    assert first._scorers[0] is second._scorers[1] is not third._scorers[0]
