"""Promises of the journal: what is finished comes back exactly; a half-written line is survived."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from fakes import prompts

from trainer.config import ConfigError
from trainer.controller.journal import SEGMENT_GROUPS, Journal, replay, segments
from trainer.controller.rounds import Minibatch
from trainer.controller.sampler import IssuedPrompt
from trainer.types import Group, Rollout


def group(issued: IssuedPrompt, lengths: list[int]) -> Group:
    rng = np.random.default_rng(issued.group_id)
    rollouts = [
        Rollout(
            rng.integers(0, 50_000, n, np.int32),
            rng.normal(size=n).astype(np.float32),
            np.sort(rng.integers(0, 5, n, np.int32)),
            rng.random(n) < 0.8,
            f"text {n} ünïcode \n",
            *(-1.0, "wrong", bool(n % 2), bool(n % 3), {"math": -1.0, "style": n / 7}),
            experts=rng.integers(0, 300, (n + 2, 6), np.uint16) if n else None,
        )
        for n in lengths
    ]
    return Group(issued.group_id, issued.epoch, issued.prompt, tuple(rollouts))


def test_finished_groups_come_back_bit_for_bit_and_pending_ones_are_known(tmp_path: Path) -> None:
    items = prompts(6)
    by_id = {p.prompt_id: p for p in items}
    journal = Journal(tmp_path / "journal")
    issued = [IssuedPrompt(i, i // 4, items[i], i // 3) for i in range(6)]
    groups = {i: group(issued[i], [3, 0, 7]) for i in (1, 2, 4)}
    for one in issued:
        journal.issued(one)
    for done in groups.values():
        journal.finished(done)
    journal.trained(1, Minibatch((groups[1], groups[2]), aside=(groups[4],)))
    journal.close()
    again, finished, _ = replay(tmp_path / "journal", 2, by_id)
    assert again == {i: issued[i] for i in (2, 3, 4, 5)}
    assert set(finished) == {2, 4}
    for group_id, got in finished.items():
        for pair in zip(groups[group_id].rollouts, got.rollouts, strict=True):
            for ours, theirs in zip(*(asdict(rollout).values() for rollout in pair), strict=True):
                np.testing.assert_array_equal(ours, theirs)
                assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


def test_a_line_cut_by_a_crash_is_ignored_and_a_new_issue_voids_an_old_group(tmp_path: Path) -> None:
    by_id, path = {p.prompt_id: p for p in prompts(2)}, tmp_path / "journal"
    journal = Journal(path)
    for i, prompt in enumerate(prompts(2)):
        journal.issued(IssuedPrompt(i, 0, prompt, 0))
        journal.finished(group(IssuedPrompt(i, 0, prompt, 0), [2 + 2 * i]))
    journal.close()
    file = path / "000000.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-30])  # as if the machine died while writing the last group
    again, finished, _ = replay(path, 0, by_id)
    assert set(again) == {0, 1} and set(finished) == {0}
    file.write_text(whole)
    journal = Journal(path)
    journal.issued(IssuedPrompt(0, 0, prompts(1)[0], 0))  # a resume issues group 0 again
    journal.close()
    assert set(replay(path, 0, by_id)[1]) == {1}


def test_a_prompt_missing_from_the_data_is_refused_in_one_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.issued(IssuedPrompt(3, 0, prompts(1)[0], 0))
    journal.close()
    with pytest.raises(ConfigError, match=r"prompt id0000, issued as number 3, .* resume with the data"):
        replay(tmp_path / "journal", 0, {})


def test_a_resume_reads_only_the_files_that_it_needs_and_the_oldest_are_deleted_beyond_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, items = tmp_path / "journal", prompts(1)
    journal = Journal(folder)
    for i in range(5 * SEGMENT_GROUPS):
        journal.issued(IssuedPrompt(i, 0, items[0], 0))
    (folder / "000001.jsonl").write_text("no JSON, so that whoever reads it fails\n")
    first = 2 * SEGMENT_GROUPS + 7
    issued, *_ = replay(folder, first, {items[0].prompt_id: items[0]})
    assert sorted(issued) == list(range(first, 5 * SEGMENT_GROUPS))
    journal.prune(first)
    assert len(segments(folder)) == 5
    monkeypatch.setattr("trainer.controller.journal.KEEP_BYTES", 100)
    journal.prune(first)
    assert [path.stem for path in segments(folder)] == ["000001", "000002", "000003", "000004"]
    journal.issued(IssuedPrompt(first, 1, items[0], 0))  # the file is still there
    journal.close()
    assert replay(folder, first, {items[0].prompt_id: items[0]})[0][first].epoch == 1
