"""The engine's process: takes messages between two tokens, generates, tells what it does."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from trainer.config import Config
from trainer.engines.torch.engine import TorchEngine
from trainer.messages import (
    Abort,
    Event,
    Pause,
    Paused,
    Ready,
    Resume,
    Shutdown,
    UpdateWeights,
    WeightsHeld,
)
from trainer.roles import run_role
from trainer.telemetry import Clock, send
from trainer.types import Columns, Request

TELL_EVERY_S = 1.0


def engine_main(
    config: Config, model_dir: str, conn: Connection, threads: int, role: str, telemetry: Connection
) -> None:
    """Entry of the spawned process; returns on Shutdown or when the controller is gone.

    `role` ("engine", "engine-1", ...) is its name in the books.
    """
    clock = Clock(role, partial(send, telemetry))

    def work() -> None:
        torch.set_num_threads(threads)
        dtype = getattr(torch, config.model.dtype)
        engine = TorchEngine(model_dir, dtype, config.model.fp32_head, config.engine.slots)
        conn.send(
            Ready(
                {
                    "kind": "torch",
                    "dtype": config.model.dtype,
                    "threads": threads,
                    "slots": config.engine.slots,
                }
            )
        )
        _serve(engine, conn, clock, telemetry)

    try:
        run_role(role, telemetry, work)
    finally:
        clock.flush()


def _serve(engine: TorchEngine, conn: Connection, clock: Clock, telemetry: Connection) -> None:
    inbox, told, busy_s, paused = _inbox(conn), time.monotonic(), 0.0, False
    while True:
        clock.enter("idle" if paused or engine.idle else "generate")
        while paused or engine.idle or not inbox.empty():
            match inbox.get():
                case Request() as request:
                    engine.submit(request)
                case UpdateWeights(version, path):
                    with clock.state("weight_update"):
                        began = time.monotonic()
                        engine.update_weights(version, path)
                    conn.send(WeightsHeld(version, time.monotonic() - began))
                case Abort(request_ids):
                    conn.send(Columns.of(engine.abort(request_ids)))
                case Pause():
                    paused = True
                    conn.send(Paused())
                case Resume():
                    paused = False
                case Shutdown():
                    return
        clock.enter("generate")
        began = time.monotonic()
        ended = engine.step()
        if share := engine.evaluation_share:
            clock.split({"generate": 1 - share, "evaluate": share})
        if ended:
            conn.send(Columns.of(ended))
        now = time.monotonic()
        busy_s += now - began
        if now - told > TELL_EVERY_S:
            send(telemetry, Event("engine", now, {"tokens": engine.generated, "busy_s": busy_s}))
            told = now


def _inbox(conn: Connection) -> SimpleQueue[Any]:
    """The controller's messages, taken off the pipe as they come: were both sides to send into full pipes
    while neither reads, both would wait for ever. A controller that is gone reads as Shutdown."""
    inbox: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    inbox.put(conn.recv())
        finally:
            inbox.put(Shutdown())

    Thread(target=read, daemon=True).start()
    return inbox
