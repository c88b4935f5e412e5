"""Environments for tests, imported by their own processes."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np


class Counter:
    """Counts its turns up to `turns`; the reward of turn t is t. `say` is what it answers."""

    def __init__(self, turns: int = 3, say: str = "next") -> None:
        self._turns, self._say, self._count = turns, say, 0

    def start(self, row: dict[str, Any]) -> Any:
        return row.get("start", "")

    def step(self, message: dict[str, Any]) -> Any:
        self._count += 1
        return self._say, float(self._count), self._count == self._turns


class Async(Counter):
    """The same, with coroutines; `close` writes nothing, since it may not."""

    async def step(self, message: dict[str, Any]) -> Any:
        return super().step(message)

    async def close(self) -> None:
        return None


class Picky(Counter):
    """Cannot be made without something to say."""

    def __init__(self, turns: int = 3, say: str = "next") -> None:
        super().__init__(turns, say)
        if not say:
            raise ValueError("say")


class Where(Counter):
    """Says in lines what its interpreter is, what was prepared in which process, and the paths of modules."""

    prepared = ""

    def __init__(self, word: str = "") -> None:
        super().__init__()

    @classmethod
    def prepare(cls, word: str = "") -> None:
        cls.prepared += f"{word} {os.getpid()}"

    def start(self, row: dict[str, Any]) -> Any:
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        return "\n".join([os.environ.get("OTHER", "no"), self.prepared, *paths])


class BadEnd(Counter):
    """Plays well, and cannot be closed."""

    def close(self) -> None:
        raise OSError("still open")


def _words(path: str) -> list[str]:
    return Path(path).read_text().split() if Path(path).exists() else []


class Bad(Counter):
    """Does at its second turn what its row says."""

    def start(self, row: dict[str, Any]) -> Any:
        self._fault, self._path = row["fault"], row.get("path", "/dev/null")
        return ""

    def step(self, message: dict[str, Any]) -> Any:
        answer = super().step(message)
        if self._count < 2:
            return answer
        match self._fault:
            case "raises":
                raise KeyError("a bug")
            case "complains":
                print("before the bug")
                raise KeyError("a bug")
            case "dies":
                os._exit(1)
            case "hangs":
                while True:
                    pass
            case "sleeps":
                time.sleep(600)
            case "serves_deadline" | "serves_pool" | "serves_dies":
                script = f"echo $$ > {self._path}; sleep 600 & echo $! >> {self._path}; wait"
                subprocess.Popen(["sh", "-c", script], start_new_session=True)
                while len(_words(self._path)) < 2:
                    time.sleep(0.01)
                if self._fault == "serves_deadline":
                    time.sleep(600)
                if self._fault == "serves_dies":
                    os._exit(1)
            case "lies":
                return "next", float("nan"), False
            case "talks":
                return [{"role": "user"}], 1.0, False
            case "writes":
                Path(self._path).open("a").close()
            case "prints":
                print("two\nlines")
            case "nothing":
                return None, 1.0, False
            case "huge":
                return "next", 10**400, False
            case "halves":
                return "\ud83d", 1.0, False
            case "numpy":
                return "next", np.float32(1), False
        return answer
