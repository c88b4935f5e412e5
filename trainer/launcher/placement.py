"""Assigns GPUs (or cores) to the learner and the engines: as the settings say, the rest by the machine."""

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from trainer.config import Config, ConfigError, EngineConfig
from trainer.roles import role_name

CPU_INFO = Path("/proc/cpuinfo")
COLOCATE_TORCH = (2, 13)  # the oldest that offloads the shards of several ranks
LEARNER_SHARE = 1 / 4  # of the GPUs, without a setting: generation takes most of a step


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of each side; `cores` > 0: both use these cores, and the numbers are their threads."""

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
    world: int = 0  # learner ranks on all machines, if torchrun started them
    width: int = 1  # GPUs of each remote engine
    why: str = ""  # the learner has more than its usual share

    @property
    def gpus(self) -> bool:
        """Whether this run uses GPUs."""
        return bool(self.learner[0])

    @property
    def shared(self) -> frozenset[str]:
        """GPUs that learner and engines both hold."""
        return frozenset(chain(*self.learner)) & frozenset(chain(*self.engines))

    @property
    def unit(self) -> str:
        """The unit of compute in the ledger."""
        return "GPU-hours" if self.gpus else "core-hours"

    def split(self) -> Split:
        """Devices by side, for the advice."""
        if not self.gpus:
            return Split(1, 1, self.cores)
        engines = self.remote * self.width or sum(map(len, self.engines))
        return Split(self.world or len(self.learner), engines)

    def threads(self, setting: int, processes: int) -> int:
        """CPU threads of each of a role's processes: the setting, or (0) an equal share of the cores."""
        return setting or max(1, self.cores // max(1, processes))

    def held(self) -> dict[str, float]:
        """Devices by role, for the ledger. What learner and engines share in time counts half for each."""
        roles = [role_name("engine", i) for i in range(self.remote or len(self.engines))]
        if not self.gpus:
            if not roles:  # a replay
                return {"learner": float(self.cores)}
            return {"learner": self.cores / 2} | {role: self.cores / 2 / len(roles) for role in roles}
        shared = self.shared
        learner = (self.world or len(self.learner)) - len(shared) / 2  # ranks on other machines share nothing
        if self.remote:
            return {"learner": learner} | dict.fromkeys(roles, float(self.width))
        held = [len(gpus) - len(shared.intersection(gpus)) / 2 for gpus in self.engines]
        return {"learner": learner} | dict(zip(roles, held, strict=True))

    def describe(self) -> str:
        """The assignment in one line."""
        if not self.gpus:
            ranks = _count(len(self.learner), "learner rank")
            engines = _count(self.remote or len(self.engines), "remote engine" if self.remote else "engine")
            return f"{self.cores} CPU cores, shared in time by {ranks} and {engines}"
        learner = ", ".join(",".join(rank) for rank in self.learner)
        engines = " | ".join(",".join(gpus) for gpus in self.engines if gpus)
        engines = engines or (f"{self.remote} remote" if self.remote else f"{len(self.engines)} on the CPU")
        if self.shared and len(self.learner) == len(self.engines) == 1:
            engines += ", beside the learner"
        why = f" ({len(self.learner)} ranks: {self.why})" if self.why else ""
        return f"GPUs: learner {learner}{why}; engines {engines}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number > 1)


def without_judges(config: Config, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs left to the roles beside the judges' own; ConfigError if one of those is not among them."""
    verifiers = [task.verifier for task in config.tasks.values() if "judge" in task.verifier.kinds]
    judges = {v.judge.device.partition(":")[2] for v in verifiers if v.judge.path} - {""}
    if missing := judges.difference(gpus):
        raise ConfigError(f"verifier.judge.device cuda:{missing.pop()}: expected cpu, or a GPU of {gpus}")
    return tuple(gpu for gpu in gpus if gpu not in judges)


def with_engine(config: Config, gpus: int) -> Config:
    """engine.kind auto, decided: vLLM for servers and on GPUs, if it is installed; else the torch engine.

    On a single GPU learner and vLLM then take turns; the torch engine stays on it beside the learner.
    """
    engine = config.engine
    if engine.kind != "auto":
        return config
    if not (engine.urls or (gpus and importlib.util.find_spec("vllm"))):
        return replace(config, engine=replace(engine, kind="torch"))
    colocate = engine.colocate or (gpus == 1 and not engine.urls)
    return replace(config, engine=replace(engine, kind="vllm", colocate=colocate))


def for_roles(config: Config, devices: Devices) -> Config:
    """The config for the roles, with engine.weight_push and engine.count as the devices decide them."""
    config, push, count = (
        with_engine(config, devices.gpus),
        weight_push(config, devices),
        len(devices.engines),
    )
    return replace(config, engine=replace(config.engine, weight_push=push, count=count))


def weight_push(config: Config, devices: Devices) -> Literal["file", "nccl", "ipc"]:
    """How new weights reach the engines; ConfigError if these devices cannot do what the setting says."""
    given = config.engine.weight_push
    learner, engines = set(chain(*devices.learner)), set(chain(*devices.engines))
    best: Literal["file", "nccl", "ipc"] = "file"
    if config.engine.kind == "torch":
        best = "file"
    elif devices.gpus and devices.remote:
        best = "nccl" if given == "nccl" else "file"  # the server needs the setting, too
    elif devices.gpus and any(gpu.startswith("MIG-") for gpu in learner | engines):
        best = "file"  # NCCL does not connect slices of GPUs
    elif devices.gpus and not learner & engines:
        best = "nccl"
    elif devices.gpus and engines <= learner:  # a memory handle is valid on the same GPU only
        best = "ipc"
    if given in ("nccl", "ipc") and given != best:
        raise ConfigError(
            f"engine.weight_push {given}: nccl needs learner and engines on distinct GPUs, ipc a learner "
            "rank on each of the engines' GPUs (engine.colocate), both vLLM and no slices (MIG); give auto "
            "or file"
        )
    return "file" if given == "file" else best


def assign(config: Config, gpus: tuple[str, ...], cores: int, torchrun: tuple[int, int] = (0, 0)) -> Devices:
    """Assign GPUs (none: cores) to learner and engines; ConfigError if this machine has too few.

    `torchrun` is the number of ranks it has started, on this machine and in all.
    """
    engine, torch, (local, world) = config.engine, config.engine.kind != "vllm", torchrun
    _check_settings(config, bool(gpus), local)
    width, remote, free = engine.tensor_parallel, len(engine.urls), len(gpus)
    shared = engine.colocate or (torch and width == free)  # the torch engine on a single GPU
    layout = _on_cores if not gpus else _shared if shared else _servers if remote else _side_by_side
    ranks, count = layout(engine, local or config.learner.ranks, free)
    if not gpus and max(ranks, count) > cores:
        raise ConfigError(
            f"{ranks} learner ranks and {count} engines on {cores} CPU cores; expected a core "
            "for each of them: lower learner.ranks or engine.count"
        )
    if not gpus:
        return Devices(cores, ((),) * ranks, ((),) * count, remote, world)
    if engine.colocate:
        _check_torch(max(ranks, world))
    needed, first = (max(ranks, count * width), 0) if shared else (ranks + count * width, ranks)
    if needed > free:
        raise ConfigError(
            f"{ranks} learner ranks and {count} engines of {width} GPUs each need {needed} GPUs, this "
            f"machine has {free}; lower learner.ranks, engine.count or engine.tensor_parallel"
            + ("" if engine.colocate or torch else ", or let them take turns: engine.colocate")
        )
    if ranks > 1 and any(gpu.startswith("MIG-") for gpu in gpus[:ranks]):
        raise ConfigError(
            f"{ranks} learner ranks on slices of GPUs (MIG), which NCCL does not connect; give 1"
        )
    engines = tuple(gpus[first + i * width : first + (i + 1) * width] for i in range(count))
    return Devices(cores, tuple((gpu,) for gpu in gpus[:ranks]), engines, remote, world, width)


def _on_cores(engine: EngineConfig, ranks: int, gpus: int) -> tuple[int, int]:
    """Learner ranks and engines that share the cores in time; `ranks`: as set, or 0."""
    return ranks or 1, 0 if engine.urls else engine.count or 1


def _shared(engine: EngineConfig, ranks: int, gpus: int) -> tuple[int, int]:
    """Learner ranks and engines that both use all GPUs."""
    return ranks or gpus, engine.count or max(1, gpus // engine.tensor_parallel)


def _servers(engine: EngineConfig, ranks: int, gpus: int) -> tuple[int, int]:
    """All GPUs for the learner, whose engines are on other machines."""
    return ranks or gpus, 0


def _side_by_side(engine: EngineConfig, ranks: int, gpus: int) -> tuple[int, int]:
    """LEARNER_SHARE of the GPUs for the learner, the others for engines; at width 0 one on the CPU."""
    width = engine.tensor_parallel
    ranks = ranks or max(1, min(gpus - width, round(gpus * LEARNER_SHARE)))
    return ranks, engine.count or max(1, (gpus - ranks) // width if width else 1)


def _check_settings(config: Config, gpus: bool, local: int) -> None:
    """ConfigError if settings contradict each other, or need GPUs where there are none."""
    engine, ranks, torch = config.engine, config.learner.ranks, config.engine.kind != "vllm"
    if engine.urls and (torch or engine.count):
        raise ConfigError("engine.urls names vLLM servers: expected engine.kind vllm, and no engine.count")
    if engine.urls and engine.colocate:
        raise ConfigError("engine.colocate is for engines on this machine, engine.urls for others: give one")
    if local and ranks not in (0, local):
        raise ConfigError(f"learner.ranks is {ranks}, but torchrun started {local} on this machine")
    if (not gpus or torch) and (engine.tensor_parallel > 1 or engine.colocate):
        setting = "engine.colocate" if engine.colocate else f"engine.tensor_parallel {engine.tensor_parallel}"
        place = "is with the torch engine" if gpus else "is on the CPU"
        raise ConfigError(f"{setting} needs GPUs and engine.kind vllm; this run {place}")
    if not (engine.tensor_parallel or torch):
        raise ConfigError(
            "engine.tensor_parallel 0 is for torch engines; give engine.kind torch, or 1 or more"
        )


def slow_dtype(config: Config, devices: Devices) -> str:
    """Why model.dtype is not for these devices, and what to give instead; empty if it is."""
    roles = [] if devices.gpus else ["learner"]
    roles += ["engine"] if devices.engines and not devices.engines[0] else []
    if config.model.dtype != "bfloat16" or not roles or cpu_has_bfloat16():
        return ""
    return (
        f"model.dtype bfloat16: the {' and the '.join(roles)} would run on this CPU, which has no "
        "instructions for it (avx512_bf16, amx_bf16) and takes several times as long as in float32; give "
        "--model.dtype float32"
    )


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 by itself; taken for granted where there is no /proc/cpuinfo."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return True
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


def _check_torch(ranks: int) -> None:
    """ConfigError if this torch cannot take several learner ranks off the GPUs."""
    version = importlib.metadata.version("torch")
    if ranks > 1 and tuple(map(int, re.findall(r"\d+", version)[:2])) < COLOCATE_TORCH:
        raise ConfigError(
            f"engine.colocate with {ranks} learner ranks needs torch {'.'.join(map(str, COLOCATE_TORCH))} or "
            f"newer, and this is {version}: install that, give learner.ranks 1, or leave out engine.colocate"
        )


def torchrun_ranks() -> tuple[int, int]:
    """The number of ranks that torchrun has started on this machine and in all; (0, 0) without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 0
    return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
