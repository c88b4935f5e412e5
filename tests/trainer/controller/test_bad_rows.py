"""Rows that cannot be used: skipped up to a share, counted, named; a wrong setting stays an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_data import ByteTokenizer, rows, write

from trainer.config import Config, ConfigError, DataConfig, VerifierConfig
from trainer.controller.bad_rows import write_skipped
from trainer.controller.data import Dataset, Reader, load_prompts
from trainer.controller.mixture import load_tasks

BAD: list[dict[str, Any]] = [{"question": "no answer?", "answer": None}, {"question": "x" * 300, "answer": 1}]


def load(source: str, **settings: Any) -> Dataset:
    defaults: dict[str, Any] = {"source": source, "held_out": 5, "max_prompt_tokens": 100}
    return load_prompts(Reader(DataConfig(**defaults | settings), ByteTokenizer()))


def test_bad_rows_are_skipped_up_to_the_share_and_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [*rows(10), *BAD, *rows(28, start=10)])
    good = write(tmp_path / "b.jsonl", rows(38))
    assert load(source, max_bad_rows=0.05).train == load(good).train
    (skipped,) = load(source, max_bad_rows=0.05).skipped
    first = f"{source}:11: the answer in 'answer' is empty; fill it or remove the row"
    assert skipped.line == f"data: 2 of 40 rows of {source} are skipped; the first: {first}"
    write_skipped(tmp_path, [skipped])
    lines = (tmp_path / "skipped_rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"] for line in lines] == [f"{source}:11", f"{source}:12"]
    assert json.loads(lines[1])["reason"].startswith("the prompt has 301 tokens")
    with pytest.raises(
        ConfigError, match=r"a.jsonl: 2 of 40 rows .*, over .*max_bad_rows, 0.04; the first: .*:11"
    ):
        load(source, max_bad_rows=0.04)
    with pytest.raises(
        ConfigError, match=r"2 of 40 rows .*max_bad_rows, 0; the first: .*:11: .*bad_rows 0.05 skips"
    ):
        load(source)  # a file of one's own: none


def test_where_many_rows_are_bad_skipping_them_is_no_advice(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [*rows(6), *BAD])
    with pytest.raises(ConfigError, match=r"2 of 8 rows .*; fill it or remove the row$"):
        load(source)


def test_lines_that_are_no_json_are_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        f"{json.dumps(rows(1)[0])}\n{{\n" + "".join(json.dumps(r) + "\n" for r in rows(9, start=1))
    )
    assert load(str(path), max_bad_rows=0.1).skipped[0].rows[0][0] == f"{path}:2"


def test_where_every_row_is_bad_a_setting_is_wrong(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", rows(9))
    with pytest.raises(ConfigError, match=r"a.jsonl:1: no column 'solution'; there are 'question', 'answer'"):
        load(source, answer_column="solution", max_bad_rows=1.0)


def test_a_bad_row_is_never_held_out_and_the_choice_stays_that_of_the_good_rows(tmp_path: Path) -> None:
    """Whatever data.size is; the row whose hash is the smallest is made bad."""
    best = load(write(tmp_path / "a.jsonl", rows(30)), held_out=5).held_out
    items = [r | {"answer": None} if r["question"] == best[0].text else r for r in rows(30)]
    source = write(tmp_path / "b.jsonl", items)
    good = write(tmp_path / "c.jsonl", [r for r in items if r["answer"] is not None])
    for size in (0, 12):
        data = load(source, size=size, max_bad_rows=0.1)
        assert data.held_out[:4] == load(good).held_out[:4] and data.held_out == load(good).held_out
        assert best[0].text not in {p.text for p in data.prompts}


def test_rows_that_nobody_uses_hide_no_bad_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows trained on, and half of those that could be held out, are bad."""
    monkeypatch.chdir(tmp_path)  # the places of rows that cannot be read decide which of them count
    items = [r | {"answer": None} if i % 2 else r for i, r in enumerate(rows(2000))]
    source = write(tmp_path / "a.jsonl", [*items[:20], *rows(2000, start=5000)])
    with pytest.raises(ConfigError, match="rows cannot be used, over the share"):
        load(source, size=20, max_bad_rows=0.05)
    train, test = write(tmp_path / "b.jsonl", rows(9, start=9000)), write(tmp_path / "c.jsonl", items)
    with pytest.raises(ConfigError, match=r"c.jsonl: .* rows cannot be used, over the share"):
        load(train, held_out_source=test, max_bad_rows=0.05)
    unread = Path("d.jsonl")
    more = (json.dumps(r) + "\n" if i % 50 else "{\n" for i, r in enumerate(rows(2000, start=5000)))
    unread.write_text("".join(json.dumps(r) + "\n" for r in rows(20)) + "".join(more))
    assert len(load(str(unread), size=20, max_bad_rows=0.05).train) >= 19


def test_answers_that_the_verifier_cannot_compare_with_are_bad_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [*rows(19), {"question": "half?", "answer": "a half"}])
    config = Config(data=DataConfig(source=source, held_out=5), verifier=VerifierConfig(kind="number"))
    with pytest.raises(ConfigError, match=r"a.jsonl:20: verifier.kind number, but .* is 'a half'"):
        load_tasks(config, ByteTokenizer())


def test_training_prompts_that_are_held_out_are_skipped_up_to_the_share(tmp_path: Path) -> None:
    train, held = write(tmp_path / "a.jsonl", rows(20)), write(tmp_path / "b.jsonl", rows(9, start=19))
    data = load(train, held_out_source=held, max_bad_rows=0.05)
    assert len(data.train) == 19 and data.skipped[0].rows == (
        (f"{train}:20", f"its prompt is also in data.held_out_source {held}"),
    )


def odd(row: dict[str, Any]) -> Any:
    """A user's data.map: it renames, leaves out the even ones, and trips over 7."""
    n = row["answer"] - 1
    if n == 7:
        raise ValueError("seven\nis wrong")
    return {"question": f"{n}?", "answer": [n], "pair": (n, n)} if n % 2 else None


def test_a_function_of_ones_own_makes_the_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", rows(20))
    data = load(source, map="test_bad_rows:odd", max_bad_rows=0.1, held_out=1)
    assert {p.text for p in data.prompts} == {f"{n}?" for n in range(1, 20, 2) if n != 7}
    assert data.train[0].metadata == {"question": "1?", "answer": [1], "pair": [1, 1]}
    reasons = dict(data.skipped[0].rows)
    assert len(reasons) == 11 and reasons[f"{source}:1"] == "data.map returned None"
    assert reasons[f"{source}:8"].endswith("data.map test_bad_rows:odd raised ValueError: seven is wrong")
    with pytest.raises(ConfigError, match="1 of 10 rows cannot be used, over the share"):
        load(source, map="test_bad_rows:odd", max_bad_rows=0.05, held_out=1)  # ten are left out
    with pytest.raises(ConfigError, match=r"data.map nowhere:f: cannot import it"):
        load(source, map="nowhere:f")
    with pytest.raises(
        ConfigError, match=r"a.jsonl:1: data.map builtins:len returned 2; expected a row as a dict"
    ):
        load(source, map="builtins:len")
