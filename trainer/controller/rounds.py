"""Rounds: which groups each optimizer step trains on.

PipelineRL trains on every batch once, as it comes. A round of PPO-off-policy-k has k batches by one policy,
trained on for some epochs: in the first as they were generated, then with all groups dealt anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.types import Group


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The groups that one optimizer step trains on."""

    groups: tuple[Group, ...]
    aside: tuple[Group, ...] = ()  # without variance: replaced while the batch was filled
    epoch: int = 0  # of the round

    @property
    def generated(self) -> tuple[Group, ...]:
        """All groups that were generated for it."""
        return (*self.groups, *self.aside)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engine computed: each group's prompt once, and all completions; once in a round."""
        groups = () if self.epoch else self.generated
        return sum(len(g.prompt.token_ids) + sum(len(r.token_ids) for r in g.rollouts) for g in groups)


def deal(minibatches: Sequence[Minibatch], epochs: int, seed: Sequence[int]) -> Iterator[Minibatch]:
    """The minibatches of all epochs of a round, in the order in which they are trained on."""
    yield from minibatches
    groups = [g for m in minibatches for g in m.groups]
    for epoch in range(1, epochs if groups else 1):
        order = np.random.default_rng([*seed, epoch]).permutation(len(groups))
        for part in np.split(order, len(minibatches)):
            yield Minibatch(tuple(groups[i] for i in part), epoch=epoch)
