"""The promises of examples/plain_loop.py: it learns, the same way every time, and fits on a page."""

import inspect
from itertools import islice

from examples import plain_loop


def test_the_reward_rises_from_chance_to_nearly_one() -> None:
    rewards = list(plain_loop.train(steps=80))
    assert sum(rewards[:3]) / 3 < 0.15  # guessing gets 1/14
    assert sum(rewards[-10:]) / 10 > 0.95


def test_the_same_seed_gives_the_same_rewards_and_another_does_not() -> None:
    first, again, other = (list(islice(plain_loop.train(seed=seed), 3)) for seed in (5, 5, 6))
    assert first == again != other


def test_it_is_sixty_lines() -> None:
    assert len(inspect.getsource(plain_loop).splitlines()) <= 60
