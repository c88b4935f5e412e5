"""Which rank computes what: the batch's micro-batches in rounds, one a rank, so that no rank waits long.

Every rank packs the whole batch and comes to the same rounds. FSDP2 gathers each layer for all ranks at once,
so a round lasts as long as its largest micro-batch: those of a round are of about the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.learner.packing import MicroBatch, pack, pack_balanced
from trainer.types import TrainSequence

Round = tuple[MicroBatch, ...]  # by rank
GOOD = 0.03  # padding below which nothing is moved: looking for better places takes time, too


def rounds(sequences: Sequence[TrainSequence], token_budget: int, ranks: int) -> list[Round]:
    """The batch in rounds; a rank without work gets one row of weight 0.

    Packed first as for one rank; where rounds would wait for their largest micro-batch, completions change
    places, in as many rounds or one more. No micro-batch is longer than the budget, or than the longest that
    a single completion needs.
    """
    best = _deal(pack(sequences, token_budget), ranks)
    if ranks == 1 or not best:
        return best
    bound = max(token_budget, *(len(m.input_ids) for share in best for m in share))
    for more in (0, 1):
        if padding(best) < GOOD:
            break
        found = _deal(pack_balanced(sequences, ranks * (len(best) + more)), ranks)
        if all(len(m.input_ids) <= bound for share in found for m in share):
            best = min(best, found, key=_time)
            break
    return best


def rows_by_rank(found: Sequence[Round]) -> list[int]:
    """Input rows that each rank computes."""
    return [sum(len(m.input_ids) for m in mine if m is not IDLE) for mine in zip(*found, strict=True)]


def rows(found: Sequence[Round]) -> int:
    """Input rows of the rounds."""
    return sum(rows_by_rank(found))


def padding(found: Sequence[Round]) -> float:
    """Share of the ranks' time, in rows, that is spent on waiting for the largest of the round."""
    return 1 - rows(found) / (_time(found) * len(found[0])) if found else 0.0


def _deal(packed: list[MicroBatch], ranks: int) -> list[Round]:
    if ranks > 1:
        packed = sorted(packed, key=lambda m: -len(m.input_ids))
    packed = packed + [IDLE] * (-len(packed) % ranks)
    dealt = [tuple(packed[i : i + ranks]) for i in range(0, len(packed), ranks)]
    return [r if i % 2 == 0 else r[::-1] for i, r in enumerate(dealt)]  # not always the same has most


def _time(found: Sequence[Round]) -> int:
    return sum(max(len(m.input_ids) for m in micro_batches) for micro_batches in found)


def _idle() -> MicroBatch:
    one = np.ones(1, np.float32)
    id_ = np.zeros(1, np.int32)
    (packed,) = pack([TrainSequence(id_, id_, -one, id_, one, 0.0)], 1)
    return replace(packed, token_weights=0 * one)


IDLE = _idle()  # one row whose loss has weight 0: it keeps its rank in step
