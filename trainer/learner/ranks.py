"""The learner's ranks: the process group, its collectives, and which rank is at fault when one fails.

Rank 0 alone talks to the controller and broadcasts every message; then all ranks do the same work in step,
each on its share, and decide on numbers that all of them have. Without RANK in the environment there is one
rank and no process group.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
REPORT_TIMEOUT_S = 5.0  # how long a rank waits for the others to report a failed collective
VARIABLES = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankLost(RuntimeError):
    """Another rank died, hung or failed: the message names it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among `size`; without a mesh it is the only one and there is no process group."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None  # (ranks,), or (nodes, ranks per node): sharded in a node, replicated over nodes
    deadline_s: float  # of every collective
    deadline_key: str = "pipeline.start_deadline_s"  # the setting that it is half of

    @classmethod
    def single(cls) -> Ranks:
        """The only rank."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(0, 1, device, None, float("inf"))

    @property
    def role(self) -> str:
        """This rank's name in logs and failures."""
        return f"learner-{self.rank}" if self.rank else "learner"

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value; the other ranks give None."""
        box = [value]
        if self.mesh is not None:
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]  # rank 0 gave one

    def gather(self, value: T) -> list[T]:
        """all_gather_object: every rank gets every rank's value."""
        values = [value] * self.size
        if self.mesh is not None:
            dist.all_gather_object(values, value)
        return values

    def messages(self, conn: Connection | None) -> Iterator[Any]:
        """The controller's messages, on every rank, until Shutdown or its death (EOFError on rank 0).

        Collectives have a deadline, but the controller may be silent for longer: meanwhile rank 0 broadcasts
        None.
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

    def diagnose(self, error: Exception) -> Exception:
        """The cause of this rank's error: the error itself, or a RankLost that names the rank at fault."""
        if self.mesh is None:
            return error
        causes: list[Exception] = []
        search = Thread(target=lambda: causes.append(self._find_missing_ranks(error)), daemon=True)
        search.start()
        search.join(3 * REPORT_TIMEOUT_S)  # behind a cut link the store never answers, not even with an error
        if causes:
            return causes[0]
        return self._rank_lost([0], error) if _is_collective(error) else error

    def _find_missing_ranks(self, error: Exception) -> Exception:
        """The cause by what the ranks report in the store, which ends with rank 0.

        A rank whose own work failed sets `failed/<rank>`; one whose collective failed sets `waits/<rank>`,
        and those that set neither are missing.
        """
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=REPORT_TIMEOUT_S))
        others = [r for r in range(self.size) if r != self.rank]
        try:
            if not _is_collective(error):
                store.set(f"failed/{self.rank}", str(error) or repr(error))
                self._keep_store_alive()
                return error
            store.set(f"waits/{self.rank}", "")
            deadline = time.monotonic() + REPORT_TIMEOUT_S
            while True:
                for r in others:
                    if store.check([f"failed/{r}"]):
                        self._keep_store_alive()
                        return RankLost(f"learner rank {r} failed: {store.get(f'failed/{r}').decode()}")
                missing = [r for r in others if not store.check([f"waits/{r}"])]
                if not missing:
                    return error
                if time.monotonic() > deadline:
                    self._keep_store_alive()
                    return self._rank_lost(missing, error)
                time.sleep(0.1)
        except RuntimeError:  # the store is gone
            return self._rank_lost([0], error)

    def _rank_lost(self, missing: list[int], error: Exception) -> RankLost:
        return RankLost(
            f"{_named(missing)} died, hung or cannot be reached for {self.deadline_s:g} s "
            f"(half of {self.deadline_key}): {error}"
        )

    def _keep_store_alive(self) -> None:
        """Give the other ranks time to read the store, which rank 0's process holds."""
        if self.rank == 0:
            time.sleep(1.0)

    def started(self, deadline_s: float) -> Ranks:
        """These ranks once all are ready: from now on every collective has this deadline."""
        if self.mesh is not None:
            for group in dist.distributed_c10d._world.pg_map:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=deadline_s), group)
        return replace(self, deadline_s=deadline_s, deadline_key="pipeline.deadline_s")

    def close(self) -> None:
        """End the process group after a successful run."""
        if self.mesh is not None:
            dist.destroy_process_group()


def init_ranks(deadline_s: float) -> Ranks:
    """Join the process group that the environment describes, as torchrun sets it; one rank without it."""
    if "RANK" not in os.environ:
        return Ranks.single()
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise ConfigError(
            f"RANK is set and {', '.join(missing)} is not: start the learner's ranks with torchrun, "
            "or unset RANK"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        _init_process_group(backend, timedelta(seconds=deadline_s), rank, size)
    except (dist.DistError, OSError) as e:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        cause = (str(e).splitlines() or [repr(e)])[0].rstrip(".")
        raise ConfigError(
            f"learner rank {rank} of {size} did not meet the others at {address} after {deadline_s:g} s: "
            f"{cause}. Start all ranks, with a MASTER_PORT that is free and reachable"
        ) from e
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    shape, names = (
        ((size,), ("shard",)) if local == size else ((size // local, local), ("replicate", "shard"))
    )
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return Ranks(rank, size, device, mesh, deadline_s)


def _init_process_group(backend: str, timeout: timedelta, rank: int, size: int) -> None:
    """Join the process group once all ranks are there; else a DistStoreError that names those missing."""
    store = _store(timeout, rank, size)
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{r}" for r in range(size)], timeout)
    except dist.DistStoreError as e:
        if missing := [r for r in range(size) if not store.check([f"here/{r}"])]:
            raise dist.DistStoreError(f"{_named(missing)} did not connect") from e
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _store(timeout: timedelta, rank: int, size: int) -> dist.Store:
    """torchrun's store, or one in rank 0's process.

    With ranks that the launcher has started here, store and gloo listen on the loopback only: torch's own
    store listens on every interface, whatever MASTER_ADDR is, and has no secret.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        return store
    listener = None
    if host == "127.0.0.1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        listener = None if rank else socket.create_server((host, port)).detach()
    return dist.TCPStore(
        host, port, size, not rank, timeout, wait_for_workers=False, master_listen_fd=listener
    )


def _named(ranks: list[int]) -> str:
    return f"learner rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _is_collective(error: Exception) -> bool:
    """True if communication failed, not this rank's own work: gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
