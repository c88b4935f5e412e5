"""Promises of the environments that come with it: the best policy is known, and earns the whole reward."""

from itertools import islice

import pytest

from trainer.environments import calculator, guess, search


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_binary_search_always_finds_the_number_and_no_question_betrays_it() -> None:
    rows = list(guess.rows(400))
    assert len({row["question"] for row in rows}) == 400
    assert {row["secret"] for row in rows} == set(range(1, 8))
    for row in rows:
        one, low, high, rewards = guess.Guess(), 1, 7, []
        assert one.start(row) == ""
        for _ in range(3):
            middle = (low + high) // 2
            sign, reward, done = one.step(says(f"{middle}\n"))
            rewards.append(reward)
            if done:
                break
            low, high = (middle + 1, high) if sign == "+\n" else (low, middle - 1)
        assert (sign, sum(rewards)) == ("=\n", 1.0)


def test_what_is_no_number_of_the_range_costs_something() -> None:
    one = guess.Guess(guesses=6)
    one.start({"secret": 3})
    for text in ("x\n", "9" * 5000, "0", "8"):
        assert one.step(says(text)) == ("*\n", -0.1, False)
    assert one.step(says("7")) == ("-\n", 0.0, False)
    assert one.step(says("2")) == ("+\n", 0.0, True)


@pytest.mark.parametrize("call", ["[{}]", "[{}]=", " [{}] "])
def test_with_the_calculator_copying_is_enough(call: str) -> None:
    for row in islice(calculator.rows(), 50):
        expression = row["question"].splitlines()[-1].removeprefix("Q: ")
        one = calculator.Calculator()
        one.start(row)
        value, reward, done = one.step(says(call.format(expression)))
        assert (reward, done) == (None, False)
        answer = value.removeprefix("=").removesuffix("\nA:")
        assert one.step(says(f" {answer}\n")) == ("", 1.0, True)


def test_without_the_calculator_brackets_are_a_wrong_answer() -> None:
    row = next(calculator.rows(tool=False))
    assert "[" not in row["question"] and row["question"].endswith("A:")
    one = calculator.Calculator(tool=False)
    one.start(row)
    assert one.step(says("[1*2]")) == ("", 0.0, True)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("2*3", "6"), ("2*(3+4)-1", "13"), ("2**9**9**9", "error"), ("2*", "error"), ("(" * 40, "error")],
)
def test_the_calculator_computes_sums_and_products_alone(expression: str, expected: str) -> None:
    assert calculator.value(expression) == expected


def test_two_searches_answer_every_question_and_no_question_betrays_its_answer() -> None:
    rows = list(search.rows())
    assert len({row["question"] for row in rows}) == len(rows) > 300
    for row in rows:
        question = row["question"].rstrip().splitlines()[-1]
        name, kind = question.split()[-2], question.split()[2]
        one = search.Search()
        assert one.start(row) == "" and row["answer"] not in question
        first, reward, done = one.step(says(f"[{name} lives]"))
        assert (reward, done) == (None, False) and first.startswith(f"={name} lives in ")
        second, _, _ = one.step(says(f"[{kind} of {first.split()[-1]}"[:-1] + "]="))
        answer = second.split()[-1].removesuffix(".")
        assert not second.startswith("=") and one.step(says(f"A: {answer}\n")) == ("", 1.0, True)
        assert one.step(says(f"A: {name}")) == one.step(says(answer)) == ("", 0.0, True)
    assert search.search("zzz") == search.search("") == "nothing"


def test_without_the_search_brackets_are_a_wrong_answer() -> None:
    row = next(search.rows(tool=False))
    assert "[" not in row["question"]
    one = search.Search(tool=False)
    one.start(row)
    assert one.step(says("[mayor]")) == ("", 0.0, True) and one.step(says(f"A: {row['answer']}"))[1] == 1.0
