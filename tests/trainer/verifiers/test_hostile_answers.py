"""Answers made to break the verifiers: none is believed, executed, or waited for beyond its deadline.

The slow test judges the whole list and $HOSTILE_ANSWERS generated answers (300) of each kind, and prints
what became of them with `-rP`: the table of docs/reliability.md.
"""

import asyncio
import json
import os
import re
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import reasoning_gym as library
from hostile import SUM
from hostile_answers import TEXTS, fuzz
from processes import descendants

from trainer.config import CodeConfig, JudgeConfig, VerifierConfig
from trainer.types import Prompt, Verdict
from trainer.verifiers import judge_server, text
from trainer.verifiers.code_runner import encode
from trainer.verifiers.judge import Judge
from trainer.verifiers.kinds.reasoning_gym import EXECUTED
from trainer.verifiers.pool import VerifierPool
from trainer.verifiers.verifier import find

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
WORKERS, DEADLINE_S = 2, 2.0
GRACE_S = 3.0  # for a busy machine to kill and to start processes
EXECUTING = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "ctypes.", "pickle.")
HIDDEN = ("@</think>#", "@</think>\n\n # \n", "<think>@</think> #")
BOXED = tuple(form.replace("#", r"so \boxed{#}") for form in HIDDEN)
Item = tuple[bool, Prompt, str]  # True if the text is right


class Case(NamedTuple):
    """A verifier kind, prompts, and how right answers may look: # is the gold answer, @ any text."""

    kind: str
    prompts: list[Prompt]  # empty: those of reasoning_gym_prompts
    right: tuple[str, ...] = ()
    wrapper: str = "#"  # what a generated answer is put into, half of the times


def prompt(answer: str, metadata: dict[str, Any] | None = None) -> Prompt:
    return Prompt("0", "Question?", (1,), answer, metadata or {})


def items(task: str) -> list[Prompt]:
    """Prompts of a task of reasoning-gym."""
    arguments = {"seed": 3, "size": 20}
    origin = {"origin": {"task": task, "arguments": arguments}}
    made = (encode(item, str) for item in library.create_dataset(task, **arguments))
    return [prompt(item["answer"], item | origin) for item in made]


@cache
def reasoning_gym_prompts() -> list[Prompt]:
    """An item of each task that executes text or has a lenient scorer, and of three others."""
    tasks = [*EXECUTED, "coin_flip", "complex_arithmetic", "game_of_life_halting"]
    tasks += ["chain_sum", "fraction_simplification", "gsm_symbolic"]
    short = {"True", "0", "1", "2", "7", "-3"}  # may be generated, and would then be right
    return [next(p for p in items(task) if p.answer not in short) for task in tasks]


NUMBER, ROOT = [prompt("60217.5")], [prompt(r"\frac{\sqrt{739}}{23}")]
OPTIONS = {"choices": [f"the {i}th word" for i in range(11)]}
LINES = json.dumps({"inputs": ["60000 217\n"], "outputs": ["60217"]})
CALLS = json.dumps([{"input": [60000, 217], "output": 60217, "fn_name": "add"}])
BLOCK, ADD = "```python\n#\n```", "```python\ndef add(a, b):\n    return a + b\n```"
CASES = {
    "number": Case("number", NUMBER, ("#\n@", " # \n", "60,217.50", "$#.", "６０２１７.5")),
    "exact": Case(
        "exact", [prompt("Königsberg 1736")], ("#", " #\n", "KÖNIGSBERG\n\n 1736", "Ko\u0308nigsberg 1736")
    ),
    "choice": Case(
        "choice", [prompt("K", OPTIONS)],
        (*BOXED, *HIDDEN, "@</think>\nAnswer: **#**", "@</think>\nThe 10th word."), "Answer: #",
    ),
    "math, a number": Case(
        "math", NUMBER, (*BOXED, *HIDDEN, r"@</think>\boxed{60{,}217.50}. @"), r"\boxed{#}"
    ),
    "judge": Case("judge", NUMBER),
    "own function": Case("hostile_answers:same", NUMBER, ("#",)),
    "math, an expression": Case(
        "math", ROOT, (*BOXED, r"@</think>\boxed{\dfrac{\sqrt{739}}{23}}", r"@</think>\boxed{\sqrt{739}/23}"),
        r"\boxed{#}",
    ),
    "reasoning_gym": Case(
        "reasoning_gym", [],
        ("#", "@</think># ", "@</think><answer>#</answer>", "@</think><answer>\n#\n</answer> I think."),
        "<answer>#</answer>",
    ),
    "code, standard input": Case("code", [prompt(LINES)], (f"@</think>{BLOCK.replace('#', SUM)}",), BLOCK),
    "code, calls": Case(
        "code", [prompt(CALLS)], (f"@</think>{ADD}", f"@</think>So:\n{ADD}\nIt works."), BLOCK
    ),
}  # fmt: skip
SLOW = ("reasoning_gym", "code, standard input")  # judged by the slow test alone
PARTLY = ("math, an expression", "code, calls")  # of these the quick test judges a part


class Parrot(Judge):
    """A judge whose language model replies with the completion itself."""

    def __init__(self) -> None:
        super().__init__(JudgeConfig(url="http://127.0.0.1:1"), print)
        self._scored, self._backend = True, self  # type: ignore[assignment]  # it answers itself
        self._cached = self._answer  # type: ignore[assignment]
        self.close = lambda: None

    async def score(self, prompt: Prompt, completion: str) -> Verdict:
        self._reply = completion
        verdict = await super().score(prompt, completion)
        assert 0 <= verdict.score <= 1, verdict
        return Verdict(0.0, "wrong") if verdict.score else verdict  # a reply of 1 is the judge's, not a hack

    async def _answer(self, request: Any) -> float:
        assert self._reply.encode(errors="replace").decode() in request
        return judge_server._score("chat", {"choices": [{"message": {"content": self._reply}}]})


def texts(case: Case, count: int) -> Iterator[Item]:
    """The list, alone and wrapped, and generated texts; then right answers."""
    random, prompts = Random(1), case.prompts or reasoning_gym_prompts()
    for i, hostile in enumerate(TEXTS):
        for form in {"#", case.wrapper}:
            yield False, prompts[i % len(prompts)], form.replace("#", hostile)
    for i in range(count):
        yield False, random.choice(prompts), (case.wrapper if i % 2 else "#").replace("#", fuzz(random))
    for i in range(max(len(prompts), count // 10) if case.right else 0):
        asked = prompts[i % len(prompts)]
        first, *others = random.choice(case.right).replace("#", str(asked.answer)).split("@")
        beside = (re.sub(r"\\boxed|<answer>|think>|```", "", fuzz(random)) for _ in others)
        yield True, asked, first + "".join(map(str.__add__, beside, others))


@contextmanager
def canaries(folder: Path) -> Iterator[Callable[[str], str]]:
    """Give a function that fills a text's @PATH@ and @PORT@ in; nothing may write, connect or start there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port, before = str(server.getsockname()[1]), descendants(os.getpid())
        yield lambda text: text.replace("@PATH@", str(folder / "executed")).replace("@PORT@", port)
        assert not list(folder.iterdir()) and not descendants(os.getpid()) - before
        with pytest.raises(BlockingIOError):
            server.accept()


@cache
def audited() -> list[list[str]]:
    """The lists that take the events of this process's audit hook, which cannot be removed."""
    lists: list[list[str]] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if lists and event.startswith(EXECUTING):
            lists[-1].append(f"{event} {str(arguments)[:80]}")

    sys.addaudithook(hook)
    return lists


def compare(kind: str, prompt: Prompt, text: str) -> None:
    """Do what the controller's process does with a text: it neither executes nor opens anything."""
    verifier = find(kind)
    audited().append([])
    verifier.quick(text, prompt.answer, prompt.metadata)
    if verifier.votes:
        hash(verifier.vote(text, prompt))
    assert not audited().pop(), text[:200]


async def judged(case: Case, asked: list[Item], folder: Path) -> tuple[Counter[str], list[float]]:
    """Judge the texts, as many at once as there are workers: outcomes of the hostile ones, seconds of all."""
    remaining, outcomes, seconds, wrong = iter(asked), Counter[str](), list[float](), list[str]()
    code = CodeConfig(cpu_s=1, memory_mb=512, processes=8, file_mb=4)
    settings = VerifierConfig(kind=case.kind, workers=WORKERS, timeout_s=DEADLINE_S, code=code)
    with canaries(folder) as filled:
        scorer = Parrot() if case.kind == "judge" else VerifierPool(settings)

        async def work() -> None:
            for right, prompt, raw in remaining:
                text, start = filled(raw), time.perf_counter()
                compare(case.kind, prompt, text)
                outcome = (await scorer.score(prompt, text)).outcome
                seconds.append(time.perf_counter() - start)
                outcomes[outcome] += not right
                late = seconds[-1] > DEADLINE_S + GRACE_S
                if right != (outcome == "correct") or outcome == "crash" or late:
                    wrong.append(f"{outcome} after {seconds[-1]:.1f} s: {text[:300]!r} for {prompt.answer!r}")

        await asyncio.gather(*(work() for _ in range(WORKERS)))
        scorer.close()
    assert not wrong
    return outcomes, seconds


def check(case: Case, every: int, count: int, folder: Path) -> None:
    asked = list(texts(case, count))
    hostile = [item for item in asked if not item[0]][::every]
    right = [item for item in asked if item[0]][: 20 if every > 1 else None]
    outcomes, seconds = asyncio.run(judged(case, hostile + right, folder))
    assert sum(outcomes.values()) == len(hostile) and len(seconds) == len(hostile) + len(right)
    times = f"median {1e3 * statistics.median(seconds):.3g} ms, slowest {max(seconds):.2f} s"
    print(f"{case.kind}: {len(hostile)} hostile {dict(outcomes)}, {len(right)} right; {times}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_no_hostile_answer_breaks_a_comparison_a_worker_or_a_sandbox(name: str, tmp_path: Path) -> None:
    check(CASES[name], *((97, 100) if name in PARTLY else (1, 2000)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", CASES)
def test_none_of_the_list_and_none_of_many_generated_answers_is_believed(name: str, tmp_path: Path) -> None:
    assert len(set(TEXTS)) >= 400
    check(CASES[name], 1, int(os.environ.get("HOSTILE_ANSWERS", 300)), tmp_path)


@pytest.mark.parametrize("marks", ["\u0301" * 100_000 + "\u0327" * 100_000, "\uff9e\uff9f" * 100_000])
@pytest.mark.parametrize("kind", ["exact", "number", "math"])
def test_combining_marks_take_linear_time(kind: str, marks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 take 20 s to normalise, in which nothing else in the controller would run."""
    normalize = text.unicodedata.normalize
    longest = [0]

    def measured(form: str, value: str) -> str:
        longest.append(max(map(len, re.findall("[\u0301\u0327\uff9e\uff9f]+", value)), default=0))
        return normalize(form, value) if longest[-1] <= text.MAX_MARKS else value

    text._marks()
    monkeypatch.setattr(text.unicodedata, "normalize", measured)
    find(kind).quick("a" + marks, "Ko\u0308nigsberg", {})
    assert max(longest) <= text.MAX_MARKS


def test_marks_of_an_ordinary_text_stay() -> None:
    assert text.fold("a\u0301" * 400) == "\u00e1" * 400


def test_a_long_answer_is_not_kept_in_a_cache() -> None:
    before = text._literal_number.cache_info().currsize
    assert find("number").quick("9" * 100_000, "7", {}) is not None
    assert text._literal_number.cache_info().currsize <= before + 1  # the gold answer


def test_the_list_of_scorers_that_execute_text_is_complete() -> None:
    evaluates = re.compile(r"\b(?:eval|(?:sympy|sp)\.parse_expr|(?<!def )parse_expr|exec|sympify)\(")
    executing = set()
    for path in Path(library.__file__).parent.rglob("*.py"):
        source = path.read_text()
        scorer = source.partition("def score_answer")[2].partition("\nclass ")[0]
        if evaluates.search(scorer) and "propositional_logic" not in path.name:  # its own parse_expr
            executing.add(path.stem)
    assert executing == set(EXECUTED) | {"number_sorting"}  # of which the gold answer is evaluated


REFUSED = {  # task -> texts that its scorer would accept for any item, or execute
    "puzzle24": ["6*4*1*1", "24 + 0*1*1*1", "ord('\\x18') + 0*1*2*3"],
    "countdown": ["17 or 3", "len('aaa')", "().__class__", "[1][0]", "print(1)"],
    "simple_integration": ["Integral(f, x)", "x + O(1)", "(O)(x)", "N(x)", "(sin)(x)", "Symbol('x')"],
    "intermediate_integration": ["Integral(f, x)"],
    "polynomial_multiplication": ["expand((x+1)*(x+2))", "(x+1)(x+2)"],
    "game_of_life_halting": ["0", "yes", "True or False", "[]"],
    "coin_flip": ["0", "0.", "1e-9", "-0", "00", "nan"],
    "complex_arithmetic": ["nan", "NaN", "infj", "nan + nani"],
    "spiral_matrix": ["[i for i in range(9)]", "open('x')", "().x"],
}


@pytest.mark.slow
def test_reasoning_gyms_lenient_scorers_believe_no_constant_answer_and_still_accept_the_right_one() -> None:
    pool = VerifierPool(VerifierConfig(kind="reasoning_gym", workers=2, timeout_s=30.0))

    async def outcome(prompt: Prompt, text: str) -> str:
        return (await pool.score(prompt, f"<answer>{text}</answer>")).outcome

    async def ask() -> None:
        for task in dict.fromkeys([*EXECUTED, *REFUSED]):
            for prompt in items(task)[:2]:
                if prompt.answer == "0" or "Integral" in prompt.answer:
                    continue
                # reasoning-gym makes puzzles whose own answer does not use all four numbers
                if task != "puzzle24" or len(re.findall(r"\d+", str(prompt.answer))) == 4:
                    assert await outcome(prompt, f"{prompt.answer} ") == "correct", prompt.answer
                for refused in REFUSED.get(task, ()):
                    assert await outcome(prompt, refused) != "correct", (task, refused)

    asyncio.run(ask())
    pool.close()
