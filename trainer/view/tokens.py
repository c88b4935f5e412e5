"""The tokens of a group as the page shows them: their texts, and a number of each for every colour."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.controller.journal import unpack, unpack_learned
from trainer.run_folder import TOKENIZER, checkpoints
from trainer.types import split
from trainer.view.rollouts import Entry

AT_ONCE = 8192  # tokens of one answer; a rollout has an equal share of them
BROKEN = "\ufffd"  # the text of a part of a character
FLAGS = "reward", "outcome", "truncated", "interrupted"


def pieces(run: Path, token_ids: NDArray[np.int32]) -> list[str]:
    """The text of each token. Of a character that several tokens make up, the last one has it."""
    if (tokenizer := _tokenizer(*_tokenizer_file(run))) is None:
        return [f"[{i}] " for i in token_ids.tolist()]
    known = {i: _text(tokenizer, [i]) for i in np.unique(token_ids).tolist()}
    texts, broken = list[str](), list[int]()
    for i in token_ids.tolist():
        broken = [*broken, i] if broken or BROKEN in known[i] else []
        text = known[i]
        if broken:
            text = _text(tokenizer, broken)
            if BROKEN in text and len(broken) < 4:
                text = ""
            else:
                broken = []
        texts.append(text)
    return texts


def group_view(
    run: Path, entry: Entry, record: Mapping[str, Any], learned: Mapping[str, Any], start: int = 0,
    only: int | None = None, whole: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A group for the page: its prompt, and of each rollout (or of the one numbered `only`) the tokens from
    `start` on: all if `whole`, or as many as fit."""
    about: dict[str, Any] = {"id": entry.group_id, "step": entry.step, "epoch": entry.epoch}
    about |= {"aside": entry.aside, "task": entry.task, "answer": entry.answer}
    about["prompt"] = entry.prompt or entry.prompt_id
    if "completions" in record:
        return about | {"rollouts": _as_texts(entry, record), "count": len(entry.lengths)}
    columns = {name: split(lengths, flat) for name, (lengths, flat) in unpack(record).items()}
    scores = unpack_learned(learned, columns["sampled"])
    numbers = range(len(record["lengths"])) if only is None else [only]
    count = max(record["lengths"]) if whole else AT_ONCE // len(numbers)
    span = slice(start, start + count)
    shown = [columns["token_ids"][i][span] for i in numbers]
    texts = iter(pieces(run, np.concatenate([*shown, np.zeros(0, np.int32)])))
    rollouts = []
    for i, ids in zip(numbers, shown, strict=True):
        tokens = {"text": [next(texts) for _ in ids], "version": columns["versions"][i][span].tolist()}
        tokens["logprob"] = _numbers(columns["logprobs_gen"][i], columns["sampled"][i], span)
        tokens |= {name: _numbers(x[i], ~np.isnan(x[i]), span) for name, x in scores.items()}
        advantage = entry.advantages[i] if entry.advantages else None
        one = {name: record[name][i] for name in FLAGS} | {"index": i, "length": record["lengths"][i]}
        turns = (record.get("episode") or [{}] * (i + 1))[i]
        blocks = _blocks(columns["sampled"][i], span, turns.get("turns", ()))
        one |= {"scores": (record.get("scores") or [{}] * (i + 1))[i], "advantage": advantage}
        one |= {name: turns[name] for name in ("count", "seconds", "error") if name in turns}
        rollouts.append(one | {"start": start, "blocks": blocks, "tokens": tokens})
    return about | {"rollouts": rollouts, "count": len(record["lengths"])}


def _as_texts(entry: Entry, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a held-out group, whose whole text stands in the place of the last token."""
    rollouts = []
    for i, one in enumerate(record["completions"]):
        tokens = {"text": [one["text"]], "version": [entry.step], "logprob": [None]}
        about = {name: one.get(name, False) for name in FLAGS} | {"index": i, "length": one["tokens"]}
        place = {"start": max(0, one["tokens"] - 1), "blocks": [{"sampled": True, "end": 1}]}
        rollouts.append(about | place | {"scores": {}, "advantage": None, "tokens": tokens})
    return rollouts


def _blocks(
    sampled: NDArray[np.bool_], span: slice, turns: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Runs of tokens that the model sampled, or that were put in: `end` is relative to the span's start."""
    sampled_turns = [n for n, turn in enumerate(turns) if turn["role"] == "assistant" and "tokens" in turn]
    blocks, place, number = list[dict[str, Any]](), 0, -1
    for is_sampled, run in groupby(sampled.tolist()):
        place += len(list(run))
        number += is_sampled
        block: dict[str, Any] = {"sampled": is_sampled, "end": min(place, span.stop) - span.start}
        if is_sampled and number < len(sampled_turns):
            turn = turns[sampled_turns[number]]
            block["reward"] = turn.get("reward")
            block["calls"] = [call["function"]["name"] for call in turn.get("tool_calls", ())]
        elif 0 <= number < len(sampled_turns) and sampled_turns[number] + 1 < len(turns) and not is_sampled:
            role = turns[sampled_turns[number] + 1]["role"]
            block["role"] = "environment" if role == "user" else role
        if place > span.start and (not blocks or blocks[-1]["end"] < span.stop - span.start):
            blocks.append(block)
    return blocks


def _numbers(values: NDArray[Any], known: NDArray[np.bool_], span: slice) -> list[float | None]:
    """Numbers with four digits; None where there is none."""
    pairs = zip(values[span].tolist(), known[span].tolist(), strict=True)
    return [float(f"{value:.4g}") if ok else None for value, ok in pairs]


def _tokenizer_file(run: Path) -> tuple[Path | None, float]:
    """The file of the run's tokenizer, and when it was written."""
    folders = [run, *reversed(checkpoints(run))]
    file = next((path for folder in folders if (path := folder / TOKENIZER).is_file()), None)
    return file, file.stat().st_mtime if file else 0.0


@lru_cache(maxsize=8)
def _tokenizer(file: Path | None, time: float) -> Any:
    if file is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _text(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens that follow others: at a text's beginning some tokenizers leave a space out."""
    before = tokenizer.decode(ids[:1] * 2, skip_special_tokens=False)
    alone = tokenizer.decode(ids[:1], skip_special_tokens=False)
    if BROKEN in alone or len(ids) > 1:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    return str(before[len(alone) :])
