"""Packs sequences into micro-batches without padding; completions of one prompt share their common prefixes.

One prompt's segment is a tree laid flat; a row is an input token's index in it. Completions are sorted, and
each adds only the tokens that differ from the completion before it:

    prompt   A B C            rows 0 1 2    positions 0 1 2
    x w v u  x w v            rows 3 4 5    positions 3 4 5   path 0 1 2 3 4 5
    x y z    . y              rows 6        positions 4       path 0 1 2 3 6

Tokens from the last weighted one on are no inputs: nothing is predicted from them. The row that predicts
a token is its predecessor's, so a completion's first token is predicted by the prompt's last row. This is
exact: equal prefixes have equal hidden states, and their gradients add up. For eight short answers to one
question it saves half of the tokens or more.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.types import TrainSequence

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]
# Of the loss tokens.
COLUMNS = [f.name for f in fields(TrainSequence) if not f.name.endswith("_ids") and f.name != "experts"]
GROWTH = 1.005  # of the capacity when a packing fails: the bins' lengths get as close as this allows


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive tokens, and all that they attend to."""

    path: Rows  # row numbers in the segment, ancestors first; its last rows are the branch's own
    own_rows: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt (the first branch) and what its completions add."""

    length: int  # rows; segments follow one another in the micro-batch
    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T input tokens and the N loss tokens they predict."""

    input_ids: Rows  # (T,)
    position_ids: Rows  # (T,)
    segments: tuple[Segment, ...]
    rows: Rows  # (N,) the input row whose hidden state predicts each loss token
    targets: Rows  # (N,)
    logprobs_gen: NDArray[np.float32]  # (N,) nats
    advantages: NDArray[np.float32]  # (N,)
    token_weights: NDArray[np.float32]  # (N,)
    versions: NDArray[np.int32]  # (N,) weight version that generated each loss token
    owners: Rows  # (N,) index of each loss token's sequence; a sequence's tokens are consecutive, in order
    logprobs_old: NDArray[np.float32] | None  # (N,) nats; this and the rest are None where not needed
    logprobs_ref: NDArray[np.float32] | None  # (N,) nats
    values: NDArray[np.float32] | None  # (N,)
    returns: NDArray[np.float32] | None  # (N,)
    experts: NDArray[Any] | None  # (T, layers · k) ids to replay; −1: not known

    @property
    def anchor(self) -> NDArray[np.float32]:
        """(N,) nats: the log-probs that the objective's ratio is taken to."""
        return self.logprobs_gen if self.logprobs_old is None else self.logprobs_old


def pack(sequences: Sequence[TrainSequence], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` input tokens (a longer single completion gets its own).

    Completions without a weight are left out. First fit, longest piece first; the same input always gives the
    same micro-batches.
    """
    bins: list[_Bin] = []
    for piece in sorted(_pieces(sequences, token_budget), key=lambda piece: -piece.length):
        chosen = next((b for b in bins if piece.length <= b.room), None)
        if chosen is None:
            chosen = _Bin([], token_budget)
            bins.append(chosen)
        chosen.pieces.append(piece)
        chosen.room -= piece.length
    return [_micro_batch(b.pieces) for b in bins]


def pack_balanced(sequences: Sequence[TrainSequence], count: int) -> list[MicroBatch]:
    """Up to `count` micro-batches of about equal length; the same input always gives the same."""
    groups = list(_pieces(sequences, sys.maxsize))
    if not groups:
        return []
    runs = [(g, run) for g, piece in enumerate(groups) for run in piece.runs]
    bins = balance(
        sizes=[run.added for _, run in runs],
        groups=[g for g, _ in runs],
        prompts=[len(piece.prompt) for piece in groups],
        bins=count,
    )
    owners = np.array([run.owner for _, run in runs])
    by_bin = [np.sort(owners[bins == b]).tolist() for b in range(count)]
    return [_micro_batch(list(_pieces(sequences, sys.maxsize, members))) for members in by_bin if members]


def balance(sizes: Sequence[int], groups: Sequence[int], prompts: Sequence[int], bins: int) -> Rows:
    """(N,) the bin of each completion, so that the bins are about equally long; the same input always gives
    the same bins. A prompt costs once for each bin that holds any of its completions.

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
    while move := _worthwhile_move(size, group, prompt, placed, bins):
        placed[move[0]] = move[1]
    return placed


def _fill(
    size: Floats, group: Rows, prompt: Floats, order: Rows, loads: Floats, capacity: float
) -> Rows | None:
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


def _worthwhile_move(
    size: Floats, group: Rows, prompt: Floats, placed: Rows, bins: int
) -> tuple[int, int] | None:
    """A completion of the longest bin and the bin to move it to, if that shortens the longest by a tenth."""
    completions = np.zeros((len(prompt), bins), int)  # completions of each group
    np.add.at(completions, (group, placed), 1)
    loads = np.bincount(placed, size, bins) + (prompt[:, None] * (completions > 0)).sum(0)
    longest = int(loads.argmax())
    moved = np.flatnonzero(placed == longest)
    g = group[moved]
    source_load = loads[longest] - size[moved] - np.where(completions[g, longest] == 1, prompt[g], 0)
    after = loads + size[moved, None] + np.where(completions[g] > 0, 0, prompt[g, None])  # (moved, bins)
    after[:, longest] = np.inf
    others = np.delete(loads, longest).max(initial=0)
    lengths = np.maximum(np.maximum(after.min(1), source_load), others)  # of the longest bin, after each move
    best = int(lengths.argmin())
    if lengths[best] >= 0.9 * loads[longest]:
        return None
    return int(moved[best]), int(after[best].argmin())


@dataclass(frozen=True, slots=True)
class _Run:
    """One completion in a piece."""

    owner: int  # number of its sequence
    sequence: TrainSequence
    weighted: Rows  # its tokens with a weight
    shared: int = 0  # input tokens that it shares with the run before it

    @property
    def inputs(self) -> NDArray[np.int32]:
        """All tokens before the last one with a weight."""
        return self.sequence.token_ids[: self.weighted[-1]]

    @property
    def experts(self) -> NDArray[Any] | None:
        """Those of the prompt and of `inputs`, if they are to be replayed."""
        experts = self.sequence.experts
        return None if experts is None else experts[: len(self.sequence.prompt_ids) + self.weighted[-1]]

    @property
    def prompt(self) -> bytes:
        """The prompt and its experts, which all completions of a piece have in common."""
        experts, prompt = self.experts, self.sequence.prompt_ids
        return prompt.tobytes() + (b"" if experts is None else experts[: len(prompt)].tobytes())

    @property
    def added(self) -> int:
        """Input tokens that it adds to its piece."""
        return int(self.weighted[-1]) - self.shared


@dataclass(frozen=True, slots=True)
class _Piece:
    """Completions of one prompt, sorted so that each shares a long prefix with the one before."""

    runs: tuple[_Run, ...]
    length: int

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.runs[0].sequence.prompt_ids


@dataclass(slots=True)
class _Bin:
    pieces: list[_Piece]
    room: int  # tokens that still fit


def _pieces(
    sequences: Sequence[TrainSequence], budget: int, members: Iterable[int] | None = None
) -> Iterator[_Piece]:
    """The groups of these sequences, or of all, in order; cut where they would exceed the budget."""
    numbers = range(len(sequences)) if members is None else members
    runs = [_Run(i, sequences[i], np.flatnonzero(sequences[i].token_weights)) for i in numbers]
    weighted = [run for run in runs if len(run.weighted)]
    for _, group in groupby(weighted, key=lambda run: run.sequence.prompt_ids.tobytes()):
        piece: list[_Run] = []
        length = 0
        for one in sorted(group, key=lambda run: (run.prompt, run.inputs.tolist())):
            run = replace(one, shared=_common_prefix(piece[-1], one)) if piece else one
            if piece and (length + run.added > budget or run.prompt != piece[-1].prompt):
                yield _Piece(tuple(piece), length)
                piece, run = [], one
            if not piece:
                length = len(run.sequence.prompt_ids)
            piece.append(run)
            length += run.added
        yield _Piece(tuple(piece), length)


def _common_prefix(a: _Run, b: _Run) -> int:
    """Input tokens that two completions of one prompt share: the same ones, by the same experts."""
    n, prompt = min(len(a.inputs), len(b.inputs)), len(a.sequence.prompt_ids)
    different = a.inputs[:n] != b.inputs[:n]
    if a.experts is not None and b.experts is not None:
        different |= (a.experts[prompt:][:n] != b.experts[prompt:][:n]).any(1)
    return int(different.argmax()) if different.any() else n


def _experts_of(run: _Run, first: int, count: int) -> NDArray[Any] | int:
    """The experts of `count` input tokens from one on, or the count if there are none to replay."""
    return count if run.experts is None else run.experts[first : first + count]


def _micro_batch(pieces: Sequence[_Piece]) -> MicroBatch:
    """Lay the pieces out one after another."""
    inputs, experts, rows, segments = [], [], [], []
    start = 0
    for piece in pieces:
        prompt = len(piece.prompt)
        path, length = np.arange(prompt), prompt
        branches = [Branch(path, prompt)]
        inputs.append(piece.prompt)
        experts.append(_experts_of(piece.runs[0], 0, prompt))
        for run in piece.runs:
            path = np.concatenate([path[: prompt + run.shared], np.arange(length, length + run.added)])
            if run.added:
                branches.append(Branch(path, run.added))
                inputs.append(run.inputs[run.shared :])
                experts.append(_experts_of(run, prompt + run.shared, run.added))
            length += run.added
            rows.append(start + path[prompt - 1 :][run.weighted])
        segments.append(Segment(length, tuple(branches)))
        start += length
    runs = [run for piece in pieces for run in piece.runs]
    counts = [len(run.weighted) for run in runs]

    def column(field: str) -> Any:
        if getattr(runs[0].sequence, field) is None:
            return None
        return np.concatenate([getattr(run.sequence, field)[run.weighted] for run in runs])

    return MicroBatch(
        input_ids=np.concatenate(inputs).astype(np.int64),
        position_ids=np.concatenate(
            [np.arange(len(b.path) - b.own_rows, len(b.path)) for s in segments for b in s.branches]
        ),
        segments=tuple(segments),
        rows=np.concatenate(rows),
        targets=column("token_ids").astype(np.int64),
        owners=np.repeat(np.array([run.owner for run in runs]), counts),
        experts=_joined(experts),
        **{name: column(name) for name in COLUMNS},
    )


def _joined(experts: Sequence[NDArray[Any] | int]) -> NDArray[Any] | None:
    """The ids of experts of consecutive tokens, or of so many that have none: −1."""
    one = next((x for x in experts if not isinstance(x, int)), None)
    if one is None:
        return None
    none = np.full((1, one.shape[1]), -1, np.int16)
    joined = [none.repeat(x, 0) if isinstance(x, int) else x.astype(np.int16) for x in experts]
    return np.concatenate(joined)
