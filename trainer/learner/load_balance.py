"""Which completions go together so that equally many micro-batches are about equally long.

A completion costs the tokens it adds to its group; a prompt costs once per micro-batch that holds any of its
completions. From whole groups laid in line and cut into equal parts, single completions, pairs, and all that
a micro-batch has of a group change places as long as that lowers the sum of the lengths' eighth powers:
moving load from long to short, and keeping groups together, both do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SWEEPS = 3  # the first two do nearly all


@dataclass(slots=True)
class _State:
    """Completions in bins; `held` counts those of a group in a bin, which hence holds the group's prompt."""

    sizes: Floats  # (N,) what each completion adds to its group
    groups: Ints  # (N,)
    prompts: Floats  # (G,)
    bins: Ints  # (N,) where each is
    held: Ints  # (G, K)
    loads: Floats  # (K,)

    def move(self, which: Ints, to: int) -> None:
        """Put these completions of one group, all of one bin, into another."""
        group, at = self.groups[which[0]], self.bins[which[0]]
        size = self.sizes[which].sum()
        self.loads[at] -= size + (self.prompts[group] if self.held[group, at] == len(which) else 0)
        self.loads[to] += size + (self.prompts[group] if self.held[group, to] == 0 else 0)
        self.held[group, at] -= len(which)
        self.held[group, to] += len(which)
        self.bins[which] = to


def balance(sizes: Sequence[int], groups: Sequence[int], prompts: Sequence[int], bins: int) -> Ints:
    """(N,) the bin of each completion; the same input always gives the same bins.

    `sizes` (N,): tokens that each completion adds to its group; `groups` (N,): its number, ascending;
    `prompts`: each group's.
    """
    size, group, prompt = np.array(sizes, float), np.array(groups, int), np.array(prompts, float)
    share = size + (prompt / np.maximum(np.bincount(group, minlength=len(prompt)), 1))[group]
    ends = np.cumsum(share)
    start = np.minimum((ends - share / 2) * bins // max(ends[-1], 1), bins - 1).astype(int)
    held = np.zeros((len(prompt), bins), int)
    np.add.at(held, (group, start), 1)
    loads = np.bincount(start, size, bins) + (held > 0).T @ prompt
    state = _State(size, group, prompt, start, held, loads)
    for _ in range(SWEEPS):
        before = state.bins.copy()
        for i in np.argsort(-size, kind="stable"):
            _move(state, np.array([i])) or _swap(state, int(i))
        for g, b in np.argwhere(state.held):
            _move(state, np.flatnonzero((group == g) & (state.bins == b)))
        if (before == state.bins).all():
            break
    return state.bins


def _move(s: _State, which: Ints) -> bool:
    """Take these completions of one group from their bin to the best other one, if that is better."""
    if not len(which):
        return False
    group, at, size = s.groups[which[0]], s.bins[which[0]], s.sizes[which].sum()
    out = s.loads[at] - size - (s.prompts[group] if s.held[group, at] == len(which) else 0)
    into = s.loads + size + np.where(s.held[group] > 0, 0, s.prompts[group])
    change = _cost(into) - _cost(s.loads) + _cost(out) - _cost(s.loads[at])
    change[at] = 0
    to = int(np.argmin(change))
    if change[to] >= -_least(s):
        return False
    s.move(which, to)
    return True


def _swap(s: _State, i: int) -> bool:
    """Exchange a completion of a bin above the average for the best one of another group and bin."""
    at, group = s.bins[i], s.groups[i]
    if s.loads[at] <= s.loads.mean():
        return False
    others = np.flatnonzero((s.bins != at) & (s.groups != group))
    if not len(others):
        return False
    there, theirs = s.bins[others], s.groups[others]

    def leaves(group: Ints | int, bin_: Ints | int) -> Floats:  # the prompt goes with the last of a group
        return np.where(s.held[group, bin_] == 1, s.prompts[group], 0)

    def enters(group: Ints | int, bin_: Ints | int) -> Floats:
        return np.where(s.held[group, bin_] == 0, s.prompts[group], 0)

    gain = s.sizes[others] - s.sizes[i]
    here_after = s.loads[at] + gain - leaves(group, at) + enters(theirs, at)
    there_after = s.loads[there] - gain - leaves(theirs, there) + enters(group, there)
    change = _cost(here_after) + _cost(there_after) - _cost(s.loads[at]) - _cost(s.loads[there])
    best = int(np.argmin(change))
    if change[best] >= -_least(s):
        return False
    s.move(np.array([i]), int(there[best]))
    s.move(others[best : best + 1], int(at))
    return True


def _cost(loads: Floats) -> Floats:
    """Eighth powers, which squares make faster. Lower ones leave one bin long, higher ones stop early."""
    fourth = (loads * loads) ** 2
    return fourth * fourth


def _least(s: _State) -> float:
    """What a change must gain: more than rounding, or two states could take turns for ever."""
    return float(1e-9 * _cost(s.loads.max()))
