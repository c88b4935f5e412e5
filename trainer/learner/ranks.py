"""The learner's ranks: who is there, what they tell each other, and whom to name when one is missing.

Rank 0 alone speaks with the controller and hands every message on; all ranks then do the same work on their
share of it, in step, and decide everything on numbers that all of them have. Without RANK in the environment
there is one rank and no process group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import ConfigError
from trainer.messages import Shutdown

T = TypeVar("T")
ROLL_CALL_S = 5.0  # how long a rank that lost the others waits for their last words
VARIABLES = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankLost(RuntimeError):
    """Another rank died, hung or failed: the message names it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among `size`; without a mesh it is the only one and there is no process group."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None  # (ranks,), or (nodes, ranks a node): sharded in a node, replicated over nodes
    deadline_s: float  # of every collective

    @property
    def role(self) -> str:
        """Its name in logs and failures."""
        return f"learner-{self.rank}" if self.rank else "learner"

    def broadcast(self, thing: T | None) -> T:
        """Rank 0's thing."""
        box = [thing]
        if self.mesh is not None:
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]  # rank 0 gave one

    def gather(self, thing: T) -> list[T]:
        """Everybody's thing, on every rank: what is decided on them is decided alike."""
        things = [thing] * self.size
        if self.mesh is not None:
            dist.all_gather_object(things, thing)
        return things

    def messages(self, conn: Connection | None) -> Iterator[Any]:
        """What the controller sends, on every rank, up to its Shutdown or its death (EOFError on rank 0).

        A collective has a deadline and an idle learner has none: rank 0 gives a sign of life meanwhile.
        """
        while True:
            message = None
            try:
                if conn is not None and (self.mesh is None or conn.poll(self.deadline_s / 4)):
                    message = conn.recv()
            except (EOFError, OSError):
                self.broadcast(Shutdown())
                raise
            message = self.broadcast(message)
            if isinstance(message, Shutdown):
                return
            if message is not None:
                yield message

    def explain(self, error: Exception) -> Exception:
        """What to tell of an error of this rank: its own words, or which rank it waited for in vain."""
        if self.mesh is None:
            return error
        told: list[Exception] = []
        asking = Thread(target=lambda: told.append(self._call_roll(error)), daemon=True)
        asking.start()
        asking.join(3 * ROLL_CALL_S)  # behind a cut link the store answers nothing, not even an error
        return told[0] if told else self._lost([0], error) if _of_a_collective(error) else error

    def _call_roll(self, error: Exception) -> Exception:
        """The same, asked of the store, which lives with rank 0."""
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=ROLL_CALL_S))
        others = [r for r in range(self.size) if r != self.rank]
        try:
            if not _of_a_collective(error):
                store.set(f"failed/{self.rank}", str(error) or repr(error))
                self._linger()
                return error
            store.set(f"waits/{self.rank}", "")
            until = time.monotonic() + ROLL_CALL_S
            while True:
                for r in others:
                    if store.check([f"failed/{r}"]):
                        self._linger()
                        return RankLost(f"learner rank {r} failed: {store.get(f'failed/{r}').decode()}")
                missing = [r for r in others if not store.check([f"waits/{r}"])]
                if not missing:
                    return error
                if time.monotonic() > until:
                    self._linger()
                    return self._lost(missing, error)
                time.sleep(0.1)
        except RuntimeError:
            return self._lost([0], error)

    def _lost(self, missing: list[int], error: Exception) -> RankLost:
        who = f"learner rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return RankLost(
            f"{who} died, hung or cannot be reached for {self.deadline_s:g} s (half of pipeline.deadline_s): "
            f"{error}"
        )

    def _linger(self) -> None:
        """The store ends with rank 0: the others may still be asking."""
        if self.rank == 0:
            time.sleep(1.0)


def join(deadline_s: float) -> Ranks:
    """Meet the other ranks named in the environment (as torchrun sets it), if there are any."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return alone()
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise ConfigError(
            f"RANK is set and {', '.join(missing)} is not: start the learner's ranks with torchrun, "
            "or unset RANK"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=deadline_s))
    except dist.DistError as e:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"learner rank {rank} of {size} did not meet the others at {where} after {deadline_s:g} s: start "
            f"all ranks, with a MASTER_PORT that is free and reachable ({str(e).splitlines()[0]})"
        ) from e
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    shape, names = ((size,), ("shard",)) if here == size else ((size // here, here), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return Ranks(rank, size, device, mesh, deadline_s)


def alone() -> Ranks:
    """The only rank."""
    return Ranks(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"), None, float("inf"))


def leave(ranks: Ranks) -> None:
    """End the process group, after a good end."""
    if ranks.mesh is not None:
        dist.destroy_process_group()


def _of_a_collective(error: Exception) -> bool:
    """Whether communication failed, not this rank's own work: gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
