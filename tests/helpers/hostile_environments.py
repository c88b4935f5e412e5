"""Environments whose process does in its second turn what no reply of the protocol is."""

import os
import signal
import stat
import time
from typing import Any


class Hostile:
    """Three turns; the episode whose first turn has `victim` words meets its row's fault in the second."""

    def start(self, row: dict[str, Any]) -> str:
        self._fault, self._victim, self._turns = row["fault"], row["victim"], 0
        return ""

    def step(self, message: dict[str, Any]) -> tuple[str, float, bool]:
        self._turns += 1
        if self._turns == 1:
            self._meets = len(message["content"].split()) == self._victim
        if self._turns == 2 and self._meets:
            getattr(self, self._fault)()
        return f"turn {self._turns}\n", 1.0, self._turns == 3

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def frozen(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def slow(self) -> None:
        time.sleep(600)

    def a_part_of_a_line(self) -> None:
        self._write(b'{"result": ["turn')
        time.sleep(600)

    def a_part_of_a_line_and_death(self) -> None:
        self._write(b'{"result": ["turn')
        os._exit(0)

    def a_line_without_an_end(self) -> None:
        while True:
            self._write(b" " * 65536)

    def two_lines_at_once(self) -> None:
        self._write(b'{"result": ["false", 9.0, false]}\n{"result": ["false", 9.0, true]}\n')

    def a_reply_to_another_call(self) -> None:
        self._write(b'{"call": -1, "result": ["false", 9.0, false]}\n')
        time.sleep(0.5)

    def no_json(self) -> None:
        self._write(b"\xff\xfe\n")

    def deep(self) -> None:
        self._write(b"[" * 100_000 + b"\n")

    def _write(self, data: bytes) -> None:
        """Write to the pool, past the worker's own code."""
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and os.write(fd, data):
                    return
            except OSError:
                continue
        raise RuntimeError("no connection to the pool")
