"""Which rank computes what: the batch's micro-batches in rounds, one a rank, so that no rank waits long.

Every rank packs the whole batch and comes to the same rounds. FSDP2 gathers each layer for all ranks at once,
so a round lasts as long as its largest micro-batch: those of a round are of about the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.packing import MicroBatch, pack
from trainer.types import TrainSequence

Round = tuple[MicroBatch, ...]  # by rank
SLACK = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)  # budgets tried, over the least that could hold all
GOOD = 0.02  # padding below which no other budget is tried: packing again costs time, too


def rounds(sequences: Sequence[TrainSequence], token_budget: int, ranks: int) -> list[Round]:
    """The batch in rounds; a rank without work gets one row of weight 0.

    Where a round would wait for its largest micro-batch, the batch is packed again by smaller budgets. No
    micro-batch is longer than the budget, or than the longest that a single completion needs.
    """
    best = _deal(pack(sequences, token_budget), ranks)
    if ranks == 1 or not best:
        return best
    bound = max(token_budget, *(len(m.input_ids) for share in best for m in share))
    least = rows(best) / (ranks * len(best))
    for budget in sorted({min(bound, int(least * slack)) for slack in SLACK}):
        if padding(best) < GOOD:
            break
        best = min(best, _deal(pack(sequences, budget), ranks), key=_time)
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
