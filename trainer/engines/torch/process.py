"""The process of the torch engine: handles messages between two tokens, generates, reports its activity."""

import time
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from trainer.config import Config
from trainer.engines.backend import Activity, read_messages, run_engine
from trainer.engines.torch.engine import TorchEngine
from trainer.messages import Abort, Ack, Pause, Ready, Resume, Shutdown, UpdateWeights, Waits
from trainer.roles import started
from trainer.telemetry import Clock
from trainer.types import Columns, Request


def engine_main(
    config: Config, model_dir: str, conn: Connection, threads: int, role: str, telemetry: Connection
) -> None:
    """Entry of the spawned process `role`; returns on Shutdown or when the controller is dead."""

    def work(clock: Clock) -> None:
        torch.set_num_threads(threads)
        dtype = getattr(torch, config.model.dtype)
        # The launcher shows the process the GPU that it may use.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        fp32_head = config.model.fp32_head in ("both", "generator")
        experts = config.model.replay_experts
        engine = TorchEngine(model_dir, dtype, fp32_head, config.engine.slots, device, experts=experts)
        info = {"kind": "torch", "device": device, "dtype": config.model.dtype}
        started()
        conn.send(Ready(info | {"threads": threads, "slots": config.engine.slots}))
        serve(engine, conn, clock, telemetry)

    run_engine(role, telemetry, work)


def serve(engine: TorchEngine, conn: Connection, clock: Clock, telemetry: Connection) -> None:
    """Generate until a Shutdown comes."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    read_messages(conn, inbox.put)
    activity, paused, waits = Activity(clock, telemetry), False, "idle"
    while True:
        activity.report(idle=paused or engine.idle)
        while paused or engine.idle or not inbox.empty():
            clock.enter("idle" if paused else waits if engine.idle else "generate")
            match inbox.get():
                case Request() as request:
                    engine.submit(request)
                case UpdateWeights(version, path):
                    with clock.state("weight_update"):
                        engine.update_weights(version, path)
                    conn.send(Ack())
                case Abort(request_ids):
                    conn.send(Columns.from_records(engine.abort(request_ids)))
                case Pause():
                    paused = True
                    conn.send(Ack())
                case Resume():
                    paused = False
                case Waits(state):
                    waits = state
                case Shutdown():
                    return
        clock.enter("generate")
        start = time.monotonic()
        ended = engine.step()
        activity.tokens = engine.generated
        activity.book(time.monotonic() - start, engine.evaluation_share)
        if ended:
            conn.send(Columns.from_records(ended))
