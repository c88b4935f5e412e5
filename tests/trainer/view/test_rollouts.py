"""Promises of the rollouts: every group of the journal, filtered, searched, and its tokens as they were."""

import json
from pathlib import Path

import numpy as np
import pytest
from view_run import invented, opened, tokenizer, train, write_view_run

from trainer.controller.journal import SEGMENT_GROUPS, Journal, replay
from trainer.controller.sampler import IssuedPrompt
from trainer.view.rollouts import NoGroupError, Query, Rollouts
from trainer.view.tokens import group_view, pieces

ALL = 100


def ids(rollouts: Rollouts, **query: object) -> list[int]:
    """The groups that a query has, in its order; a search may take several requests."""
    found, start = list[int](), 0
    while start is not None:
        page = rollouts.page(Query(**query), start, ALL)  # type: ignore[arg-type]
        found += [row["id"] for row in page["rows"]]
        start = page["next"]
    return found


def test_the_table_has_every_group_with_its_step_and_filters_choose_among_them(tmp_path: Path) -> None:
    (run,) = opened(write_view_run(tmp_path / "run"))
    table = run.rollouts
    assert ids(table) == [5, 4, 3, 2, 1, 0]  # 4 and 5 are not trained on yet
    row = table.page(Query(), 5, 1)["rows"][0]
    shown = [row[name] for name in ("step", "task", "rewards", "lengths")]
    assert shown == [1, "code", [1, -1, -1], [12, 13, 14]]
    assert row["advantages"] == [0.5, -0.5, None] and row["interrupted"] == [False, True, False]
    assert ids(table, task="math") == [5, 3, 1]
    assert ids(table, steps=(2, 2), order="oldest") == [2, 3]
    assert ids(table, steps=(1, 2), outcome="correct", bounds={"rewards": (0.0, None)}) == [3, 2, 1, 0]
    assert ids(table, outcome="correct", interrupted=True) == [3]  # one rollout meets both
    assert ids(table, bounds={"advantages": (0.4, None)}) == [3, 2, 1, 0]
    assert ids(table, bounds={"advantages": (0.6, None)}) == []
    assert ids(table, bounds={"lengths": (14, 14)}) == [5, 4, 3, 2, 1, 0]
    assert ids(table, bounds={"lengths": (15, None)}) == []
    assert table.tasks() == ["code", "math"]


def test_pages_follow_one_another_and_a_search_reads_texts_alone(tmp_path: Path) -> None:
    (run,) = opened(write_view_run(tmp_path / "run"))
    first, rest = (run.rollouts.page(Query(), start, 4) for start in (0, 4))
    assert (first["next"], first["total"], rest["next"]) == (4, 6, None)
    assert [row["id"] for row in (*first["rows"], *rest["rows"])] == [5, 4, 3, 2, 1, 0]
    assert ids(run.rollouts, text="CALCULATE 2") == [2]  # the prompt
    assert ids(run.rollouts, text="GRÜN: 7 of 4") == [4]  # a completion
    assert ids(run.rollouts, text='call "><IMG') == [3]  # a turn
    assert ids(run.rollouts, text="outcome") == []  # a key of the journal's


def test_samples_of_an_evaluation_are_shown_where_they_are_asked_for(tmp_path: Path) -> None:
    file = write_view_run(tmp_path / "run") / "evaluations" / "many" / "samples.jsonl"
    file.parent.mkdir(parents=True)
    samples = [
        {"text": t, "reward": r, "outcome": o, "tokens": 3}
        for t, r, o in (("it is 5", 1.0, "correct"), ("6", -1.0, "wrong"))
    ]
    lines = [
        {"step": s, "prompt": f"2 + 3, {s}", "answer": "5", "completions": samples, "set": ""} for s in (2, 4)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = opened(file.parents[2])
    assert ids(run.rollouts) == [5, 4, 3, 2, 1, 0]
    assert run.rollouts.tasks() == ["code", "held-out many", "math"]
    newest, oldest = ids(run.rollouts, task="held-out many")
    assert ids(run.rollouts, task="held-out many", text="3, 2") == [oldest]
    assert ids(run.rollouts, task="held-out many", text="IT IS", steps=(4, 4)) == [newest]
    view = group_view(run.folder, *run.rollouts.record(newest))
    assert (view["step"], view["prompt"], view["answer"]) == (4, "2 + 3, 4", "5")
    assert [(r["tokens"]["text"], r["reward"], r["length"]) for r in view["rollouts"]] == [
        (["it is 5"], 1.0, 3),
        (["6"], -1.0, 3),
    ]
    file.unlink()  # as when it is evaluated anew
    file.write_text(json.dumps(lines[0]) + "\n")
    run.rollouts.update(60.0)
    assert len(ids(run.rollouts, task="held-out many")) == 1


def test_what_a_run_writes_meanwhile_is_read_once_its_line_is_whole(tmp_path: Path) -> None:
    (run,) = opened(write_view_run(tmp_path / "run"))
    file = tmp_path / "run/journal/000000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    finished = next(line for line in lines if line.startswith(b'{"finished": 5'))
    again = finished.replace(b'{"finished": 5', b'{"finished": 6').replace(b"Calculate 5", b"Calculate 6")
    with file.open("ab") as out:
        out.write(again[:99])
        out.flush()
        assert run.rollouts.update(60.0) and 6 not in ids(run.rollouts)
        out.write(again[99:])
    assert run.rollouts.update(60.0) and ids(run.rollouts, text="calculate 6") == [6]
    with file.open("ab") as out:
        out.write(b'{"issued": 6, "epoch": 1, "prompt_id": "x", "step": 0}\n')  # a resume does it again
    run.rollouts.update(60.0)
    assert 6 not in ids(run.rollouts)
    file.unlink()  # as pruning does
    with pytest.raises(NoGroupError, match="deleted"):
        run.rollouts.record(3)
    with pytest.raises(NoGroupError, match="no finished group 77"):
        run.rollouts.record(77)


def test_a_line_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    file = write_view_run(tmp_path / "run") / "journal/000000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if line.startswith(b'{"finished": 2'))
    lines[cut : cut + 1] = [lines[cut][:80] + b"\n", b"7\n", b'{"finished": 9}\n', b'{"learned": []}\n']
    wrong = {
        "finished": 8,
        "lengths": 5,
        "reward": [1.0],
        "outcome": [""],
        "truncated": [0],
        "interrupted": [0],
    }
    lines.append(json.dumps(wrong).encode() + b"\n")
    file.write_bytes(b"".join(lines))
    (run,) = opened(tmp_path / "run")
    assert ids(run.rollouts) == [5, 4, 3, 1, 0] and len(run.rollouts.damaged) == 4
    assert "4 lines of the journal cannot be read" in run.view()["warnings"][-1][1]
    assert "(journal/000000.jsonl, byte" in run.view()["warnings"][-1][1]
    file.unlink()
    run.rollouts.update(60.0)
    assert run.rollouts.damaged == []


def test_pruned_files_leave_the_table_and_break_no_search(tmp_path: Path) -> None:
    (run,) = opened(write_view_run(tmp_path / "run"))
    (tmp_path / "run/journal/000000.jsonl").unlink()
    assert ids(run.rollouts, text="calculate") == []  # before the next look at the folder
    assert run.rollouts.update(60.0) and ids(run.rollouts) == [] and run.rollouts.progress() == (0, 0)


@pytest.mark.parametrize("groups", [2, 8])
def test_a_run_that_begins_anew_in_its_folder_is_read_from_its_beginning(tmp_path: Path, groups: int) -> None:
    folder = write_view_run(tmp_path / "run")
    (run,) = opened(folder)
    (folder / "journal").rename(folder / "before-1")
    write_view_run(tmp_path / "again", groups, tokens=9)
    (tmp_path / "again/journal").rename(folder / "journal")
    assert run.rollouts.update(60.0) and ids(run.rollouts, text="calculate") == [*reversed(range(groups))]
    assert run.rollouts.record(1)[1]["lengths"] == [9, 10, 11]
    file = folder / "journal/000000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]))  # the same inode
    assert run.rollouts.update(60.0) and ids(run.rollouts) == [0]


def test_a_step_over_two_files_of_the_journal_is_known_to_both(tmp_path: Path) -> None:
    journal, last = Journal(tmp_path / "run/journal"), SEGMENT_GROUPS - 1
    groups = [invented(number, 8) for number in (last, last + 1)]
    for one in groups:
        journal.issued(IssuedPrompt(one.group_id, 0, one.prompt, 0))
        journal.finished(one)
    train(journal, 9, groups)
    journal.close()
    table = Rollouts(tmp_path / "run/journal")
    assert table.update(60.0) and ids(table, steps=(9, 9)) == [last + 1, last]


def test_tokens_have_their_text_and_numbers_and_what_was_not_sampled_stands_apart(tmp_path: Path) -> None:
    folder = write_view_run(tmp_path / "run")
    (run,) = opened(folder)
    view = group_view(folder, *run.rollouts.record(0))
    right, interrupted, left_out = view["rollouts"]
    group = invented(0, 12)
    whole = tokenizer().decode(group.rollouts[0].token_ids.tolist(), skip_special_tokens=False)
    assert "".join(right["tokens"]["text"]) == whole
    assert right["tokens"]["logprob"] == pytest.approx(group.rollouts[0].logprobs_gen.tolist(), abs=1e-3)
    assert right["tokens"]["log_ratio"] == [0.25] * 12 and right["tokens"]["entropy"] == [1.5] * 12
    assert right["advantage"] == 0.5 and left_out["advantage"] is None
    assert left_out["tokens"]["entropy"] == [None] * 14
    blocks = [(block["sampled"], block["end"]) for block in interrupted["blocks"]]
    assert blocks == [(True, 4), (False, 7), (True, 13)]
    assert interrupted["tokens"]["logprob"][4:7] == interrupted["tokens"]["entropy"][4:7] == [None] * 3
    assert (view["prompt"], view["answer"], view["step"]) == (group.prompt.text, "42", 1)


def test_an_episode_has_a_block_for_each_turn_with_its_role_reward_and_calls(tmp_path: Path) -> None:
    folder = write_view_run(tmp_path / "run")
    (run,) = opened(folder)
    episode = group_view(folder, *run.rollouts.record(3))["rollouts"][0]
    call, result, last = episode["blocks"]
    assert call["reward"] == 0.25 and call["calls"][0].startswith("add")
    assert result["role"] == "tool" and not result["sampled"] and last["reward"] == -1.0
    assert episode["count"] == 2 and episode["error"].startswith("step raised")


def test_long_completions_come_in_parts_that_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.view.tokens.AT_ONCE", 15)
    folder = write_view_run(tmp_path / "run")
    (run,) = opened(folder)
    record = run.rollouts.record(0)
    parts = [group_view(folder, *record)["rollouts"][1], group_view(folder, *record, 5, 1)["rollouts"][0]]
    assert [len(part["tokens"]["text"]) for part in parts] == [5, 8]
    assert [[b["end"] for b in part["blocks"]] for part in parts] == [[4, 5], [2, 8]]
    whole = tokenizer().decode(invented(0, 12).rollouts[1].token_ids.tolist(), skip_special_tokens=False)
    assert "".join(t for part in parts for t in part["tokens"]["text"]) == whole


def test_without_a_tokenizer_tokens_are_their_ids(tmp_path: Path) -> None:
    assert pieces(tmp_path, np.array([7, 8], np.int32)) == ["[7] ", "[8] "]


def test_a_character_of_several_tokens_is_shown_once(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    byte_level.pre_tokenizer, byte_level.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    (tmp_path / "tokenizer.json").write_text(byte_level.to_str())
    text = "a ü€😀 b"
    token_ids = np.array(byte_level.encode(text).ids, np.int32)
    texts = pieces(tmp_path, token_ids)
    assert "".join(texts) == text and len(texts) == len(text.encode()) and texts.count("") == 1 + 2 + 3


def test_what_the_learner_said_does_not_change_what_a_resume_reads(tmp_path: Path) -> None:
    folder = write_view_run(tmp_path / "run")
    by_id = {f"id{i:04d}": invented(i, 12).prompt for i in range(6)}
    _, finished, _ = replay(folder / "journal", 0, by_id)
    assert set(finished) == set(range(6))
    assert finished[1].rollouts[0].text == invented(1, 12).rollouts[0].text
    line = next(x for x in (folder / "journal/000000.jsonl").read_text().splitlines() if '{"learned"' in x)
    assert json.loads(line)["advantages"] == [0.5, -0.5, None]
