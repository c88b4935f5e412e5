"""Assignment of micro-batches to ranks: the batch as micro-steps of one micro-batch per rank.

Every rank packs the whole batch and computes the same schedule. FSDP2 gathers each layer for all ranks at
once, so a micro-step takes as long as its longest micro-batch: those of one micro-step should be equally
long.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.learner.packing import MicroBatch, pack, pack_balanced
from trainer.types import TrainSequence

MicroStep = tuple[MicroBatch, ...]  # by rank
TARGET_IMBALANCE = 0.03  # below it packing is not balanced further, since that takes time as well


def schedule(sequences: Sequence[TrainSequence], token_budget: int, ranks: int) -> list[MicroStep]:
    """The batch's micro-steps; a rank without work gets DUMMY.

    First fit as for a single rank; if ranks would wait for too long, completions are balanced over as many
    micro-steps, or one more. No micro-batch is longer than the budget, or than the longest that a single
    completion needs.
    """
    best = _assign(pack(sequences, token_budget), ranks)
    if ranks == 1 or not best:
        return best
    limit = max(token_budget, *(len(m.input_ids) for step in best for m in step))
    for count in (len(best), len(best) + 1):
        if imbalance(best) < TARGET_IMBALANCE:
            break
        balanced = _assign(pack_balanced(sequences, ranks * count), ranks)
        if all(len(m.input_ids) <= limit for step in balanced for m in step):
            best = min(best, balanced, key=_duration)
            break
    return best


def rank_tokens(steps: Sequence[MicroStep]) -> list[int]:
    """Input tokens that each rank computes."""
    return [sum(len(m.input_ids) for m in by_step if m is not DUMMY) for by_step in zip(*steps, strict=True)]


def imbalance(steps: Sequence[MicroStep]) -> float:
    """Share of the ranks' time, in tokens, spent waiting for the longest micro-batch of a micro-step."""
    return 1 - sum(rank_tokens(steps)) / (_duration(steps) * len(steps[0])) if steps else 0.0


def _duration(steps: Sequence[MicroStep]) -> int:
    """The time of the micro-steps, in tokens of the longest micro-batch of each."""
    return sum(max(len(m.input_ids) for m in step) for step in steps)


def _assign(packed: list[MicroBatch], ranks: int) -> list[MicroStep]:
    """Micro-batches of about the same length together."""
    if ranks > 1:
        packed = sorted(packed, key=lambda m: -len(m.input_ids))
    packed = packed + [DUMMY] * (-len(packed) % ranks)
    steps = [tuple(packed[i : i + ranks]) for i in range(0, len(packed), ranks)]
    return [step if i % 2 == 0 else step[::-1] for i, step in enumerate(steps)]  # the longest to either end


ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.int32)
# One token whose loss has weight 0: it keeps its rank in step with the others. It has every optional column.
DUMMY = replace(
    pack([TrainSequence(ZERO, ZERO, -ONE, ZERO, ONE, 0 * ONE, -ONE, -ONE, 0 * ONE, 0 * ONE)], 1)[0],
    token_weights=0 * ONE,
)
