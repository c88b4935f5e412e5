"""Which completions go into the same micro-batch, so that a given number of them are about equally long.

A completion costs the tokens it adds to its group. A prompt costs once for each bin that holds any of its
completions, so groups should stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
GROWTH = 1.005  # of the capacity when a packing fails: the bins' lengths get as close as this allows


def balance(sizes: Sequence[int], groups: Sequence[int], prompts: Sequence[int], bins: int) -> Ints:
    """(N,) the bin of each completion; the same input always gives the same bins.

    `sizes` (N,) are the tokens that each completion adds to its group, `groups` (N,) the number of that
    group, and `prompts` (G,) the tokens of each group's prompt. The bins are filled to a common capacity,
    which grows until everything fits. First the longer half of the completions, group by group, the largest
    group first; then the shorter half, which fill the gaps, the longest first.
    """
    size, group, prompt = np.array(sizes, float), np.array(groups, int), np.array(prompts, float)
    totals = prompt + np.bincount(group, size, len(prompt))
    short = size <= np.median(size)
    order = np.lexsort((-size, np.where(short, 0, group), np.where(short, 0, -totals[group]), short))
    capacity = max(totals.sum() / bins, (size + prompt[group]).max())
    while (placed := _fill(size, group, prompt, order, np.zeros(bins), capacity)) is None:
        capacity *= GROWTH
    return placed


def _fill(
    size: Floats, group: Ints, prompt: Floats, order: Ints, loads: Floats, capacity: float
) -> Ints | None:
    """The bin of each completion, or None if one fits nowhere.

    Each goes into a bin that holds its group, if it fits there, else into the emptiest one.
    """
    placed = np.zeros(len(size), int)
    has_group = np.zeros((len(prompt), len(loads)), bool)
    for i in order.tolist():
        has_prompt = has_group[group[i]]
        after = loads + size[i] + np.where(has_prompt, 0, prompt[group[i]])
        chosen = int(np.argmin(np.where(after > capacity, np.inf, loads - np.where(has_prompt, capacity, 0))))
        if after[chosen] > capacity:
            return None
        placed[i], loads[chosen], has_prompt[chosen] = chosen, after[chosen], True
    return placed
