"""The kinds of verifiers: what counts as right, what must not, and that a kind is one module."""

import asyncio
import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError, DataConfig, VerifierConfig
from trainer.controller.data import Reader, load_prompts
from trainer.models.tiny import make_tokenizer
from trainer.types import Answer, Prompt
from trainer.verifiers import verifier
from trainer.verifiers.kinds.reasoning_gym import ReasoningGym
from trainer.verifiers.pool import open_scorer
from trainer.verifiers.text import literal_number
from trainer.verifiers.verifier import find, registry

DOCS = Path(__file__).parents[3] / "docs"


def outcome(kind: str, completion: str, answer: Answer, **metadata: Any) -> str | None:
    """The outcome if comparing text settles it."""
    verdict = find(kind).quick(completion, answer, metadata)
    return verdict and verdict.outcome


NUMBERS = {
    "7": "7", " 42 ": "42", "+7": "7", "-7": "-7", "\u22127": "-7", "\uff17\uff12": "72", "1,234": "1234",
    "1,234,567.50": "1234567.5", "$7": "7", "\\$72": "72", "-$7": "-7", "$-7": "-7", "7.": "7", "7.0": "7",
    "07": "7", ".5": "0.5", "0": "0", "-0": "0",
}  # fmt: skip
NO_NUMBERS = [
    "", "17+25", "4!", "1=1", "71 or 72", "1/2", "1e3", "12,34", "1,2345", "7 7", "7%", "x", "--7", "-$-7",
    "$", "9" * 400, "1_000", "0x10", "nan", "inf", "\u0663",
]  # fmt: skip


@pytest.mark.parametrize("text", [*NUMBERS, *NO_NUMBERS])
def test_a_literal_number_is_read_and_anything_else_is_not(text: str) -> None:
    assert literal_number(text) == (Decimal(NUMBERS[text]) if text in NUMBERS else None)


FIRST_LINES = {" 7\n": "correct", "7\nQuestion: what is": "correct", " 7.0": "correct", "8": "wrong"}
FIRST_LINES |= dict.fromkeys(("3 + 4 = 7", "7 8", "the answer is 7", "", "\n", "17+25"), "unparsable")


@pytest.mark.parametrize("text", FIRST_LINES)
def test_kind_number_judges_the_first_line_only(text: str) -> None:
    assert outcome("number", text, "7") == FIRST_LINES[text]


# None: a worker is asked if that may help.
SEVERAL: list[tuple[str, tuple[str, ...], dict[str, str | None]]] = [
    ("exact", ("NYC", "New York"), {"  new   york\n": "correct", "nyc": "correct", "New York City": "wrong"}),
    ("number", ("7", "8"), {"8.0": "correct", "9": "wrong", "x": "unparsable"}),
    ("math", ("7", "8"), {r"\boxed{8}": "correct", r"\boxed{9}": "wrong", r"\boxed{4+4}": "unparsable"}),
    ("math", (r"\frac{1}{2}", "7"), {r"\boxed{7}": "correct", r"\boxed{\frac{2}{4}}": None}),
]


@pytest.mark.parametrize(("kind", "answers", "expected"), SEVERAL)
def test_any_of_several_gold_answers_is_right(
    kind: str, answers: tuple[str, ...], expected: dict[str, str | None]
) -> None:
    assert {text: outcome(kind, text, answers) for text in expected} == expected


MATH = [  # completion, gold, outcome; None: a worker must decide
    (r"so \boxed{42}", "42", "correct"),
    (r"\boxed{41} no, \boxed{42}", "42", "correct"),
    (r"\boxed{42} no, \boxed{41}", "42", "wrong"),
    (r"\boxed{{72}}", "72", "correct"),
    (r"\boxed{1{,}234}", "1234", "correct"),
    (r"\boxed{x = 72}", "72", "correct"),
    (r"\boxed{72\text{ cents}}", "72", "correct"),
    (r"\boxed{90^\circ}", "90", "correct"),
    (r"\boxed{50\%}", "50", "correct"),
    (r"\boxed{50\%}", "0.5", "wrong"),
    (r"\boxed{72\text{ thousand}}", "72", "unparsable"),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", "correct"),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", "correct"),
    ("The answer is 72.", "72", "correct"),
    ("She has **72** apples.", "72", "correct"),
    ("17 + 25 = 42", "42", "correct"), ("17 plus 25 equals 42.", "42", "correct"),
    ("17 equals 25 and 42.", "42", "unparsable"),
    ("#### 1,234", "1234", "correct"),
    # Reward hacks: an expression, an identity, a choice, an answer before the end of thinking.
    (r"\boxed{17+25}", "42", "unparsable"),
    (r"\boxed{4!}", "24", "unparsable"),
    (r"\boxed{1=1}", "1", "unparsable"),
    (r"\boxed{71 or 72}", "72", "unparsable"),
    (r"\boxed{71, 72}", "72", "unparsable"),
    (r"\boxed{\frac{1}{2} or \frac{1}{3}}", r"\frac{1}{3}", "unparsable"),
    ("The answer is 71 or 72.", "72", "unparsable"),
    ("It is minus 72", "72", "unparsable"),
    ("17+25", "42", "unparsable"),
    ("4!", "24", "wrong"),
    ("The answer is 2x", "2", "unparsable"),
    (r"\boxed{42}</think> I do not know", "42", "unparsable"),
    (r"<think> \boxed{42}", "42", "unparsable"),
    (r"\boxed{41}</think> \boxed{42}", "42", "correct"),
    (r"\boxed{42", "42", "unparsable"),
    ("", "42", "unparsable"),
    # Tasks instead of answers, unless the gold answer is written so.
    (r"\boxed{\int_0^1 x^2 dx}", r"\frac{1}{3}", "unparsable"),
    (r"\boxed{\sum_{n=1}^\infty 4^{-n}}", r"\frac{1}{3}", "unparsable"),
    (r"\boxed{\lim_{x\to 0} \frac{1}{3+x}}", r"\frac{1}{3}", "unparsable"),
    (r"\boxed{\frac{2!}{3!}}", r"\frac{1}{3}", "unparsable"),
    (r"\boxed{\max(0,\frac{1}{3})}", r"\frac{1}{3}", "unparsable"),
    (r"\boxed{\frac{d}{dx}\frac{x}{3}}", r"\frac{1}{3}", "unparsable"),
    (r"\boxed{n!}", "n!", "correct"),
    (r"\boxed{\frac{d}{2}\!}", r"\frac{d}{3}", None),
    (r"\boxed{\binom{n}{2}}", r"\binom{n}{3}", None),
    ("\\boxed{" + "1" * 1000 + "}", "42", "unparsable"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "gold", "expected"), MATH)
def test_kind_math_without_a_worker(completion: str, gold: str, expected: str | None) -> None:
    assert outcome("math", completion, gold) == expected


OPTIONS = ["London", "Paris", "A dog", "Rome"]  # B is right
CHOSEN = {
    "correct": [
        "B", " b\n", "(B)", "(b)", "[B]", "B.", "B)", "**B**", "$B$", "B. Paris", "(B) Paris", "B: Paris",
        "Paris", "paris.", "Answer: B", "answer: b", "Answer: (B)", "**Answer:** B", "Answer:\nB",
        "Answer: **B**.", "The answer is B", "The answer is B.", "The answer is (B) Paris.",
        "The answer is Paris",
        "The correct answer is option B.", "The correct option is (B).", "My final answer is: B",
        "The answer is **B**, because it is.", "The answer is B. C is wrong.", "A is wrong. So B is correct.",
        r"so \boxed{B}", r"\boxed{\text{B}}", r"\boxed{\text{(B)}}", r"\boxed{Paris}",
        r"\boxed{A} no, \boxed{B}",
        "The answer is A. Wait, no. The answer is B", "<think>Answer: A</think>Answer: B",
        "It lies in France.\n\nB", "Both are large.\nAnswer: B\nThis choice is made with care.",
    ],
    "wrong": [
        "A", "Answer: D", "The answer is A dog", r"\boxed{B} no, \boxed{A}", "Answer: B, no.\nAnswer: C",
    ],
    "unparsable": [
        "", "E", "Answer: Z", "A or B", "A, B", "A/B", "B and C", "Both A and B", "Paris or London", "Berlin",
        "The answer is A or B", "Either A or B", "The answer is not B", "BB", "Because", "I do not know",
        "Answer: B\nWait, the answer is not B.", "The answer is a mystery", "The answer could be B.",
        "B is wrong",
        r"\boxed{A or B}", r"\boxed{}", "The answer is B or perhaps\nC", "<think>Answer: B",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), [(text, outcome) for outcome, texts in CHOSEN.items() for text in texts]
)
def test_the_letter_that_a_completion_gives_is_judged(text: str, expected: str) -> None:
    assert outcome("choice", text, "B", choices=OPTIONS) == expected


def test_options_that_differ_in_case_only_are_told_by_letter_alone() -> None:
    assert outcome("choice", "b", "B", choices=["m", "M"]) == "correct"
    assert outcome("choice", "M", "B", choices=["m", "M"]) == "unparsable"


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(source: str, template: str = "{question}\n{choices}\nAnswer:") -> list[Prompt]:
    config = DataConfig(source=source, held_out=1, choices_column="options", template=template)
    data = load_prompts(Reader(config, make_tokenizer()))
    return sorted(data.train + data.held_out, key=lambda p: p.text)


def test_options_are_in_the_prompt_and_the_answer_is_a_letter_an_index_or_a_text(tmp_path: Path) -> None:
    answers = ["C", 2, "2", 1, "3", " B "]
    rows = [{"question": f"q{i}", "options": ["5", "3", "1"], "answer": a} for i, a in enumerate(answers)]
    prompts = prompts_of(write(tmp_path / "a.jsonl", *rows))
    assert prompts[0].text == "q0\nA. 5\nB. 3\nC. 1\nAnswer:"
    assert [p.answer for p in prompts] == ["C", "C", "C", "B", "B", "B"]
    assert not any(map(find("choice").problem, prompts))
    texts = {"C": "correct", "A": "wrong", "1": "correct", "?": "unparsable"}
    choices = prompts[0].metadata["choices"]
    assert {text: outcome("choice", text, prompts[0].answer, choices=choices) for text in texts} == texts


WRONG = {
    "names 0 of the options": {"options": ["x", "y"], "answer": "C"},
    "the answer 2 names 0": {"options": ["x", "y"], "answer": 2},
    "the answer True names 0": {"options": ["x", "y"], "answer": True},
    "names 2 of the options": {"options": ["B", "A"], "answer": "A"},
    "the answer '1' names 2": {"options": ["2", "3", "1"], "answer": "1"},  # an index, or an option
    "expected a list of 2 to 26 different options, given ['x', 'x']": {"options": ["x", "x"], "answer": 0},
    "expected a list of 2 to 26 different options, given [' a', 'a']": {"options": [" a", "a"], "answer": 0},
    "expected a list of 2 to 26 different options, given 'x'": {"options": "x", "answer": 0},
    "no column 'options'": {"answer": 0},
}


@pytest.mark.parametrize("expected", WRONG)
def test_rows_whose_answer_is_no_option_are_refused(tmp_path: Path, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prompts_of(write(tmp_path / "a.jsonl", {"question": "q", **WRONG[expected]}))
    assert expected in str(caught.value) and "a.jsonl:1" in str(caught.value)


LABELLED: list[tuple[str, Any, dict[str, Any]]] = [  # the right option's text, the answer, settings
    ("y", "1", {"labels": ["0", "1", "2"]}), ("y", 2, {"labels": [1, 2, 3]}),
    ("y", "b", {"labels": list("abc")}),
    ("y", [0, 1, 0], {}), ("z", [False, False, True], {}), ("x", 0.0, {}), ("z", "2", {}), ("y", "y", {}),
]  # fmt: skip


@pytest.mark.parametrize(("right", "answer", "more"), LABELLED)
def test_labels_indices_and_ones_name_the_right_option(
    right: str, answer: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    row = {"options": list("xyz"), "answer": answer} | more
    source = write(tmp_path / "a.jsonl", *({"question": q} | row for q in "pq"))
    settings: dict[str, Any] = {"labels_column": "labels"} if more else {}
    config = DataConfig(
        source=source, held_out=1, choices_column="options", template="{choices}{question}", **settings
    )
    for shuffle in (False, True):
        for prompt in load_prompts(Reader(replace(config, shuffle_choices=shuffle), make_tokenizer())).train:
            assert f"{prompt.answer}. {right}" in prompt.text


def test_labels_that_no_setting_names_are_not_taken_for_indices(tmp_path: Path) -> None:
    """ARC's rows: the label 2 is the second option, and the index 2 would be the third."""
    rows = [
        {"question": q, "answer": "2", "choices": {"text": list("xyz"), "label": list("123")}} for q in "pq"
    ]
    config = DataConfig(
        source=write(tmp_path / "a.jsonl", *rows), held_out=1, choices_column="choices.text",
        template="{choices}{question}",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"labels \['1', '2', '3'\]; set data.labels_column choices.label"):
        load_prompts(Reader(config, make_tokenizer()))
    with pytest.raises(ConfigError, match=r"given {'text': .*; name the part that is one, .* choices.text"):
        load_prompts(Reader(replace(config, choices_column="choices"), make_tokenizer()))
    data = load_prompts(Reader(replace(config, labels_column="choices.label"), make_tokenizer()))
    assert [p.answer for p in data.prompts] == ["B", "B"]


@pytest.mark.parametrize(
    ("answer", "labels", "right"),
    [
        ("seven", [1, 2, 3], 1),  # an option's text
        ([0, 1, 0], [0, 1, 0], 1),  # marks
        (2, [0, 1, 2], 2),  # indices are the labels
        (2, [1, 2, 3], "may be one of the labels [1, 2, 3]; set data.labels_column choices.label"),
        (2.0, list("123"), "the answer 2 may be one of the labels"),
        ("4", [3, 4, 5], "choices.label, or choices.text if it is an option's text"),
    ],
)
def test_an_answer_that_is_no_label_needs_no_labels(
    answer: Any, labels: list[Any], right: Any, tmp_path: Path
) -> None:
    choices = {"text": ["4", "seven", "nine"], "label": labels}
    source = write(
        tmp_path / "a.jsonl", *({"question": q, "answer": answer, "choices": choices} for q in "pq")
    )
    config = DataConfig(
        source=source, held_out=1, choices_column="choices.text", template="{choices}{question}"
    )
    if isinstance(right, str):
        with pytest.raises(ConfigError) as caught:
            load_prompts(Reader(config, make_tokenizer()))
        assert right in str(caught.value)
    else:
        assert [p.answer for p in load_prompts(Reader(config, make_tokenizer())).prompts] == [
            "ABC"[right]
        ] * 2


def test_shuffled_options_hide_where_the_right_one_was(tmp_path: Path) -> None:
    """The right one is first in 400 rows of 4: each letter has 100 ± 8.7 of them. Neither the other options'
    order nor the right one's place in the data matters."""
    options = ["right", "one", "two", "three"]
    rows = [{"question": f"q{i}", "answer": 0} | dict(zip("abcd", options, strict=True)) for i in range(400)]
    source = write(tmp_path / "a.jsonl", *rows)
    config = DataConfig(
        source=source, held_out=1, choices_column=("a", "b", "c", "d"), template="{question}\n{choices}",
        shuffle_choices=True,
    )  # fmt: skip
    texts = {p.text: p.answer for p in load_prompts(Reader(config, make_tokenizer())).train}
    assert all(70 < list(texts.values()).count(letter) < 130 for letter in "ABCD")
    other = replace(config, choices_column=("c", "a", "d", "b"), answer_column="a")
    assert texts == {p.text: p.answer for p in load_prompts(Reader(other, make_tokenizer())).train}


def test_a_column_of_its_own_is_the_answer_whatever_its_text(tmp_path: Path) -> None:
    """The right option reads "2": that is also the index of another one."""
    source = write(tmp_path / "a.jsonl", *({"question": f"q{i}", "a": 2, "b": 7, "c": 1} for i in range(2)))
    config = DataConfig(source=source, choices_column=("c", "a", "b"), template="{question}{choices}")
    data = load_prompts(Reader(replace(config, held_out=1, answer_column="a"), make_tokenizer()))
    assert [p.answer for p in (*data.train, *data.held_out)] == ["B", "B"]


def test_options_whose_place_gives_the_right_one_away_are_refused(tmp_path: Path) -> None:
    options = ["right", "wrong", "worse"]
    made = [{"question": f"q{i}", "choices": options, "answer": "right"} for i in range(30)]
    source = write(tmp_path / "a.jsonl", *made)
    config = DataConfig(source=source, held_out=1, choices_column="choices", template="{question}{choices}")
    with pytest.raises(ConfigError, match=r"right option is A in all 29 rows; .* set data.shuffle_choices"):
        load_prompts(Reader(config, make_tokenizer()))
    assert {
        p.answer for p in load_prompts(Reader(replace(config, shuffle_choices=True), make_tokenizer())).train
    } > {"A"}


@pytest.mark.parametrize("missing", [None, " "])
def test_an_option_that_is_missing_is_no_option(missing: str | None, tmp_path: Path) -> None:
    row = {"question": "q", "choices": ["x", "y", missing], "answer": "x"}
    config = DataConfig(
        source=write(tmp_path / "a.jsonl", row), choices_column="choices", template="{question}{choices}"
    )
    with pytest.raises(ConfigError, match="expected a list of 2 to 26 different options"):
        load_prompts(Reader(config, make_tokenizer()))


EXACT: dict[str, list[tuple[str, str]]] = {  # completion, gold answer
    "correct": [
        ("Answer: Paris", "Paris"), ("Paris.", "Paris"), ("**Answer:** Paris", "Paris"),
        ("Answer:\nParis", "Paris"), ("The capital of France is **Paris**.", "Paris"),
        ("It lies on the Seine. It is Paris!", "Paris"), ("Answer: Paris. It is large.", "Paris"),
        ("<think>Rome</think>\nParis", "Paris"), ("the Beatles", "Beatles"),
        (r"So \boxed{\text{Paris}}.", "Paris"), ("It was J. K. Rowling.", "J. K. Rowling"), ("U.S.", "US"),
        ("It is 10:30", "10:30"), ("\u201cRubik\u2019s cube\u201d", "Rubiks cube"),
        ("What is love", "What is Love?"), ("a\nb", "a\nb"), ("()", "()"), ("The answer is 3.5.", "3.5"),
        ("Not Rome.\nAnswer: Paris", "Paris"),
        ("1,000", "1000"), ("It is 12500.", "12,500"), ("Answer\uff1a\u6771\u4eac\u3002", "\u6771\u4eac"),
        ("\u0627\u0644\u0642\u0627\u0647\u0631\u0629\u061f", "\u0627\u0644\u0642\u0627\u0647\u0631\u0629"),
        ("It's Paris.", "Paris"),
        ("- Paris", "Paris"), ("1. Paris", "Paris"), ("# Paris", "Paris"), ("C#", "c#"),
    ],
    "wrong": [
        ("The answer is Paris, I think", "Paris"), ("Paris, Rome, Berlin", "Paris"),
        ("Paris or Rome", "Paris"), ("Paris\nRome", "Paris"), ("Paris. Rome", "Paris"),
        ("Paris. It is Rome", "Paris"), ("not Paris", "Paris"), ("It is not Paris", "Paris"),
        (r"\boxed{Paris} \boxed{Rome}", "Paris"), ("Answer: Paris\nAnswer: Rome", "Paris"), ("3.5", "35"),
        ("-5", "5"), (".5", "5"), ("f(x)", "fx"), (")(", "()"), ("the", "a"),
        ("1,00", "100"), ("C++", "C#"), ("1. Rome", "1"),
    ],
    "unparsable": [("", "Paris"), ("<think>Paris", "Paris"), (r"\boxed{Paris", "Paris")],
}  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), [(c, o) for o, cases in EXACT.items() for c in cases])
def test_kind_exact_finds_the_answer_and_believes_no_list(case: tuple[str, str], expected: str) -> None:
    assert outcome("exact", *case) == expected


def test_a_template_that_leaves_the_options_out_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"question": "q", "options": ["x", "y"], "answer": 0})
    with pytest.raises(ConfigError, match=r"data.template '{question}': it lacks the {choices}"):
        prompts_of(source, "{question}")


PROMPT = Prompt("id", "text", (1,), "7", {"choices": ["Paris", "Rome"]})


PAIRS = [  # kind, two completions, whether they have the same answer
    ("number", "7", " 7.0 \nso it is", True),
    ("number", "1,000", "$1000.", True),
    ("number", "7", "8", False),
    ("math", "so \\boxed{7}", "7.0 is it: 7.0", True),
    ("math", "\\boxed{\\frac{1}{2}}", "\\boxed{\\dfrac{1}{2}}", True),
    ("math", "\\boxed{\\frac{1}{2}}", "\\boxed{1/2}", False),
    ("math", "\\boxed{7\\%}", "thinking: 8 </think> \\boxed{7}", True),
    ("exact", "New  York", "new york\n", True),
    ("exact", "New York", "York", False),
    ("choice", "The answer is (B).", "Rome", True),
    ("choice", "A", "B", False),
    ("reasoning_gym", "so <answer> 3 4 </answer>", "3 4", True),
    ("reasoning_gym", "3 4", "4 3", False),
]
NO_VOTES = ["number: seven", "number: ", "math: <think> 7", "math: ", "exact:  \n", "choice: A or B"]


@pytest.mark.parametrize(("kind", "one", "other", "equal"), PAIRS)
def test_which_completions_have_the_same_answer(kind: str, one: str, other: str, equal: bool) -> None:
    first, second = (find(kind).vote(text, PROMPT) for text in (one, other))
    assert first is not None and second is not None and (first == second) is equal


@pytest.mark.parametrize("case", NO_VOTES)
def test_a_completion_without_an_answer_has_no_vote(case: str) -> None:
    kind, _, text = case.partition(": ")
    assert find(kind).vote(text, PROMPT) is None


def test_text_that_could_change_a_scorer_has_its_worker_replaced() -> None:
    gym = ReasoningGym("reasoning_gym")
    for harmless in ("1 + 2*(3 - 4)/5", "six times seven", "-3.5"):
        assert not gym.may_execute(harmless), harmless
    for hostile in ("print(1)", "a.b", "__import__", "[1][0]", "x = 1"):
        assert gym.may_execute(hostile), hostile


UNMATCHABLE = {
    "number": ("a half", ", not a literal number; use math or exact"),
    "reasoning_gym": ("7", " of another source; use math or exact"),
    "choice": ("B", ", without options that have letters; set data.choices_column"),
    "exact": ('{"a": 1}', "; expected text, a number or a list of those"),
    "math": ("", "; use reasoning_gym, the task's own scorer"),
    "code": ("7", ", no tests of a known form: ValueError: there are none"),
}


@pytest.mark.parametrize("kind", UNMATCHABLE)
def test_answers_that_no_completion_can_match_are_refused_at_the_start(kind: str) -> None:
    answer, says = UNMATCHABLE[kind]
    assert find(kind).problem(Prompt("0", "What?", (1,), answer, {})) == says
    assert find("exact").problem(Prompt("0", "What?", (1,), "a half", {})) == ""


@pytest.mark.parametrize("choices", [{"text": ["x", "y"]}, ["x", "y"]])
def test_a_column_that_is_only_called_choices_is_no_list_of_lettered_options(choices: Any) -> None:
    """MMLU's and ARC's files have one: without data.choices_column an index or a letter matched nothing."""
    says = find("choice").problem(Prompt("0", "What?", (1,), "1", {"choices": choices}))
    assert says == ", without options that have letters; set data.choices_column"


def test_the_page_on_tasks_says_what_the_kinds_say() -> None:
    table = (DOCS / "tasks.md").read_text().partition("**Several")[0]
    rows = re.findall(r"^\| `([a-z_:]+)` \| (.+?) \|.*$", table, re.M)
    assert dict(rows) == {kind: (made.__doc__ or "").rstrip(".") for kind, made in registry().items()}


def test_the_example_of_a_new_kind_is_all_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of docs/rewards.md is found, checked, opened, asked and counted like any other kind."""
    monkeypatch.setattr(verifier, "_classes", dict(registry()))
    (example,) = re.findall(r"```python\n(.+?)```", (DOCS / "rewards.md").read_text(), re.DOTALL)
    exec(compile(example, "kinds/yes_no.py", "exec"), {"__name__": "trainer.verifiers.kinds.yes_no"})
    scorer = open_scorer(VerifierConfig(kind="yes_no"), print, {})
    prompt = Prompt("0", "Is 7 prime?", (1,), "yes", {})
    texts = {"No... Yes!": "correct", "Yes? No.": "wrong", "Perhaps.": "unparsable"}
    assert {text: asyncio.run(scorer.score(prompt, text)).outcome for text in texts} == texts
    scorer.close()
    assert find("yes_no").problem(Prompt("0", "?", (1,), "maybe", {})) == ", neither yes nor no"
    assert find("yes_no").votes and not find("yes_no").needs_worker
    assert "`yes_no`: The last yes or no." in verifier.kinds_help()
