"""A learner rank's process: it answers the controller's messages with steps, weights, scores and checkpoints.

controller -- message --> rank 0 -- broadcast --> every rank: the same work, each on its share
           <-- answer --- rank 0
"""

import ctypes
import socket
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from trainer.config import Config, ConfigError
from trainer.learner import checkpoint
from trainer.learner.learner import Learner
from trainer.learner.ranks import Ranks, init_ranks
from trainer.learner.sharding import full_tensor
from trainer.learner.weight_file import WeightFiles
from trainer.messages import Ack, Event, Push, Ready, Refused, Save, Score, Scored, StepDone, Written
from trainer.models.lora import push_metadata
from trainer.roles import run_role, started
from trainer.telemetry import Clock, send
from trainer.types import TrainBatch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def learner_main(
    config: Config, model_dir: str, conn: Connection | None, threads: int, resume_from: str | None,
    telemetry: Connection | None,
) -> None:  # fmt: skip
    """Entry of a rank's process. `resume_from` is the checkpoint whose optimizer goes with `model_dir`.

    Only rank 0 has `conn` and reports how time is spent; a rank that torchrun started has no `telemetry`.
    """
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    ranks: Ranks | None = None

    def work() -> None:
        nonlocal ranks
        # Half the deadline, so that a lost rank is named before the controller times out.
        ranks = init_ranks(config.pipeline.start_deadline_s / 2)
        if ranks.device.type == "cpu":
            keep_freed_memory()
        clock = Clock("learner", _discard if telemetry is None or ranks.rank else partial(send, telemetry))
        service = LearnerService(config, model_dir, conn, clock, resume_from, ranks)
        ranks = ranks.started(config.pipeline.deadline_s / 2)
        if telemetry is not None and service.note:
            send(telemetry, Event("note", time.monotonic(), {"text": service.note}))
        started()
        service.send(service.ready)
        clock.enter("idle")
        for message in ranks.messages(conn):
            service.send(service.answer(message))
        service.close()
        clock.flush()
        ranks.close()

    def diagnose(error: Exception) -> tuple[str, Exception]:
        return ("learner", error) if ranks is None else (ranks.role, ranks.diagnose(error))

    run_role("learner", telemetry, work, diagnose)


def keep_freed_memory() -> bool:
    """Let the process keep large blocks that are freed; returns False where there is no glibc.

    Otherwise every tensor of several megabytes is mapped and its pages zeroed again: at 30 layers a ninth of
    the learner's CPU time. The process keeps a step's peak, which the memory estimate counts anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), mallopt(M_TOP_PAD, 64 << 20)])


def _discard(message: object) -> None:
    """Rank 0 speaks for all ranks, since they work in step."""


class LearnerService:
    """The learner of one rank, its ways to the engines, and what answers each message."""

    def __init__(
        self, config: Config, model_dir: str, conn: Connection | None, clock: Clock,
        resume_from: str | None, ranks: Ranks,
    ) -> None:  # fmt: skip
        start = time.monotonic()
        if not Path(config.run_dir).is_dir():
            raise ConfigError(
                f"{ranks.role} on {socket.gethostname()} does not see the run folder {config.run_dir}; "
                "expected one that all machines of the learner share, since each writes its part of a "
                "checkpoint: give another --run-dir"
            )
        self._config, self._conn, self._clock, self._ranks = config, conn, clock, ranks
        self._sending = Lock()
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._learner = Learner(config, model_dir, clock, resume_from, ranks)
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if config.engine.colocate:
            self._learner.leave_device()
        self._weight_files: WeightFiles | None = None
        one, metadata = self._learner, dict[str, str]()
        if one.adapter is not None and not (config.engine.urls or config.engine.direct_push):
            metadata = push_metadata(one.adapter, one.base_dir, config.model.dtype)
        self._published = one.policy.weights if metadata else one.weights  # the adapters alone, or all
        if ranks.rank == 0 and not config.engine.direct_push:
            dtype = torch.float32 if metadata else self._dtype
            size = dtype.itemsize * sum(w.numel() for w in self._published.values())
            # On a GPU the next step starts while a file is written; on a CPU both would need the same cores.
            behind = self._send_written if ranks.device.type == "cuda" else None
            files = config.weight_files
            self._weight_files = WeightFiles(config.run_dir, size, files, dtype, behind, metadata)
        self.note = self._weight_files.note if self._weight_files else ""  # for the user
        self._changed = False  # since the last weight file
        self._sender: Any = None  # a weight_transfer.Sender, made at the first Push
        seconds = time.monotonic() - start
        info = {
            "parameters": self._learner.active_parameters,
            "reference_parameters": self._learner.reference_parameters,
            "adapters": self._learner.adapter_parameters,
            "dtype": config.model.dtype,
            "seconds": seconds,
        }
        policy = self._learner.model
        self.ready = Ready(info | {"kernels": policy.kernels, "experts": policy.routers is not None})

    def answer(self, message: object) -> object:
        """Do what the message asks for; returns the reply."""
        learner, state = self._learner, self._clock.state
        match message:
            case TrainBatch():
                with learner.on_device():
                    return self._train(message)
            case Push():
                with state("publish"), learner.on_device(moments=False):
                    self._push()
                    return Ack()
            case Score(sequences, logprobs):
                with state("score"), learner.on_device(moments=False):
                    return Scored(learner.score(sequences, logprobs))
            case Save(path, controller_state):
                with state("checkpoint"), learner.on_device():
                    self._save(path, controller_state)
                    return Ack()
        raise TypeError(f"the learner has no answer to {type(message).__name__}")

    def send(self, message: object) -> None:
        """Send to the controller, from rank 0; the thread that writes weight files sends as well."""
        if self._conn is not None:
            with self._sending:
                self._conn.send(message)

    def _send_written(self, path: str, problem: str) -> None:
        self.send(Written(path, problem))

    def close(self) -> None:
        """Remove the weight files."""
        if self._weight_files is not None:
            self._weight_files.close()

    def _train(self, batch: TrainBatch) -> StepDone | Refused:
        """One step, and its weights as a file unless they are pushed from GPU to GPU."""
        try:
            metrics = self._learner.train(batch)
        except ConfigError as e:  # nothing was changed: these weights can still be saved
            return Refused(str(e))
        path = ""
        self._changed |= metrics["learner/tokens"] > 0  # an empty batch leaves the weights as they are
        if self._changed and batch.publish and not self._config.engine.direct_push:
            with self._clock.state("publish"):
                path, self._changed = self._publish(), False
        written = not path or self._weight_files is None or not self._weight_files.behind
        return StepDone(self._learner.version, path, metrics, written, self._learner.tokens)

    def _publish(self) -> str:
        """Write the weights to a file; its path on rank 0. All ranks take part: gathering is a collective."""
        weights = self._published
        if self._weight_files is not None:
            return self._weight_files.write(weights, self._learner.version)
        for weight in weights.values():
            full_tensor(weight, self._dtype)
        return ""

    def _push(self) -> None:
        """Send the weights from this rank's GPU to the engines'."""
        if self._sender is None:
            from trainer.learner.weight_transfer import Sender  # it imports vLLM

            weights, rank = self._learner.weights, self._ranks.rank
            self._sender = Sender(self._config.engine, weights, self._dtype, rank, self._conn)
        self._sender.send()

    def _save(self, path: str, controller_state: dict[str, Any]) -> None:
        one = self._learner
        checkpoint.save(
            path, one.model.lm, self._tokenizer, one.weights, one.networks, one.version, controller_state,
            self._ranks, one.adapter,
        )  # fmt: skip
        if self._ranks.rank == 0:
            checkpoint.prune(self._config.run_dir, self._config.logging.keep_checkpoints)
