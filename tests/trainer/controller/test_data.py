"""Data: a split that depends on the texts only, and errors that name the line."""

import hashlib
import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from trainer.config import ConfigError, DataConfig
from trainer.controller import sources
from trainer.controller.data import Dataset, Reader, load_prompts
from trainer.main import main
from trainer.verifiers.code_runner import decode, encode
from trainer.verifiers.kinds.reasoning_gym import generate


class ByteTokenizer:
    """One token per byte; a chat template only where a test gives it one."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + list(text.encode())

    def apply_chat_template(
        self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool, think: bool = True
    ) -> str:
        assert not tokenize and add_generation_prompt
        if turns[0]["role"] == "developer":
            raise ValueError("no such\nrole")
        return "".join(f"<{t['role']}>{t['content']}" for t in turns) + "<assistant>" + "<think>" * think


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def rows(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(start, start + n)]


def load(tokenizer: Any = None, **settings: Any) -> Dataset:
    return load_prompts(Reader(DataConfig(**settings), tokenizer or ByteTokenizer()))


def error(tokenizer: Any = None, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tokenizer, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_json_file_is_a_list_of_rows_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in (json.dumps(rows(3), indent=1), "\n".join(map(json.dumps, rows(3)))):
        path.write_text(text)
        texts = {p.text for p in load(source=str(path), held_out=1).prompts}
        assert texts == {r["question"] for r in rows(3)}
    for content, problem in {
        json.dumps([*rows(2), 7]).encode(): 'a.json row 3: expected an object {"column": value}, found 7',
        b'[{"question": "caf\xe9"}]': "a.json: byte 0xe9 is not UTF-8",
        b'\xef\xbb\xbf[{"question": "caf\xe9"}]': "a.json: byte 0xe9 is not UTF-8",
        b"[{": "a.json: not readable as JSON: ",
        b"[]": "it has no rows",
    }.items():
        path.write_bytes(content)
        assert problem in error(source=str(path), held_out=1)


def test_a_csv_file_has_text_in_its_columns_and_names_its_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    head = '\ufeff,My question,Answer\r\n0,"1 + 1,\r\nor 2 * 1?",2\r\n'.encode()
    settings = {"source": str(path), "prompt_column": "My question", "answer_column": "Answer"}
    path.write_bytes(head + b"1," + b"x" * 200_000 + b",5.0\r\n\r\n")
    prompts = load(**settings, held_out=1, max_prompt_tokens=300_000).prompts
    assert {(p.text[:8], p.answer, p.place) for p in prompts} == {
        ("1 + 1,\r\n", "2", f"{path}:3"),
        ("xxxxxxxx", "5.0", f"{path}:4"),
    }
    for row, problem in {
        b"1,caf\xe9,3": ":4: byte 0xe9 is not UTF-8",
        b"1,one, two,3": ":4: more than the 3 cells of the header; put quotes around commas",
        b"1,one": ":4: the answer in 'Answer' is empty",
    }.items():
        path.write_bytes(head + row)
        assert f"a.csv{problem}" in error(**settings, held_out=1)


def test_a_csv_file_whose_rows_or_columns_run_together_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    head, row = b"question,answer\n", b'"5"" or\n6"" pipe, 1"",?",5"\n"",1\n'
    path.write_bytes(head + row.replace(b'""', b"x", 3) + b'q5",1\n')
    assert len(load(source=str(path), held_out=1, max_bad_rows=0.5).prompts) == 2  # one prompt is empty
    for content, problem in {
        head + b'a,1\n"5 inch pipe,1\nb,2\n': ":3: the row that begins here is not CSV: unexpected end",
        head + b'a,1\n"5" pipe,1\nb,2\n': ":3: the row that begins here is not CSV: ',' expected after",
        b'question,"answer\n1,2\n': ":1: the row that begins here is not CSV: unexpected end",
        b"question,answer,answer\na,1,2\n": ":1: the header names 'answer' twice",
        b"question,r\xe9ponse\na,1\n": ":1: byte 0xe9 is not UTF-8",
        "question,answer\na,1\n".encode("utf-16"): ":1: byte 0xff is not UTF-8",
    }.items():
        path.write_bytes(content)
        assert f"a.csv{problem}" in error(source=str(path), held_out=1)
    path.write_bytes(b"question,answer,,\na,1,,\nb,2,,\n")  # empty columns, as spreadsheets write them
    assert len(load(source=str(path), held_out=1).prompts) == 2


def test_held_out_prompts_are_those_with_the_smallest_hashes(tmp_path: Path) -> None:
    texts = [r["question"] for r in rows(30)]
    expected = sorted(texts, key=lambda t: hashlib.sha256(t.encode()).hexdigest())[:7]
    shuffled = rows(30)
    random.Random(1).shuffle(shuffled)
    one = load(source=write(tmp_path / "a.jsonl", rows(30)), held_out=7)
    two = load(source=write(tmp_path / "b.jsonl", shuffled), held_out=7)
    assert [p.text for p in one.held_out] == [p.text for p in two.held_out] == expected
    assert {p.text for p in one.train} == set(texts) - set(expected)
    assert [p.text for p in one.train] == [t for t in texts if t not in expected]  # the file's order


def test_equal_prompts_are_one_prompt_and_size_bounds_a_file(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", rows(5) + rows(5))
    data = load(source=source, held_out=1)
    assert len(data.train) == 4 and len(load(source=source, size=4, held_out=1).train) == 3
    first = data.train[0]
    assert first.prompt_id == hashlib.sha256(first.text.encode()).hexdigest()[:16]
    assert first.token_ids == (1, *first.text.encode())


@pytest.mark.parametrize("source", ["file", "reasoning_gym:chain_sum"])
def test_more_data_is_held_against_the_same_prompts(source: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 300 * rows(1) + rows(300)) if source == "file" else source
    small, large = (load(source=path, size=size, held_out=40) for size in (360, 2500))
    ids = [[p.prompt_id for p in data.held_out] for data in (small, large)]
    assert ids[0] == ids[1] and len(set(ids[0])) == 40
    assert {p.prompt_id for p in small.train} < {p.prompt_id for p in large.train}
    assert not {p.prompt_id for p in large.train} & {p.prompt_id for p in large.held_out}
    assert {p.text for p in small.train} <= {r["question"] for r in rows(60)} or source != "file"


def test_messages_and_system_prompts_go_through_the_chat_template(tmp_path: Path) -> None:
    def turns(*pairs: str) -> list[dict[str, str]]:
        return [dict(zip(("role", "content"), pair.split(":"), strict=True)) for pair in pairs]

    def texts(items: list[Any], **settings: Any) -> set[str]:
        lines = [{"question": item, "answer": "1"} for item in items]
        source, tokenizer = write(tmp_path / "a.jsonl", lines), ByteTokenizer("any")
        data = load(tokenizer, source=source, held_out=1, **settings)
        return {bytes(p.token_ids).decode() for p in data.prompts}

    single, several = turns("user:a"), turns("system:s", "user:b", "assistant:c", "user:d")
    assert texts([single, several]) == {
        "<user>a<assistant><think>",
        "<system>s<user>b<assistant>c<user>d<assistant><think>",
    }
    options = {"system": "Be brief.", "chat_options": {"think": False}}
    expected = {f"<system>Be brief.<user>{x}<assistant>" for x in "ab"}
    assert texts([single, turns("user:b")], **options) == expected == texts(["a", "b"], chat=True, **options)

    def refused(item: Any, **settings: Any) -> str:
        source = write(tmp_path / "b.jsonl", [{"question": item, "answer": "1"}] * 2)
        tokenizer = ByteTokenizer("any") if settings.pop("template_of_chat", True) else None
        return error(tokenizer, source=source, held_out=1, **settings)

    assert "ends with the assistant's turn" in refused(turns("user:a", "assistant:b"))
    assert 'expected {"role": ..., "content": ...}' in refused([{"from": "human", "value": "a"}])
    assert "set data.template to '{question}', its default" in refused(single, template="{question} Think.")
    assert "system prompt of its own" in refused(several, system="Be brief.")
    assert "data.system has no effect" in refused("a", system="Be brief.")
    assert "holds a conversation, but this tokenizer has no chat template" in refused(
        single, template_of_chat=False
    )
    two = [{"question": turns(f"developer:{x}"), "answer": "1"} for x in "ab"]
    message = error(ByteTokenizer("any"), source=write(tmp_path / "c.jsonl", two), held_out=1)
    assert "the chat template refuses: no such role" in message


def test_messages_may_be_json_text_and_their_further_keys_reach_the_template(tmp_path: Path) -> None:
    class NamedTokenizer(ByteTokenizer):
        def apply_chat_template(self, turns: list[dict[str, str]], *_: Any, **options: Any) -> str:
            return "".join(f"<{t['role']} {t.get('name')}>{t['content']}" for t in turns)

    turns = [{"role": "user", "content": "a", "name": name} for name in (None, "Ann", "Bob")]
    items = [{"question": x, "answer": "1"} for x in ([turns[0]], json.dumps([turns[1]]), [turns[2]])]
    data = load(NamedTokenizer("any"), source=write(tmp_path / "a.jsonl", items), held_out=1)
    texts = {p.text: bytes(p.token_ids).decode() for p in data.prompts}
    assert texts == {
        "a": "<user None>a",
        'user: a {"name": "Ann"}': "<user Ann>a",
        'user: a {"name": "Bob"}': "<user Bob>a",
    }
    source = write(tmp_path / "b.jsonl", [{"question": str([turns[1]]), "answer": "1"}] * 2)
    assert "b.jsonl:1: the conversation in 'question' is text, but no JSON" in error(source=source)


def test_nested_columns_are_named_with_dots(tmp_path: Path) -> None:
    item = {"a.b": "whole", "a": {"b": "part", "c": [{"d": "x"}, {"d": "y"}]}}
    items = [item | {"n": i, "answer": {"all": [f"{i}", "z"]}} for i in range(2)]
    settings = {"template": "{a.b} {a.c.d} {a.c.1.d} {n}", "answer_column": "answer.all"}
    source = write(tmp_path / "a.jsonl", items)
    data = load(source=source, held_out=1, prompt_column="a.b", **settings)
    assert {(p.text, p.answer) for p in data.prompts} == {
        (f"whole x\ny y {i}", (f"{i}", "z")) for i in range(2)
    }
    for wrong in ("a.x", "a.c.2.d", "n.d", "answer.all.d"):
        assert f"no column '{wrong}'" in error(source=source, answer_column=wrong, template="{n}")


def test_only_prompts_that_are_used_are_kept_and_a_stream_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,000 rows with size 10 and 5 held out, 15 prompts at most are tokenised at once, and far fewer than
    1,000 in all: a row beyond `size` is made a prompt when its hash is one of the 5 smallest so far."""
    asked: list[str] = []

    def encode(_: ByteTokenizer, text: str) -> list[int]:
        asked.append(text)
        return [1]

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    source = write(tmp_path / "a.jsonl", rows(1000))
    data = load(source=source, size=10, held_out=5)
    expected = sorted((r["question"] for r in rows(1000)), key=lambda t: hashlib.sha256(t.encode()).digest())[
        :5
    ]
    assert [p.text for p in data.held_out] == expected and len(asked) < 100

    def endless(name: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return ({"question": f"{i}?", "answer": 1} for i in count())

    monkeypatch.setattr(sources, "_hub", endless)
    stream = {"source": "datasets:endless", "options": {"streaming": True}, "held_out": 40}
    small, large = (load(size=size, **stream) for size in (4, 12_000))
    ids = sorted(hashlib.sha256(f"{i}?".encode()).hexdigest()[:16] for i in range(10_000))
    assert [p.prompt_id for p in small.held_out] == [p.prompt_id for p in large.held_out] == ids[:40]
    assert len(large.train) == 11_960
    assert "is streamed, and may never end" in error(**stream)


@pytest.mark.parametrize("package", ["datasets", "pyarrow"])
def test_a_missing_package_is_said_before_a_model_is_fetched(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    monkeypatch.setattr(
        "trainer.models.resolve.resolve_model", lambda path: pytest.fail("a model was fetched")
    )
    source = "datasets:any" if package == "datasets" else "a.parquet"
    run_dir = str(tmp_path / "run")
    assert main(["--data.source", source, "--run-dir", run_dir]) == 2
    assert f"error: {source} needs the package {package}: pip install {package}" in capsys.readouterr().err
    assert main(["--data.source", str(tmp_path / "no.jsonl"), "--run-dir", run_dir]) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err and not Path(run_dir).exists()
    assert main(["--data.map", "no_module:f", "--run-dir", run_dir]) == 2
    assert "data.map no_module:f: cannot import it" in capsys.readouterr().err


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], [["user", "a"]]])
def test_what_is_no_text_is_no_prompt(value: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"question": value, "answer": "1"}] * 2)
    assert "a.jsonl:1: 'question' is" in (message := error(source=source)) and "list of messages" in message


def test_a_dry_run_examines_the_files_that_are_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = write(tmp_path / "a.jsonl", rows(30))
    argv = ["--data.source", source, "--data.held_out", "8", "--dry-run"]
    assert main(argv) == 0
    assert (
        f"data: 22 different training prompts and 8 held out, in {source}\ndata: the first prompt is 'What"
        in (capsys.readouterr().out)
    )
    for more, says in (
        (
            ["--data.held_out", "30"],
            "takes 30; one must be left to train on: lower data.held_out",
        ),
        (["--data.answer_column", "solution"], "a.jsonl:1: no column 'solution'"),
    ):
        assert main([*argv, *more]) == 2
        assert says in capsys.readouterr().err.splitlines()[-1]
    for elsewhere, says in {
        str(tmp_path / "b.jsonl"): "b.jsonl does not exist",  # its folder is here
        str(tmp_path / "a.xlsx"): "expected reasoning_gym:TASK, datasets:NAME, a .jsonl",
    }.items():
        assert main(["--data.source", elsewhere, "--dry-run"]) == 2
        assert says in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "scorer_of_a_user.py").write_text("def score(completion, answer, metadata): return 1.0\n")
    for kind, says in {"score": "", "scores": "has no attribute 'scores'"}.items():
        assert main([*argv, "--verifier.kind", f"scorer_of_a_user:{kind}"]) == (2 if says else 0)
        assert says in capsys.readouterr().err
    assert main([*argv, "--model.path", "tiny", "--engine.max_new_tokens", "256"]) == 2
    assert "up to 256 tokens; the model has 256 positions" in capsys.readouterr().err
    far = str(tmp_path / "far" / "b.jsonl")
    assert main([*argv, "--data.held_out_source", "reasoning_gym:chain_sum"]) == 0
    out = capsys.readouterr().out
    assert f"data: 30 different prompts in {source}" in out
    assert "data: reasoning_gym:chain_sum, which only a run reads" in out
    assert main([*argv, "--evaluation.sets", f"{{far: {far}}}"]) == 0
    assert f"data: {far} is not on this machine, so it is not checked" in capsys.readouterr().out
    near = write(tmp_path / "b.jsonl", rows(2, start=40))
    assert main([*argv, "--evaluation.sets", f"{{near: {near}}}"]) == 0
    assert "data: 2 held out for evaluation.sets.near" in capsys.readouterr().out
    leak = write(tmp_path / "c.jsonl", rows(30))
    assert main([*argv, "--evaluation.sets", f"{{leak: {leak}}}"]) == 2
    assert "22 of 22 training prompts are also in evaluation.sets.leak" in capsys.readouterr().err


def test_a_prompt_with_two_answers_has_its_first_and_the_other_row_is_named(tmp_path: Path) -> None:
    again = [rows(1)[0], rows(1)[0] | {"answer": 7}]
    source = write(tmp_path / "a.jsonl", [*rows(9), *again])
    data = load(source=source, held_out=2)
    assert len(data.prompts) == 9 and {p.answer for p in data.prompts if "What is 0" in p.text} == {"1"}
    assert [(s.total, s.rows) for s in data.skipped] == [
        (11, ((f"{source}:11", f"its prompt is that of {source}:1, whose answer is '1' and not '7'"),))
    ]


def test_epochs_of_data_become_steps_where_no_others_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """22 of 30 prompts are trained on, and one is there twice: 2.5 epochs in batches of 4 are 13.75 steps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source, recipe = write(tmp_path / "a.jsonl", [*rows(30), *rows(1)]), tmp_path / "mine.yaml"
    argv = ["--data.source", source, "--data.held_out", "8", "--pipeline.prompts_per_step", "4", "--dry-run"]
    epochs = ["--pipeline.epochs_of_data", "2.5"]
    assert main([*argv, *epochs]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out.partition("set by")[0])["pipeline"]["steps"] == 14
    assert "note: pipeline.steps 14: 2.5 epochs of 22 training prompts, 4 a step" in err
    assert main([*argv, *epochs, "--pipeline.steps", "14"]) == 0  # as in the config.yaml of such a run
    recipe.write_text("pipeline: {steps: 99, epochs_of_data: 2.5}")
    for more, steps in (([*epochs, "--pipeline.steps", "15"], 15), (["--recipe", str(recipe)], 99)):
        assert main([*argv, *more]) == 2
        says = f"pipeline.steps is {steps}, and pipeline.epochs_of_data 2.5 comes to 14 (22 training prompts"
        assert says in capsys.readouterr().err
    task = tmp_path / "task.yaml"
    task.write_text(f"data: {{source: {source}, held_out: 8}}\nverifier: {{kind: exact}}")
    recipe.write_text("pipeline: {steps: 99, prompts_per_step: 4}")
    assert main(["--recipe", str(recipe), "--task", str(task), "--dry-run", *epochs]) == 0
    assert "pipeline.steps 14, not 99: 2.5 epochs of 22" in capsys.readouterr().err
    assert main(["--data.source", "far/nowhere.jsonl", "--dry-run", *epochs]) == 0
    assert "follow from epochs_of_data 2.5 once the data are read" in capsys.readouterr().err


def test_a_boxed_answer_is_taken_with_its_braces_matched(tmp_path: Path) -> None:
    solution = "So \\boxed{1} is not it, but \\boxed{\\frac{1}{\\sqrt{2}}}."
    source = write(tmp_path / "a.jsonl", [{"question": i, "answer": solution} for i in range(2)])
    assert load(source=source, held_out=1, answer_pattern="boxed").train[0].answer == "\\frac{1}{\\sqrt{2}}"
    source = write(tmp_path / "a.jsonl", [{"question": i, "answer": "1"} for i in range(2)])
    assert "'boxed' matches nothing in '1'" in error(source=source, held_out=1, answer_pattern="boxed")


def test_a_list_of_texts_is_a_text_a_line(tmp_path: Path) -> None:
    items = [{"question": i, "tests": ["assert f()", "assert g()"], "answer": "1"} for i in range(2)]
    data = load(source=write(tmp_path / "a.jsonl", items), held_out=1, template="{question}: {tests}")
    assert {p.text for p in data.prompts} == {f"{i}: assert f()\nassert g()" for i in range(2)}


def test_columns_template_and_pattern_make_the_prompt(tmp_path: Path) -> None:
    items = [
        {"Body": f"Ann has {i}.", "Q": "How many?", "Sol": f"#### 9\nso\n#### 1,00{i}", "n": i}
        for i in range(3)
    ]
    settings = {"prompt_column": "Q", "answer_column": "Sol", "answer_pattern": r"####\s*(.+)"}
    template, source = "{Body} {question} \\boxed{{}}", write(tmp_path / "a.jsonl", items)
    data = load(source=source, template=template, held_out=1, **settings)
    (prompt,) = (p for p in data.prompts if p.text == "Ann has 2. How many? \\boxed{}")
    assert prompt.answer == "1,002" and prompt.metadata == items[2]


def test_chat_wraps_the_prompt_and_leaves_its_id(tmp_path: Path) -> None:
    settings = {"source": write(tmp_path / "a.jsonl", rows(3)), "held_out": 1}
    bare, chat = load(**settings), load(ByteTokenizer("x"), chat=True, **settings)
    assert [p.prompt_id for p in chat.train] == [p.prompt_id for p in bare.train]
    assert bytes(chat.train[0].token_ids).decode() == f"<user>{chat.train[0].text}<assistant><think>"


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    items = [*rows(9), {"question": "a", "answer": 145.0}, {"question": "b", "answer": 0.5}]
    items = [r | {"answer": float(r["answer"])} for r in items]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(items), tmp_path / "a.parquet")
    table = load(source=str(tmp_path / "a.parquet"), held_out=3)
    assert table == load(source=write(tmp_path / "a.jsonl", items), held_out=3)
    assert {p.answer for p in table.prompts} == {*map(str, range(1, 10)), "145", "0.5"}  # whole: without .0


def test_overlap_with_the_held_out_source_is_refused(tmp_path: Path) -> None:
    train, held = write(tmp_path / "a.jsonl", rows(10)), write(tmp_path / "b.jsonl", rows(10, start=7))
    message = error(source=train, held_out_source=held, held_out=2)
    assert message.startswith("3 of 10 training prompts are also in") and "What is" in message
    apart = write(tmp_path / "c.jsonl", rows(5, start=50))
    data = load(source=train, held_out_source=apart, held_out=2, size=10)
    assert len(data.train) == 10 and len(data.held_out) == 2


LINES = {  # after "a.jsonl"
    '{"question": "b"': ":3: not a line of JSON",
    "[1, 2]": ':3: expected an object {"column": value}, found [1, 2]',
    b'{"question": "\xff"}': ":3: byte 0xff is not UTF-8; convert the file, as with iconv",
    '{"question": "b"}': ":3: no column 'answer'; there are 'question'",
    '{"q": "b", "answer": 1}': ":3: no column 'question'; there are 'q', 'answer'",
    '{"question": null, "answer": 1}': ":3: 'question' is null",
    '{"question": " ", "answer": 1}': ":3: the prompt is empty",
    '{"question": "b", "answer": " "}': ":3: the answer in 'answer' is empty",
    '{"question": "b", "answer": null}': ":3: the answer in 'answer' is empty",
    '{"question": "b", "answer": [[1]]}': ":3: 'answer' is list",
    '{"question": "b", "answer": []}': ":3: 'answer' is list",
    '{"question": "b", "answer": ["x", ""]}': ":3: the answer in 'answer' is empty",
    json.dumps({"question": "b" * 300, "answer": 1}): ":3: the prompt has 301 tokens",
}


@pytest.mark.parametrize("line", LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes) -> None:
    path = tmp_path / "a.jsonl"
    raw = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"question": "a", "answer": 1}\n\n' + raw + b"\n")  # a blank line counts as a line
    assert f"a.jsonl{LINES[line]}" in error(source=str(path), held_out=1, max_prompt_tokens=100)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("4 different prompts; data.held_out takes 4", {"held_out": 4}),
    ("no column 'body'; there are 'question', 'answer'", {"template": "{body}"}),
    ("write a literal brace twice", {"template": "{question} \\boxed{}"}),
    ("write a literal brace twice", {"template": "{question} \\boxed{"}),
    ("not a regular expression", {"answer_pattern": "("}),
    ("has no group", {"answer_pattern": "x"}),
    ("a.jsonl:1: data.answer_pattern", {"answer_pattern": "x(.)"}),
    ("no chat template", {"chat": True}),
    ("does not exist", {"source": "none.jsonl"}),
    ("expected reasoning_gym:TASK", {"source": "some.xlsx"}),
    ("it has no rows", {"source": "empty.jsonl"}),
    ("b.parquet: not a readable parquet", {"source": "b.parquet"}),
    ("similar names: basic_arithmetic", {"source": "reasoning_gym:basic_aritmetic"}),
    ("it takes min_terms", {"source": "reasoning_gym:basic_arithmetic", "options": {"terms": 1}}),
]


def test_wrong_settings_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty.jsonl", [])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    source = write(tmp_path / "a.jsonl", rows(4))
    for expected, settings in SETTINGS:
        assert expected in error(**{"source": source, "held_out": 1} | settings)


def test_a_generated_task_gives_the_same_items_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"seed": 0, "size": 4}
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = generate("polynomial_multiplication", arguments)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert generate("polynomial_multiplication", arguments) == one


def test_the_default_task_is_loaded_with_its_answers() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+", "-", "*"]}
    options |= {"allow_parentheses": False, "allow_negation": False}
    data = load(options=options, template="Question: {question}\nAnswer:", size=300, held_out=20)
    assert len(data.held_out) == 20 and len(data.train) > 80
    for prompt in data.train:
        expression = prompt.text.removeprefix("Question: Calculate ").removesuffix(".\nAnswer:")
        assert set(expression) <= set("0123456789+-* ") and eval(expression) == int(str(prompt.answer))
        assert prompt.metadata["origin"]["task"] == "basic_arithmetic"


def test_items_survive_json() -> None:
    item = {"grid": ((1, 2), [3, (4,)]), "map": {1: "a", (2, 3): None}, "text": {"x": 1.5}}
    assert decode(json.loads(json.dumps(encode(item, str))), str) == item
