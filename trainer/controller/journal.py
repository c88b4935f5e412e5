"""The journal: an append-only record of every issued prompt, finished group and optimizer step.

A resumed run takes finished groups from it and issues the pending prompts again, so that no prompt is lost
and none is trained twice. Of a group of episodes each turn of the model is on record, and each episode's end:
what is there of a pending group is not generated again. The journal is a folder of files of SEGMENT_GROUPS
groups each, so that a resume reads only the groups that it needs, and a long run can delete those that no
checkpoint needs any more.
"""

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.controller.rounds import Minibatch
from trainer.controller.sampler import IssuedPrompt
from trainer.controller.turns import Part, Past, joined
from trainer.jsonl import append, open_to_append, read_lines
from trainer.run_folder import checkpoints, kept_at
from trainer.types import Columns, Completion, Group, Prompt, Rollout, TrainBatch, TrainSequence, split

SEGMENT_GROUPS = 256  # groups of one file
KEEP_BYTES = 2_000_000_000  # of files that no checkpoint needs; below that they are kept, for analysis
_ARRAYS = {"token_ids": np.int32, "logprobs_gen": np.float32, "versions": np.int32, "sampled": np.bool_}
LEARNED = "log_ratio", "entropy", "advantage"  # of each token of a `learned` record
_KINDS = "issued", "turn", "ended", "finished", "scored"  # of the records of a group


class Journal:
    """Writes a JSON line per record into the file of its group; each line is flushed when it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, dict[int, IO[str]]()

    def _append(self, group_id: int, record: Mapping[str, Any]) -> None:
        segment = group_id // SEGMENT_GROUPS
        if segment not in self._files:
            self._files[segment] = open_to_append(self.folder / f"{segment:06d}.jsonl")
        append(self._files[segment], record)

    def issued(self, issued: IssuedPrompt, pasts: Mapping[int, Past] | None = None) -> None:
        """Record a prompt handed to a rollout task, and the episodes of it that the task goes on with: of
        those, no earlier record counts."""
        record, pasts = issued_record(issued), pasts or {}
        numbered = [(i, n, part) for i, past in pasts.items() for n, part in enumerate(past.parts)]
        again = [_turn_record(issued.group_id, *turn) for turn in numbered]
        ended = ((i, past.rollout) for i, past in pasts.items())
        again += [_end_record(issued.group_id, i, rollout) for i, rollout in ended if rollout]
        self._append(issued.group_id, record | ({"again": again} if again else {}))

    def turn(self, group_id: int, index: int, number: int, part: Part) -> None:
        """Record a turn of the model in an episode of a group."""
        self._append(group_id, _turn_record(group_id, index, number, part))

    def ended(self, group_id: int, index: int, rollout: Rollout) -> None:
        """Record the end of an episode, whose turns are on record."""
        self._append(group_id, _end_record(group_id, index, rollout))

    def finished(self, group: Group) -> None:
        """Record a complete group with all its tokens."""
        columns = dict(Columns.from_records(group.rollouts).columns)
        del columns["experts"]
        arrays = {name: columns.pop(name) for name in _ARRAYS}
        packed = _packed(arrays["token_ids"][0], *(flat for _, flat in arrays.values()))
        columns |= _experts([r.experts for r in group.rollouts])
        prompt = {"prompt": group.prompt.text, "task": group.prompt.task, "answer": group.prompt.answer}
        self._append(group.group_id, {"finished": group.group_id} | packed | columns | prompt)

    def scored(self, group: Group) -> None:
        """Record a teacher's scores of a finished group."""
        flat = np.concatenate(group.logprobs_ref)
        record = {"scored": group.group_id, "lengths": [len(x) for x in group.logprobs_ref]}
        self._append(group.group_id, record | {"tokens": _encoded(flat.tobytes())})

    def trained(self, step: int, minibatch: Minibatch) -> None:
        """Record which groups a step was trained on: first to last without those set aside; or, in a later
        epoch, all by id."""
        ids, aside = ([g.group_id for g in groups] for groups in (minibatch.groups, minibatch.aside))
        span = {"groups": ids} if minibatch.epoch else {"first": min(ids + aside), "last": ids[-1]}
        self._append(min(ids + aside), {"trained": step} | span | ({"aside": aside} if aside else {}))

    def learned(
        self, step: int, groups: Sequence[Group], batch: TrainBatch, tokens: Mapping[int, NDArray[np.float16]]
    ) -> None:
        """Record, for people, each group's advantages and what the learner computed of its tokens (`tokens`
        as in StepDone). A rollout that the loss left out has neither."""
        known = {id(s.token_ids): _learned(s, tokens.get(i)) for i, s in enumerate(batch.sequences)}
        for group in groups:
            parts = [known.get(id(r.token_ids), np.zeros((3, 0), np.float16)) for r in group.rollouts]
            means = [float(f"{x[2].mean(dtype=float):.3g}") if x.size else None for x in parts]
            record = {"learned": group.group_id, "step": step, "advantages": means}
            packed = _encoded(b"".join(x.tobytes() for x in parts))
            self._append(group.group_id, record | {"lengths": [x.shape[1] for x in parts], "tokens": packed})

    def prune(self, first: int) -> None:
        """Group `first` is the oldest that a checkpoint needs: of the files before its own, delete the oldest
        once they are larger than KEEP_BYTES together."""
        before = [path for path in segments(self.folder) if int(path.stem) < first // SEGMENT_GROUPS]
        sizes = [path.stat().st_size for path in before]
        while sum(sizes) > KEEP_BYTES:
            sizes.pop(0)
            before.pop(0).unlink()
        for segment in [s for s in self._files if s < first // SEGMENT_GROUPS]:
            self._files.pop(segment).close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def issued_record(issued: IssuedPrompt) -> dict[str, Any]:
    """An issued prompt, as the journal and checkpoints have it."""
    record = {"issued": issued.group_id, "epoch": issued.epoch, "prompt_id": issued.prompt.prompt_id}
    return record | {"step": issued.step}


def _turn_record(group_id: int, index: int, number: int, part: Part) -> dict[str, Any]:
    whole, sampled = joined([part])
    packed = _packed([len(sampled)], whole.token_ids, whole.logprobs_gen, whole.versions, sampled)
    packed |= _experts([whole.experts])
    return {"turn": group_id, "index": index, "number": number, "reason": whole.finish_reason} | packed


def _end_record(group_id: int, index: int, rollout: Rollout) -> dict[str, Any]:
    """The rollout without its tokens, which are those of the turns, and their experts."""
    names = [f.name for f in fields(Rollout) if f.name not in (*_ARRAYS, "experts")]
    known = {name: getattr(rollout, name) for name in names}
    return {"ended": group_id, "index": index, "length": len(rollout.token_ids), "rollout": known}


def oldest_group(run_dir: str, group_id: int) -> int:
    """The first group that a resume needs, from any checkpoint but those kept for good, which would hold the
    whole journal; `group_id` without one."""
    paths = [path for path in checkpoints(run_dir) if not kept_at(path)]
    states = (json.loads((path / "controller.json").read_text()) for path in paths)
    return min((state["group_id"] for state in states), default=group_id)


def segments(folder: Path) -> list[Path]:
    """The files of a journal, oldest first."""
    return sorted(folder.glob("*.jsonl"))


def records(folder: Path, first: int = 0, end: float = math.inf) -> Iterator[dict[str, Any]]:
    """The records of a journal, without the files that hold no group from `first` up to `end`."""
    for path in segments(folder):
        if first // SEGMENT_GROUPS <= int(path.stem) < end / SEGMENT_GROUPS:
            yield from read_lines(path)


def replay(
    folder: Path, first: int, prompts: Mapping[str, Prompt], end: float = math.inf
) -> tuple[dict[int, IssuedPrompt], dict[int, Group], dict[int, dict[int, Past]]]:
    """The prompts issued from group `first` to `end`, the finished groups among them, and the episodes of the
    others, all by group id.

    A half-written last line is ignored. The last record of a group counts: an earlier resume may have issued
    it again.
    """
    issued: dict[int, IssuedPrompt] = {}
    finished: dict[int, Group] = {}
    episodes: dict[int, list[dict[str, Any]]] = {}
    for record in records(folder, first, end):
        group_id = next((record[kind] for kind in _KINDS if kind in record), -1)
        if group_id < first:
            continue
        if "issued" in record:
            issued[group_id] = issued_prompt(record, prompts, folder)
            finished.pop(group_id, None)
            episodes[group_id] = record.get("again", [])
        elif "finished" in record:
            finished[group_id] = _group(issued[group_id], record)
            episodes[group_id] = []
        elif "scored" in record:
            flat = np.frombuffer(_decoded(record["tokens"]), np.float32)
            scores = tuple(split(record["lengths"], flat))
            finished[group_id] = replace(finished[group_id], logprobs_ref=scores)
        else:
            episodes[group_id].append(record)
    return issued, finished, {i: _pasts(records) for i, records in episodes.items() if records}


def issued_prompt(
    record: Mapping[str, Any], prompts: Mapping[str, Prompt], where: str | Path
) -> IssuedPrompt:
    """The prompt of an `issued_record`, found `where`; ConfigError if it is not among `prompts`."""
    number = record["issued"]
    if (prompt := prompts.get(record["prompt_id"])) is None:
        raise ConfigError(
            f"{where}: prompt {record['prompt_id']}, issued as number {number}, is no longer in the training "
            "data; resume with the data that the run began with"
        )
    return IssuedPrompt(number, record["epoch"], prompt, record["step"])


def _pasts(records: list[dict[str, Any]]) -> dict[int, Past]:
    """The episodes of a group, by index. A turn replaces its earlier record, and those of all later ones."""
    pasts: dict[int, Past] = {}
    for record in records:
        past = pasts.setdefault(record["index"], Past())
        if "turn" in record:
            past.parts[record["number"] :] = [_part(record)]
            past.rollout = None
        else:  # an environment that said less in a resumed run leaves later turns of the first one
            while past.parts and sum(len(i) + len(c.token_ids) for i, c in past.parts) > record["length"]:
                past.parts.pop()
            whole, sampled = joined(past.parts)
            arrays = whole.token_ids, whole.logprobs_gen, whole.versions, sampled
            past.rollout = Rollout(*arrays, **record["rollout"], experts=whole.experts)
    return pasts


def _part(record: dict[str, Any]) -> Part:
    ids, logprobs, versions, sampled = (flat for _, flat in unpack(record).values())
    said = Completion("", 0, ids[sampled], logprobs[sampled], versions[sampled], record["reason"])
    if "experts" in record:
        (experts,) = _unpacked_experts(record["experts"])
        said = replace(said, experts=experts)
    return tuple(ids[~sampled].tolist()), said


def _group(issued: IssuedPrompt, record: dict[str, Any]) -> Group:
    columns = unpack(record) | record
    columns["experts"] = _unpacked_experts(record.get("experts", [None] * len(record["lengths"])))
    known = {f.name: columns[f.name] for f in fields(Rollout) if f.name in columns}  # older ones lack some
    rollouts = Columns(Rollout, known).to_records()
    return Group(issued.group_id, issued.epoch, issued.prompt, tuple(rollouts))


def _packed(lengths: Sequence[int], *arrays: NDArray[Any]) -> dict[str, Any]:
    """Token columns as a record has them: the rollouts' lengths, and all values of each of _ARRAYS."""
    tokens = b"".join(flat.tobytes() for flat in arrays)
    return {"lengths": lengths, "tokens": _encoded(tokens)}


def _encoded(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> str:
    compressor = zlib.compressobj(1, strategy=strategy)
    return base64.b64encode(compressor.compress(data) + compressor.flush()).decode()


def _decoded(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _experts(by_rollout: Sequence[NDArray[Any] | None]) -> dict[str, Any]:
    """The experts of a group's rollouts, or of a turn, as a record has them: width, type and bytes."""
    if all(x is None for x in by_rollout):
        return {}
    huffman = zlib.Z_HUFFMAN_ONLY  # a search for repeated ids would take twice as long and find none
    packed = [
        x if x is None else [x.shape[1], x.dtype.str, _encoded(x.tobytes(), huffman)] for x in by_rollout
    ]
    return {"experts": packed}


def _unpacked_experts(packed: Sequence[Any]) -> list[NDArray[Any] | None]:
    """The experts of each rollout in a record."""
    return [one and np.frombuffer(_decoded(one[2]), one[1]).reshape(-1, one[0]) for one in packed]


def unpack(record: Mapping[str, Any]) -> dict[str, tuple[list[int], NDArray[Any]]]:
    """The token columns of a finished group, or of a turn: the rollouts' lengths and all values, by field."""
    data, start = _decoded(record["tokens"]), 0
    columns, count = {}, sum(record["lengths"])
    for name, dtype in _ARRAYS.items():
        flat: NDArray[Any] = np.frombuffer(data, dtype, count, start)
        columns[name] = record["lengths"], flat
        start += flat.nbytes
    return columns


def _learned(sequence: TrainSequence, tokens: NDArray[np.float16] | None) -> NDArray[np.float16]:
    """(3, N) LEARNED of a sequence's loss tokens; NaN where the learner said nothing."""
    advantages = sequence.advantages[sequence.token_weights != 0]
    said = np.full((2, len(advantages)), np.nan) if tokens is None else tokens
    return np.concatenate([said, advantages[None]]).astype(np.float16)


def unpack_learned(
    record: Mapping[str, Any], sampled: Sequence[NDArray[np.bool_]]
) -> dict[str, list[NDArray[np.float32]]]:
    """LEARNED of each rollout's tokens (T,), NaN where a record says nothing. Empty without a record.
    `sampled`: the rollouts' tokens that the model sampled."""
    if not record:
        return {}
    lengths, names = record["lengths"], LEARNED
    flat = np.frombuffer(_decoded(record["tokens"]), np.float16).astype(np.float32)
    parts = split([n * len(names) for n in lengths], flat)
    columns: dict[str, list[NDArray[np.float32]]] = {name: [] for name in names}
    for part, mask in zip(parts, sampled, strict=True):
        for name, values in zip(names, part.reshape(len(names), -1), strict=True):
            full = np.full(len(mask), np.nan, np.float32)
            if len(values) == mask.sum():
                full[mask] = values
            columns[name].append(full)
    return columns
