"""The process around a vLLM engine: one in this process, or a server on another machine.

    Request ──> RequestQueue ──at most `slots` samples at once──> VLLM.sample ──> Completion

A sample's prefix cache is salted with the weight version at the moment it goes to vLLM, so a sample that
waited here does not read keys of older weights. (A sample that waits inside vLLM during a weight update may
reuse prefix-cache blocks of the previous version.) vLLM takes them first come, first served. One that
continues another has that one's salt: it goes on with the keys and values that are there.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer import messages
from trainer.engines.backend import (
    REPORT_EVERY_S,
    Activity,
    RequestQueue,
    divergence_error,
    random_key,
    read_messages,
    run_engine,
    weight_files,
)
from trainer.messages import Ack, Ready
from trainer.roles import started
from trainer.telemetry import Clock
from trainer.types import PROMPT_SCORE, Columns, Completion, FinishReason, Request

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a request, as vLLM is asked for it."""

    request: Request
    index: int

    @property
    def id(self) -> str:
        """Its request id in vLLM."""
        return f"{self.request.request_id}/{self.index}"

    @property
    def parameters(self) -> dict[str, Any]:
        """vLLM's sampling parameters."""
        start = self.request.experts_from
        return {
            "temperature": self.request.temperature,
            "max_tokens": self.request.max_tokens,
            "seed": random_key(self.request.seed, self.index) >> 1,  # vLLM's seed is a signed integer
            "stop_token_ids": sorted(self.request.stop_ids),
            "ignore_eos": True,  # stop_ids holds every id that ends a completion
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "detokenize": False,
            "prompt_logprobs": 1 if self.request.score_prompt else None,
            "routed_experts_prompt_start": start if start >= 0 else len(self.request.prompt_ids),
        }

    def completion(
        self,
        token_ids: Iterable[int],
        logprobs: NDArray[np.float32],
        version_spans: Iterable[tuple[int, int, str]],  # first token, end, version
        reason: str | None,
        prompt: Sequence[Mapping[int, float]] = (),  # log-probs by position, from the second token on
        experts: NDArray[Any] | None = None,  # (tokens, layers, k), of the tokens read, from experts_from on
    ) -> Completion:
        """vLLM's output as a Completion; RuntimeError where it is not what we asked for."""
        name, ids = self.request.request_id, np.asarray(token_ids, np.int32)
        if reason not in REASONS or len(logprobs) != len(ids):
            raise RuntimeError(
                f"vLLM ended {name} with {reason!r}, {len(ids)} tokens and {len(logprobs)} log-probs; "
                f"expected {', '.join(REASONS)} and one log-prob per token"
            )
        versions = np.zeros(len(ids), np.int32)
        for start, end, version in version_spans:
            versions[start:end] = int(version)
        tops = [max(x.items(), key=itemgetter(1)) for x in prompt]
        rows = [
            (x[i], *top) for i, x, top in zip(self.request.prompt_ids[1:], prompt, tops, strict=bool(prompt))
        ]
        scores = np.array(rows, PROMPT_SCORE)
        done = Completion(name, self.index, ids, logprobs, versions, REASONS[reason], scores)
        if experts is None or self.request.experts_from < 0 or reason == "abort":
            return done
        count = len(self.request.prompt_ids) + len(ids) - 1 - self.request.experts_from
        if len(experts) != count:
            got = f"vLLM ended {name} with the experts of {len(experts)} tokens"
            raise RuntimeError(f"{got}; expected those of {count}, one less than it has read or made")
        return replace(done, experts=experts.reshape(count, -1))


class VLLM(Protocol):
    """vLLM in this process, or a server. If a call raises, the process ends with that error."""

    limit: int  # tokens of the longest sequence

    async def sample(self, sample: Sample, salt: int) -> Completion:
        """One completion, its prefix cache salted with a version; after `abort`, a partial one."""

    async def abort(self, sample_ids: Iterable[str]) -> None:
        """End these; their `sample` calls return."""

    async def pause(self, free_gpu: bool) -> None:
        """Stop between two tokens; sequences stay, and KV unless a GPU shared with the learner is freed."""

    async def resume(self, free_gpu: bool) -> None:
        """Continue after a `pause` with the same argument."""

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """Make a call of vLLM's weight transfer, named as in vLLM; while paused."""

    async def load(self, version: int, *paths: str) -> None:
        """While paused: load these files, if any, and label later tokens with `version`."""

    async def check(self) -> dict[str, float]:
        """Raise if the engine is dead; called every second. Returns `kv_use` (the share of the KV cache in
        use) and `preemptions` so far, where they are known."""

    async def close(self) -> None:
        """End the engine and every process it has started."""


Start = Callable[[], Awaitable[tuple[VLLM, dict[str, Any]]]]  # with information for `Ready`


def run_vllm(role: str, conn: Connection, telemetry: Connection, slots: int, start: Start) -> None:
    """Run the engine process from start to Shutdown."""
    with suppress(OSError):
        os.setsid()  # Ctrl-C in the terminal reaches the launcher, not vLLM's processes

    async def serve(clock: Clock) -> None:
        began = time.monotonic()
        vllm, info = await start()
        try:
            started()
            conn.send(Ready(info | {"slots": slots, "start_s": round(time.monotonic() - began, 1)}))
            await Scheduler(vllm, conn, clock, Activity(clock, telemetry), slots).run()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            await vllm.close()

    run_engine(role, telemetry, lambda clock: asyncio.run(serve(clock)))


class Ended(Exception):
    """The engine is to end, with all that it is doing."""


class Scheduler:
    """Gives waiting samples to vLLM, handles the controller's messages, books the engine's time."""

    def __init__(self, vllm: VLLM, conn: Connection, clock: Clock, activity: Activity, slots: int) -> None:
        self.version = 0
        self._vllm, self._conn, self._slots = vllm, conn, slots
        self._clock, self._activity = clock, activity
        self._queue = RequestQueue(vllm.limit)
        self._running: dict[str, Request] = {}  # by Sample.id
        self._aborted: set[str] = set()  # that are still running
        self._salts: dict[str, int] = {}  # of requests to be continued
        self._waits = "idle"  # the clock's state without a sample
        self._stopped = ""  # the clock's state while no sample may start
        self._booked_until = time.monotonic()
        self._evaluating: float | None = None  # share of the running samples; None: nothing is generated
        self._ended: list[Completion] = []
        self._group = asyncio.TaskGroup()

    async def run(self) -> None:
        """Serve until Shutdown, or until the controller is dead."""
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(message: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(inbox.put_nowait, message)

        try:
            async with self._group:
                self._group.create_task(self._watch())
                read_messages(self._conn, deliver)
                while not isinstance(message := await inbox.get(), messages.Shutdown):
                    await self._handle(message)
                raise Ended  # cancels the tasks of the group
        except* Ended:
            pass

    async def _handle(self, message: object) -> None:
        match message:
            case Request() as request:
                self._queue.add(request)
            case messages.UpdateWeights(version, path):
                paused = self._stopped
                self._stop("weight_update")
                if not paused:
                    await self._vllm.pause(free_gpu=False)
                await self._vllm.load(version, *weight_files(path))
                self.version = version
                if not paused:
                    await self._vllm.resume(free_gpu=False)
                self._send_completions()
                self._stop(paused)
                self._conn.send(Ack())
            case messages.Abort(request_ids):
                self._ended += self._queue.abort(request_ids)
                for request_id in request_ids:
                    self._salts.pop(request_id, None)
                self._send_completions()
                self._aborted |= {s for s, r in self._running.items() if r.request_id in request_ids}
                await self._vllm.abort(frozenset(self._aborted))
            case messages.Pause():
                self._stop("idle")
                await self._vllm.pause(free_gpu=True)
                self._send_completions()  # those that ended before the pause
                self._conn.send(Ack())
            case messages.Resume():
                await self._vllm.resume(free_gpu=True)
                self._stop("")
            case messages.Waits(state):
                self._waits = state
            case messages.Transfer(call, info):
                with self._clock.state("weight_update"):
                    await self._vllm.transfer(call, info)
                self._conn.send(Ack())
        self._start_samples()

    def _stop(self, state: str) -> None:
        """Start no sample in this state of the clock; in none ("") they may start."""
        self._stopped = state
        self._book_time()

    def _start_samples(self) -> None:
        """Start waiting samples while slots are free."""
        while not self._stopped and len(self._running) < self._slots and self._queue.next_request:
            samples = self._queue.take(1)
            sample = Sample(samples.request, samples.first)
            self._running[sample.id] = samples.request
            self._group.create_task(self._run_sample(sample))
        self._book_time()

    async def _run_sample(self, sample: Sample) -> None:
        request = sample.request
        salt = self._salts.pop(request.continues, self.version)
        if request.keep_kv:
            self._salts[request.request_id] = salt
        completion = await self._vllm.sample(sample, salt)
        if not np.isfinite(completion.logprobs_gen).all():
            raise divergence_error(self.version)
        del self._running[sample.id]
        self._aborted.discard(sample.id)
        if completion.finish_reason not in request.keep_kv:
            self._salts.pop(request.request_id, None)
        self._activity.tokens += len(completion.token_ids)
        if not self._ended:  # completions that end with the same token are sent together
            asyncio.get_running_loop().call_soon(self._send_completions)
        self._ended.append(completion)
        self._start_samples()
        self._activity.report(idle=not self._running)

    def _send_completions(self) -> None:
        if self._ended:
            with suppress(OSError):  # the controller is dead, and `read_messages` delivers a Shutdown
                self._conn.send(Columns.from_records(self._ended))
            self._ended.clear()

    def _book_time(self) -> None:
        """Book the time since the last call; call it after each change of `_stopped` or `_running`."""
        now, running = time.monotonic(), self._running.values()
        if self._evaluating is not None:
            self._activity.book(now - self._booked_until, self._evaluating)
        generating = bool(running) and not self._stopped
        self._booked_until = now
        self._evaluating = sum(r.evaluation for r in running) / len(running) if generating else None
        self._clock.enter(self._stopped or ("generate" if running else self._waits))

    async def _watch(self) -> None:
        """Every second: check that vLLM lives, repeat aborts, book time and report.

        Aborts are repeated since vLLM ignores the abort of a sample that it is only just receiving.
        """
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._activity.observe(await self._vllm.check())
            if self._aborted:
                await self._vllm.abort(frozenset(self._aborted))
            self._book_time()
            self._activity.report(idle=not self._running)
