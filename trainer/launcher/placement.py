"""Which GPUs (or cores) each role gets: derived from the machine, or as the settings say."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config import Config, ConfigError
from trainer.roles import role_name

LEARNER_SHARE = 1 / 4  # of the GPUs, where no setting says: generation takes most of a step


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of each side; `cores` > 0: both on the same cores, and the numbers are their threads."""

    learner: int
    engine: int
    cores: int = 0

    def __str__(self) -> str:
        return f"{self.cores} cores shared" if self.cores else f"{self.engine}+{self.learner}"


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs of each learner rank and each engine on this machine, by number; all empty on a CPU."""

    cores: int
    learner: tuple[tuple[str, ...], ...]
    engines: tuple[tuple[str, ...], ...]
    remote: int = 0  # engines on other machines
    world: int = 0  # ranks of the learner on all machines, where torchrun made them
    width: int = 1  # GPUs of each remote engine

    @property
    def gpus(self) -> bool:
        """Whether this run is on GPUs."""
        return bool(self.learner[0])

    @property
    def unit(self) -> str:
        """What the ledger counts."""
        return "GPU-hours" if self.gpus else "core-hours"

    def split(self) -> Split:
        """Devices by side, as the advice counts them."""
        if not self.gpus:
            return Split(1, 1, self.cores)
        engines = self.remote * self.width or sum(len(own) for own in self.engines)
        return Split(self.world or len(self.learner), engines)

    def threads(self, given: int, processes: int) -> int:
        """CPU threads of each of a role's processes: as given, or an equal part of the cores."""
        return given or max(1, self.cores // max(1, processes))

    def held(self) -> dict[str, float]:
        """Devices by role, as the ledger books them.

        A GPU that learner and engines share is half of each, and so are cores, since they take turns.
        """
        roles = [role_name("engine", i) for i in range(self.remote or len(self.engines))]
        if not self.gpus:
            return {"learner": self.cores / 2} | {role: self.cores / 2 / len(roles) for role in roles}
        ranks, engines = ({gpu for own in side for gpu in own} for side in (self.learner, self.engines))
        shared = ranks & engines
        learner = (self.world or len(self.learner)) - len(shared) / 2  # ranks elsewhere share with nobody
        if self.remote:
            return {"learner": learner} | dict.fromkeys(roles, float(self.width))
        held = [len(own) - len(shared & set(own)) / 2 for own in self.engines]
        return {"learner": learner} | dict(zip(roles, held, strict=True))

    def describe(self) -> str:
        """One line for a person."""
        if not self.gpus:
            many = f"{len(self.learner)} learner rank" + "s" * (len(self.learner) > 1)
            engines = f"{self.remote} remote engines" if self.remote else f"{len(self.engines)} engine"
            return f"{self.cores} CPU cores, shared in time by {many} and {engines}" + "s" * (
                not self.remote and len(self.engines) > 1
            )
        learner = ", ".join(",".join(rank) for rank in self.learner)
        engines = " | ".join(",".join(own) for own in self.engines) or f"{self.remote} remote"
        return f"GPUs: learner {learner}; engines {engines}"


def for_roles(config: Config, devices: Devices) -> Config:
    """The config with what the devices decide: what the roles work by."""
    push, count = weight_push(config, devices), len(devices.engines)
    return replace(config, engine=replace(config.engine, weight_push=push, count=count))


def weight_push(config: Config, devices: Devices) -> Literal["file", "nccl", "ipc"]:
    """How new weights reach the engines; ConfigError where these devices cannot do what is asked for."""
    given = config.engine.weight_push
    learner, engines = ({gpu for own in side for gpu in own} for side in (devices.learner, devices.engines))
    best: Literal["file", "nccl", "ipc"] = "file"
    if devices.gpus and devices.remote:
        best = "nccl" if given == "nccl" else "file"  # a server must be told as well, when it starts
    elif devices.gpus and not learner & engines:
        best = "nccl"
    elif devices.gpus and engines <= learner:  # a handle of its memory is of use on the same GPU alone
        best = "ipc"
    if given in ("nccl", "ipc") and given != best:
        raise ConfigError(
            f"engine.weight_push {given}: nccl needs learner and engines on distinct GPUs, ipc a learner "
            "rank on each of the engines' GPUs (engine.colocate); give auto or file"
        )
    return "file" if given == "file" else best


def assign(config: Config, gpus: tuple[str, ...], cores: int, torchrun: tuple[int, int] = (0, 0)) -> Devices:
    """Give GPUs (none: cores) to learner and engines; ConfigError where this machine has too few.

    `torchrun` is how many ranks that has made, on this machine and in all.
    """
    engine = config.engine
    width, remote, (local, world) = engine.tensor_parallel, len(engine.urls), torchrun
    if remote and (engine.kind != "vllm" or engine.count):
        raise ConfigError("engine.urls names vLLM servers: expected engine.kind vllm, and no engine.count")
    if remote and engine.colocate:
        raise ConfigError("engine.colocate is for engines on this machine, engine.urls for others: give one")
    if local and config.learner.ranks not in (0, local):
        raise ConfigError(
            f"learner.ranks is {config.learner.ranks}, but torchrun made {local} on this machine"
        )
    if (
        not gpus or engine.kind == "torch"
    ):  # the torch engine generates on the CPU, and so the run stays there
        if width > 1 or engine.colocate:
            what = "engine.colocate" if engine.colocate else f"engine.tensor_parallel {width}"
            raise ConfigError(f"{what} needs GPUs and engine.kind vllm; this run is on the CPU")
        ranks = local or config.learner.ranks or 1
        count = 0 if remote else engine.count or 1
        if max(ranks, count) > cores:
            raise ConfigError(
                f"{ranks} learner ranks and {count} engines on {cores} CPU cores; expected a core "
                "for each of them: lower learner.ranks or engine.count"
            )
        return Devices(cores, ((),) * ranks, ((),) * count, remote, world)
    free = len(gpus)
    ranks = local or config.learner.ranks
    if engine.colocate:  # everything on the same GPUs
        ranks, count = ranks or free, engine.count or max(1, free // width)
        needed, first = max(ranks, count * width), 0
    else:
        ranks = ranks or (free if remote else max(1, min(free - width, round(free * LEARNER_SHARE))))
        count = 0 if remote else engine.count or max(1, (free - ranks) // width)
        needed, first = ranks + count * width, ranks
    if needed > free:
        raise ConfigError(
            f"{ranks} learner ranks and {count} engines of {width} GPUs each need {needed} GPUs, this "
            f"machine has {free}; lower learner.ranks, engine.count or engine.tensor_parallel"
            + ("" if engine.colocate else ", or let them take turns: engine.colocate")
        )
    engines = tuple(gpus[first + i * width : first + (i + 1) * width] for i in range(count))
    return Devices(cores, tuple((gpu,) for gpu in gpus[:ranks]), engines, remote, world, width)


def torchrun_ranks() -> tuple[int, int]:
    """How many ranks torchrun has made on this machine and in all; (0, 0) without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 0
    return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
