"""The pool of environments: a process for each open episode, called from asyncio.

An episode has its process to itself: one that takes too long is killed, and one that dies or sends what is no
reply loses this episode alone. After an episode without error its process waits for the next, up to a limit.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from socket import MSG_PEEK, socket
from typing import Any

from trainer.config import ConfigError, EnvironmentConfig
from trainer.verifiers.channel import ask
from trainer.verifiers.fork_server import ForkServer

MAX_REPLY = 4 << 20  # bytes of one reply
MAX_EPISODES = 200  # of one process, one after the other; a fork costs some ms of CPU time
MAX_BUSY_S = 300.0  # of one process, so that only an episode that overruns reaches its CPU limit
MAX_NOTES = 5  # different failures, and 5 prints, that are said
MAX_STARTUP_FAILURES = 50  # if the first 50 episodes all fail, the environment itself is wrong
Message = dict[str, Any]
_numbers = count()  # of calls; a reply says which it answers


class EnvironmentFailure(Exception):
    """An episode cannot go on: its environment raised, was too slow, died, or returned something else."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a turn of the model."""

    messages: tuple[Message, ...]
    reward: float | None = None  # of this turn; None: it has none
    done: bool = False
    tools: tuple[dict[str, Any], ...] = ()  # of `start` alone


class EnvironmentPool:
    """The environments of one task; close it. ConfigError if the class cannot be imported."""

    def __init__(self, config: EnvironmentConfig, note: Callable[[str], None]) -> None:
        self._config, self._note, label = config, note, f"environment.kind {config.kind}"
        arguments = config.kind, config.options, config.network, MAX_BUSY_S + 2 * config.episode_s
        program = "trainer.environments.worker:hosting"
        self._server = ForkServer(program, arguments, label, note, config.python)
        # Evaluations have as many of their own: new weights wait for them.
        self._free = {evaluation: asyncio.Semaphore(config.processes) for evaluation in (False, True)}
        self._closed = False
        self._idle = list[int]()  # slots, each with a process that waits
        self._conns = dict[int, socket]()  # by slot
        self._used = dict[int, tuple[int, float]]()  # episodes and seconds of each slot's process
        self._failures, self._works = 0, False
        self._said = dict[str, None]()  # different failures
        self._prints = 0  # that were said

    @asynccontextmanager
    async def episode(self, evaluation: bool = False) -> AsyncIterator["Episode"]:
        """An environment for one episode, once there are fewer than environment.processes."""
        async with self._free[evaluation]:
            slot = self._idle.pop() if self._idle else self._renew(len(self._conns))
            if _ended(self._conns[slot]):  # while it waited
                self._renew(slot)
            one, reusable = Episode(self._conns[slot], self._config), False
            try:
                yield one
                reusable = await one.close()
            finally:
                episodes, seconds = self._used[slot]
                self._used[slot] = episodes + 1, seconds + one.seconds
                worn = episodes + 1 >= MAX_EPISODES or seconds + one.seconds > MAX_BUSY_S
                if (worn or not reusable) and not self._closed:
                    self._renew(slot)
                self._idle.append(slot)
                self._count(one.error, reusable)
                self._show(one.printed)

    def close(self) -> None:
        """End all processes."""
        self._closed = True  # an episode that is cancelled later must not start a process
        for conn in self._conns.values():
            conn.close()
        self._server.close()

    def _renew(self, slot: int) -> int:
        """Give this slot a new process, and kill its old one."""
        if slot in self._conns:
            self._conns[slot].close()
        self._conns[slot], self._used[slot] = self._server.worker(slot), (0, 0.0)
        return slot

    def _count(self, error: str, works: bool) -> None:
        """Report the first different failures: metrics count all. ConfigError if there is nothing else."""
        self._works |= works
        if not error:
            return
        self._failures += 1
        if error not in self._said and len(self._said) < MAX_NOTES:
            self._said[error] = None
            self._note(f"{error}; the episode is dropped (the same failure is only counted from now on)")
        if self._failures >= MAX_STARTUP_FAILURES and not self._works:
            raise ConfigError(
                f"environment.kind {self._config.kind}: each of its first {MAX_STARTUP_FAILURES} episodes "
                f"failed, the first by {next(iter(self._said))}: correct the class, or, if it needs "
                "the network, set environment.network true"
            )

    def _show(self, printed: str) -> None:
        """Report the first prints of the user's functions, one of an episode."""
        if printed.strip() and self._prints < MAX_NOTES:
            self._prints += 1
            text = " | ".join(printed.split("\n")).strip(" |")
            self._note(f"environment {self._config.kind} printed: {text}")


class Episode:
    """An environment in a process of its own. EnvironmentFailure from any call is also kept as `error`."""

    def __init__(self, conn: socket, config: EnvironmentConfig) -> None:
        self._conn, self._config = conn, config
        self.seconds, self.error, self.printed = 0.0, "", ""
        self._closes = False  # it has something to close

    async def start(self, row: Mapping[str, Any]) -> Step:
        """The messages before the model's first turn, and the tools."""
        result = await self._call("start", row)
        messages, tools = result if _is_pair(result) else (result, [])
        if not all(isinstance(tool, dict) for tool in tools):
            raise self._failure(f"start returned the tools {str(tools)[:60]}; expected a list of schemas")
        return Step(self._messages("start", messages), tools=tuple(tools))

    async def step(self, message: Message) -> Step:
        """The answer to a turn of the model."""
        result = await self._call("step", message)
        if not isinstance(result, list) or len(result) != 3:
            raise self._failure(f"step returned {str(result)[:60]}; expected messages, reward, done")
        messages, reward, done = result
        most = sys.float_info.max
        number = isinstance(reward, int | float) and -most <= reward <= most
        if not (number or reward is None) or not isinstance(done, bool):
            returned = f"step returned the reward {reward!r:.30} and done {done!r:.30}"
            raise self._failure(f"{returned}; expected a finite number or None, and True or False")
        return Step(self._messages("step", messages), None if reward is None else float(reward), done)

    async def close(self) -> bool:
        """Let the environment free what it holds; False if its process cannot be used again."""
        if self.error or not self._closes:
            return not self.error
        try:
            await self._call("close", None)
        except EnvironmentFailure:
            self.error = ""  # the episode itself has ended well
            return False
        return True

    async def _call(self, name: str, argument: Any) -> Any:
        began, remaining = time.monotonic(), self._config.episode_s - self.seconds
        number = next(_numbers)
        try:
            async with asyncio.timeout(min(self._config.turn_s, remaining)):
                reply = await ask(self._conn, (name, argument, number), MAX_REPLY)
            json.dumps(reply, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except TimeoutError:
            short = "turn_s" if self._config.turn_s <= remaining else "episode_s"
            most = getattr(self._config, short)
            raise self._failure(f"{name} took more than environment.{short} = {most:g} s") from None
        except OSError as e:
            raise self._failure(f"its process died in {name}: {e}") from e
        except (ValueError, RecursionError) as e:
            raise self._failure(f"its process sent no reply to {name}") from e
        finally:
            self.seconds += time.monotonic() - began
        if isinstance(reply, dict) and reply.get("call") != number:
            raise self._failure(f"its process sent a reply to something else than {name}")
        self.printed += str(reply.get("printed", "")) if isinstance(reply, dict) else ""
        if not isinstance(reply, dict) or "result" not in reply:
            error = reply.get("error") if isinstance(reply, dict) else f"{name} sent {reply}"
            raise self._failure(str(error)[:400])
        self._closes = bool(reply.get("closes"))
        return reply["result"]

    def _messages(self, name: str, messages: Any) -> tuple[Message, ...]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}] if messages else []
        wrong = [messages] if not isinstance(messages, list) else [m for m in messages if not _is_message(m)]
        if wrong:
            expected = 'text or a list of {"role": ..., "content": ...}, both text'
            raise self._failure(f"{name} returned the messages {str(wrong)[:60]}; expected {expected}")
        return tuple(messages)

    def _failure(self, text: str) -> EnvironmentFailure:
        self.error = f"environment {self._config.kind}: {text}"
        return EnvironmentFailure(self.error)


def _ended(conn: socket) -> bool:
    """True if the process at the other end has died."""
    try:
        return not conn.recv(1, MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))


def _is_pair(result: Any) -> bool:
    """True for (messages, tools), whose second is a list; of messages alone the second is a dict."""
    return isinstance(result, list) and len(result) == 2 and isinstance(result[1], list)
