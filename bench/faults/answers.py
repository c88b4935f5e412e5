"""Answers made to break the verifiers, counted: `python -m bench.faults.answers` prints the table of
docs/reliability.md.

Each kind judges the list written by hand and `--answers` generated ones; none may count as right, be
executed, crash a worker or take longer than the deadline. Right answers, written in other ways and behind
hostile text, must stay right. The exit status is 1 if anything of this is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench.faults.hostile_answers import TEXTS, fuzz
from bench.table import table
from trainer.config import CodeConfig, JudgeConfig, VerifierConfig
from trainer.config.verifier import VOTING
from trainer.types import Prompt, Verdict
from trainer.verifiers import judge_server
from trainer.verifiers.judge import Judge
from trainer.verifiers.kinds import vote
from trainer.verifiers.pool import VerifierPool
from trainer.verifiers.reasoning_gym import EXECUTED, encode

WORKERS, DEADLINE_S = 2, 2.0
GRACE_S = 3.0  # for a busy machine to kill and to start processes
EXECUTING = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "ctypes.", "pickle.")
SUM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
_audited: list[str] | None = None  # audit events while this process judges; None: it does not


@dataclass(frozen=True)
class Case:
    """A verifier kind, prompts, and how right answers may look: # is the gold answer, @ any text."""

    kind: str
    prompts: tuple[Prompt, ...]
    right: tuple[str, ...]
    wrapper: str = "#"  # what a generated answer is put into, half of the times


@dataclass
class Result:
    """What became of the answers of one case."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    right: int = 0
    wrong: list[str] = field(default_factory=list)  # what must not be


def _prompt(answer: str, metadata: dict[str, Any] | None = None) -> Prompt:
    return Prompt("0", "Question?", (1,), answer, metadata or {})


def items(task: str) -> list[Prompt]:
    """Prompts of a task of reasoning-gym."""
    import reasoning_gym

    arguments = {"seed": 3, "size": 20}
    origin = {"origin": {"task": task, "arguments": arguments}}
    made = map(encode, reasoning_gym.create_dataset(task, **arguments))
    return [_prompt(item["answer"], item | origin) for item in made]


def _reasoning_gym() -> tuple[Prompt, ...]:
    """An item of each task that executes text or has a lenient scorer, and of three others."""
    tasks = [*EXECUTED, "coin_flip", "complex_arithmetic", "game_of_life_halting"]
    tasks += ["chain_sum", "fraction_simplification", "gsm_symbolic"]
    short = {"True", "0", "1", "2", "7", "-3"}  # may be generated, and would then be right
    return tuple(next(p for p in items(task) if p.answer not in short) for task in tasks)


def cases() -> dict[str, Case]:
    """All of them by name."""
    choices = {"choices": [f"the {i}th word" for i in range(11)]}
    calls = json.dumps([{"input": [60000, 217], "output": 60217, "fn_name": "add"}])
    lines = json.dumps({"inputs": ["60000 217\n"], "outputs": ["60217"]})
    hidden = ("@</think>#", "@</think>\n\n # \n", "<think>@</think> #")
    boxed = tuple(text.replace("#", r"so \boxed{#}") for text in hidden)
    letters = (*boxed, *hidden, "@</think>\nAnswer: **#**", "@</think>\nThe 10th word.")
    names = ("#", " #\n", "KÖNIGSBERG\n\n 1736", "Ko\u0308nigsberg 1736")
    roots = (r"@</think>\boxed{\dfrac{\sqrt{739}}{23}}", r"@</think>\boxed{\sqrt{739}/23}")
    tagged = ("#", "@</think># ", "@</think><answer>#</answer>", "@</think><answer>\n#\n</answer> I think.")
    block = "```python\n#\n```"
    number, root = _prompt("60217.5"), _prompt(r"\frac{\sqrt{739}}{23}")
    return {
        "number": Case("number", (number,), ("#\n@", " # \n", "60,217.50", "$#.", "６０２１７.5")),
        "exact": Case("exact", (_prompt("Königsberg 1736"),), names),
        "choice": Case("choice", (_prompt("K", choices),), letters, "Answer: #"),
        "math, a number": Case(
            "math", (number,), (*boxed, *hidden, r"@</think>\boxed{60{,}217.50}. @"), r"\boxed{#}"
        ),
        "math, an expression": Case("math", (root,), (*boxed, *roots), r"\boxed{#}"),
        "reasoning_gym": Case("reasoning_gym", _reasoning_gym(), tagged, "<answer>#</answer>"),
        "code, standard input": Case("code", (_prompt(lines),), (f"@</think>{SUM}",), block),
        "code, calls": Case(
            "code", (_prompt(calls),), (f"@</think>{ADD}", f"@</think>So:\n{ADD}\nIt works."), block
        ),
        "judge": Case("judge", (number,), ()),
        "own function": Case(f"{__spec__.name}:same", (number,), ("#",)),
    }


def same(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """A user's function."""
    return float(completion == answer)


class _Judge(Judge):
    """A judge whose language model replies with the completion itself."""

    def __init__(self) -> None:
        super().__init__(JudgeConfig(url="http://127.0.0.1:1"), lambda line: None)
        self._scored, self._backend = True, self  # type: ignore[assignment]  # it answers itself
        self.close = lambda: None

    async def score(self, prompt: Prompt, completion: str) -> Verdict:
        self._reply = completion
        verdict = await super().score(prompt, completion)
        assert 0 <= verdict.score <= 1, verdict
        return Verdict(0.0, "wrong") if verdict.score else verdict  # a reply of 1 is the judge's, not a hack

    async def _cached(self, request: Any) -> float:
        assert self._reply.encode(errors="replace").decode() in request
        return judge_server._score("chat", {"choices": [{"message": {"content": self._reply}}]})


def scorer(case: Case) -> VerifierPool | Judge:
    """What judges the case."""
    if case.kind == "judge":
        return _Judge()
    code = CodeConfig(cpu_s=1, memory_mb=512, processes=8, file_mb=4)
    return VerifierPool(VerifierConfig(kind=case.kind, workers=WORKERS, timeout_s=DEADLINE_S, code=code))


@contextmanager
def canaries() -> Iterator[tuple[Callable[[str], str], Callable[[], list[str]]]]:
    """Two functions: one fills a text's @PATH@ and @PORT@ in, the other says what has been executed since."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        path, port = Path(folder, "executed"), str(server.getsockname()[1])
        before = descendants()

        def found() -> list[str]:
            signs = [f"{name} was written" for name in os.listdir(folder)]
            signs += [f"process {pid} is there" for pid in descendants() - before]
            try:
                server.accept()
                return [*signs, "a connection was made"]
            except BlockingIOError:
                return signs

        yield lambda text: text.replace("@PATH@", str(path)).replace("@PORT@", port), found


def descendants() -> set[int]:
    """The processes that this one has started, and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _audited is not None and event.startswith(EXECUTING):
        _audited.append(f"{event} {str(arguments)[:80]}")


async def judge(asked: VerifierPool | Judge, case: Case, prompt: Prompt, text: str, result: Result) -> str:
    """Ask for one verdict; its outcome. Adds to the result what must not be."""
    global _audited
    start = time.perf_counter()
    if isinstance(asked, VerifierPool) and not case.kind.startswith("bench."):
        events: list[str] = []
        _audited = events
        asked.quick(text, prompt.answer)
        if case.kind in VOTING:
            hash(vote(case.kind, text, prompt))
        _audited = None
        result.wrong += [f"{event} by {text[:200]!r}" for event in events]
    outcome = (await asked.score(prompt, text)).outcome
    seconds = time.perf_counter() - start
    result.seconds.append(seconds)
    if outcome == "crash" or seconds > DEADLINE_S + GRACE_S:
        result.wrong.append(f"{outcome} after {seconds:.1f} s: {text[:200]!r}")
    return outcome


def texts(case: Case, count: int, seed: int) -> Iterator[tuple[bool, Prompt, str]]:
    """Whether it is right, the prompt, the text: of the list, alone and wrapped, and generated."""
    random = Random(seed)
    for i, text in enumerate(TEXTS):
        for form in {"#", case.wrapper}:
            yield False, case.prompts[i % len(case.prompts)], form.replace("#", text)
    for i in range(count):
        form = case.wrapper if i % 2 else "#"
        yield False, random.choice(case.prompts), form.replace("#", fuzz(random))
    for i in range(max(len(case.prompts), count // 10) if case.right else 0):
        prompt = case.prompts[i % len(case.prompts)]
        first, *others = random.choice(case.right).replace("#", str(prompt.answer)).split("@")
        yield True, prompt, first + "".join(_beside(random) + part for part in others)


def _beside(random: Random) -> str:
    """A text that may stand beside a right answer."""
    return (
        fuzz(random).replace("\\boxed", "").replace("<answer>", "").replace("think>", "").replace("```", "")
    )


async def run(case: Case, asked: list[tuple[bool, Prompt, str]]) -> Result:
    """Judge the texts, as many at once as there are workers."""
    result, left = Result(), iter(asked)
    with canaries() as (filled, found):
        pool = scorer(case)

        async def work() -> None:
            for right, prompt, text in left:
                outcome = await judge(pool, case, prompt, filled(text), result)
                result.right += right and outcome == "correct"
                result.outcomes[outcome] += not right
                if right != (outcome == "correct"):
                    result.wrong.append(f"{outcome}: {text[:300]!r} for {prompt.answer!r}")

        await asyncio.gather(*(work() for _ in range(WORKERS)))
        pool.close()
        result.wrong += found()
    return result


def main(count: int, seed: int, only: str) -> int:
    """Print the table, and what is not as it must be."""
    sys.addaudithook(_audit)
    head = ["kind", "hostile", "correct", "wrong", "unparsable", "timeout", "crash", "right", "stay right"]
    rows, failed = [], False
    for name, case in cases().items():
        if only not in name:
            continue
        asked = list(texts(case, count, seed))
        result = asyncio.run(run(case, asked))
        counts = [result.outcomes[outcome] for outcome in head[2:7]]
        right = sum(right for right, _, _ in asked)
        times = [f"{1e3 * statistics.median(result.seconds):.3g}", f"{max(result.seconds):.2f}"]
        rows.append([name, *map(str, (len(asked) - right, *counts, right, result.right)), *times])
        print("\n".join((name, *result.wrong)), file=sys.stderr, flush=True)
        failed |= bool(result.wrong)
    print(table([*head, "median ms", "slowest s"], rows))
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=20_000, help="generated, of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only the kinds with this in their name")
    options = parser.parse_args()
    sys.exit(main(options.answers, options.seed, options.kind))
