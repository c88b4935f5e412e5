"""Programs a second that `verifier.kind code` judges: `python -m bench.verifiers`.

Ordinary programs: right and wrong ones, with one, two or ten tests on standard input, calls, and asserts.
"""

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Sequence

from bench import records
from trainer.config import CodeConfig, VerifierConfig
from trainer.types import Prompt
from trainer.verifiers.pool import VerifierPool

SUM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
WRONG = SUM.replace("a + b", "a - b")


def stdio(tests: int) -> str:
    return json.dumps(
        {"inputs": [f"{i} 1\n" for i in range(tests)], "outputs": [str(i + 1) for i in range(tests)]}
    )


CASES = {  # name -> completion, answer, outcome
    "standard input, 1 test": (SUM, stdio(1), "correct"),
    "standard input, 2 tests": (SUM, stdio(2), "correct"),
    "standard input, 10 tests": (SUM, stdio(10), "correct"),
    "standard input, wrong at the first test": (WRONG, stdio(10), "wrong"),
    "10 calls of a function": (
        ADD, json.dumps([{"input": [i, 1], "output": i + 1, "fn_name": "add"} for i in range(10)]), "correct",
    ),
    "3 asserts": (ADD, json.dumps([f"assert add({i}, 1) == {i + 1}" for i in range(3)]), "correct"),
}  # fmt: skip


async def measure(pool: VerifierPool, programs: int, completion: str, answer: str, outcome: str) -> float:
    """Programs a second; all are asked for at once."""
    prompt = Prompt("0", "q", (1,), answer, {})
    start = time.perf_counter()
    verdicts = await asyncio.gather(*(pool.score(prompt, completion) for _ in range(programs)))
    seconds = time.perf_counter() - start
    assert {v.outcome for v in verdicts} == {outcome}, verdicts
    return programs / seconds


async def run(programs: int, workers: int) -> None:
    """Measure and print every case."""
    code = CodeConfig(sandbox="bubblewrap")
    pool = VerifierPool(VerifierConfig(kind="code", workers=workers, timeout_s=60.0, code=code))
    load = os.getloadavg()[0]
    print(f"{workers} workers, {records.cores()} cores, load before {load:.1f}")
    for name, case in CASES.items():
        print(f"{name:42} {await measure(pool, programs, *case):6.1f} programs/s")
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = used.ru_utime + used.ru_stime
    print(f"of which in the calling process: {1e3 * spent / (programs * len(CASES)):.1f} ms a program")
    pool.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = records.parser("verifiers", __doc__, programs=100, workers=records.cores())
    args = parser.parse_args(argv)
    asyncio.run(run(args.programs, args.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
