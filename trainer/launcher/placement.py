"""Assigns GPUs (or cores) to the learner and the engines: as the settings say, the rest by the machine."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from trainer.config import Config, ConfigError
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
    """The GPUs of each learner rank and each engine on this machine, by number; all empty on a CPU. Without a
    learner: for an evaluation."""

    cores: int
    learner: tuple[tuple[str, ...], ...]
    engines: tuple[tuple[str, ...], ...]
    remote: int = 0  # engines on other machines
    world: int = 0  # learner ranks on all machines, if torchrun started them
    width: int = 1  # GPUs of each remote engine
    why: str = ""  # the learner has more than its usual share

    @property
    def gpus(self) -> bool:
        """True if this run uses GPUs."""
        return any(chain(self.learner, self.engines)) or bool(self.remote and not self.learner)

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

    def by_role(self) -> dict[str, float]:
        """Devices by role, for the ledger. What learner and engines share in time counts half for each."""
        roles = [role_name("engine", i) for i in range(self.remote or len(self.engines))]
        if not self.gpus:  # a replay has no engines, an evaluation no learner
            sides = [side for side in (["learner"] * bool(self.learner), roles) if side]
            return {role: self.cores / len(sides) / len(side) for side in sides for role in side}
        shared = self.shared
        learner = (self.world or len(self.learner)) - len(shared) / 2  # ranks on other machines share nothing
        trains = {"learner": learner} if self.learner else {}
        if self.remote:
            return trains | dict.fromkeys(roles, float(self.width))
        devices = [len(gpus) - len(shared.intersection(gpus)) / 2 for gpus in self.engines]
        return trains | dict(zip(roles, devices, strict=True))

    def describe(self) -> str:
        """The assignment in one line."""
        if not self.gpus:
            ranks = _count(len(self.learner), "learner rank")
            engines = _count(self.remote or len(self.engines), "remote engine" if self.remote else "engine")
            users = f", shared in time by {ranks} and" if self.learner else " for"
            return f"{self.cores} CPU cores{users} {engines}"
        engines = " | ".join(",".join(gpus) for gpus in self.engines if gpus)
        engines = engines or (f"{self.remote} remote" if self.remote else f"{len(self.engines)} on the CPU")
        beside = ", beside the learner" * (bool(self.shared) and len(self.learner) == len(self.engines) == 1)
        why = f" ({len(self.learner)} ranks: {self.why})" if self.why else ""
        learner = f"learner {', '.join(chain(*self.learner))}{why}; " if self.learner else ""
        return f"GPUs: {learner}engines {engines}{beside}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number > 1)


def without_judges(config: Config, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs left to the roles beside the judges' own; ConfigError if one of those is not among them."""
    verifiers = [one.verifier for one in config.scored.values() if "judge" in one.verifier.kinds]
    judges = {v.judge.device.partition(":")[2] for v in verifiers if v.judge.path} - {""}
    if missing := judges.difference(gpus):
        raise ConfigError(f"verifier.judge.device cuda:{missing.pop()}: expected cpu, or a GPU of {gpus}")
    return tuple(gpu for gpu in gpus if gpu not in judges)


def with_dtype(config: Config, gpus: int) -> Config:
    """model.dtype auto, decided: bfloat16 on GPUs, float32 on a CPU."""
    if config.model.dtype != "auto":
        return config
    return replace(config, model=replace(config.model, dtype="bfloat16" if gpus else "float32"))


def with_engine(config: Config, gpus: int) -> Config:
    """engine.kind auto, decided: vLLM for servers and on GPUs, if it is installed; else the torch engine.

    On a single GPU learner and vLLM take turns; the torch engine stays on it beside the learner.
    """
    engine = config.engine
    if engine.kind == "torch":
        return config
    if engine.kind == "auto" and not (engine.urls or (gpus and importlib.util.find_spec("vllm"))):
        return replace(config, engine=replace(engine, kind="torch"))
    colocate = engine.colocate or (gpus == 1 and engine.tensor_parallel == 1 and not engine.urls)
    return replace(config, engine=replace(engine, kind="vllm", colocate=colocate))


def for_roles(config: Config, devices: Devices) -> Config:
    """The config for the roles, with engine.weight_push and engine.count as the devices decide them."""
    gpus = {*chain(*devices.learner), *chain(*devices.engines)}
    config, count = with_engine(config, len(gpus)), len(devices.engines)
    engine = replace(config.engine, weight_push=weight_push(config, devices), count=count)
    return replace(config, engine=engine)


def weight_push(config: Config, devices: Devices) -> Literal["file", "nccl", "ipc"]:
    """Route of new weights to the engines; ConfigError if these devices cannot do what the setting says."""
    asked = config.engine.weight_push
    learner, engines = set(chain(*devices.learner)), set(chain(*devices.engines))
    best: Literal["file", "nccl", "ipc"] = "file"
    if config.engine.kind == "torch" or not devices.gpus or _has_slices(learner | engines):
        pass
    elif devices.remote:
        best = "nccl" if asked == "nccl" else "file"  # the server needs the setting, too
    elif not learner & engines:
        best = "nccl"
    elif engines <= learner:  # a memory handle is valid on the same GPU only
        best = "ipc"
    if asked in ("nccl", "ipc") and asked != best:
        raise ConfigError(
            f"engine.weight_push {asked}: nccl needs learner and engines on distinct GPUs, ipc a rank on "
            "each of the engines' GPUs (engine.colocate), both vLLM and no slices (MIG); give auto or file"
        )
    if asked == "auto" and best == "ipc" and config.model.lora.rank:
        return "file"  # of adapters alone; by ipc both sides' whole weights would be on the GPU at once
    return "file" if asked == "file" else best


def _has_slices(gpus: Iterable[str]) -> bool:
    """True if one is a part of a GPU (MIG): NCCL does not connect them."""
    return any(gpu.startswith("MIG-") for gpu in gpus)


def engines_alone(config: Config, gpus: tuple[str, ...], cores: int) -> Devices:
    """Assign all GPUs (none: cores) to engines, for an evaluation; ConfigError if there are too few."""
    width, remote, free = config.engine.tensor_parallel, len(config.engine.urls), len(gpus)
    _check_settings(config, bool(gpus or remote), 0)
    if not gpus or not width or remote:
        return Devices(cores, (), () if remote else ((),) * (config.engine.count or 1), remote, width=width)
    count = config.engine.count or max(1, free // width)
    if count * width > free:
        raise ConfigError(
            f"{count} engines of {width} GPUs each need {count * width} GPUs, this machine has {free}; lower "
            "engine.count or engine.tensor_parallel"
        )
    return Devices(cores, (), tuple(gpus[i * width : (i + 1) * width] for i in range(count)), width=width)


def assign(config: Config, gpus: tuple[str, ...], cores: int, torchrun: tuple[int, int] = (0, 0)) -> Devices:
    """Assign GPUs (none: cores) to learner and engines; ConfigError if this machine has too few.

    `torchrun` is the number of ranks it has started, on this machine and in all.
    """
    engine, torch, (local, world) = config.engine, config.engine.kind != "vllm", torchrun
    _check_settings(config, bool(gpus), local)
    width, remote, free = engine.tensor_parallel, len(engine.urls), len(gpus)
    shared = engine.colocate or (torch and width == free)  # the torch engine on a single GPU
    ranks, count = local or config.learner.ranks, engine.count
    if not gpus:
        ranks, count = ranks or 1, 0 if remote else count or 1
        if max(ranks, count) > cores:
            have = f"{ranks} learner ranks and {count} engines on {cores} CPU cores"
            raise ConfigError(f"{have}; expected a core for each: lower learner.ranks or engine.count")
        return Devices(cores, ((),) * ranks, ((),) * count, remote, world)
    if shared:  # both use all GPUs
        ranks, count = ranks or free, count or max(1, free // width)
    elif remote:
        ranks = ranks or free
    else:  # side by side; engines of width 0 are on the CPU
        ranks = ranks or max(1, min(free - width, round(free * LEARNER_SHARE)))
        count = count or max(1, (free - ranks) // width if width else 1)
    if engine.colocate:
        _check_torch(max(ranks, world))
    needed, first = (max(ranks, count * width), 0) if shared else (ranks + count * width, ranks)
    if needed > free:
        raise ConfigError(
            f"{ranks} learner ranks and {count} engines of {width} GPUs each need {needed} GPUs, this "
            f"machine has {free}; lower learner.ranks, engine.count or engine.tensor_parallel"
            + ("" if engine.colocate or torch else ", or let them take turns: engine.colocate")
        )
    if ranks > 1 and _has_slices(gpus[:ranks]):
        raise ConfigError(
            f"{ranks} learner ranks on slices of GPUs (MIG): NCCL does not connect them; give 1"
        )
    engines = tuple(gpus[first + i * width : first + (i + 1) * width] for i in range(count))
    return Devices(cores, tuple((gpu,) for gpu in gpus[:ranks]), engines, remote, world, width)


def _check_settings(config: Config, gpus: bool, local: int) -> None:
    """ConfigError if settings contradict each other, or need GPUs where there are none."""
    engine, ranks, torch = config.engine, config.learner.ranks, config.engine.kind != "vllm"
    if engine.urls and (torch or engine.count or engine.colocate):
        raise ConfigError("engine.urls names vLLM servers: expected engine.kind vllm, no count, no colocate")
    if local and ranks not in (0, local):
        raise ConfigError(f"learner.ranks is {ranks}, but torchrun started {local} on this machine")
    if (not gpus or torch) and (engine.tensor_parallel > 1 or engine.colocate):
        setting = "engine.colocate" if engine.colocate else f"engine.tensor_parallel {engine.tensor_parallel}"
        place = "is with the torch engine" if gpus else "is on the CPU"
        raise ConfigError(f"{setting} needs GPUs and engine.kind vllm; this run {place}")
    if not (engine.tensor_parallel or torch):
        raise ConfigError(
            "engine.tensor_parallel 0 is for torch engines; give 1 or more, or engine.kind torch"
        )


def slow_dtype(config: Config, devices: Devices) -> str:
    """The reason why model.dtype is not for these devices, and what to give instead; empty if it is."""
    roles = ["learner"] if devices.learner and not devices.gpus else []
    roles += ["engine"] if devices.engines and not devices.engines[0] else []
    if config.model.dtype != "bfloat16" or not roles or cpu_has_bfloat16():
        return ""
    return (
        f"model.dtype bfloat16: the {' and the '.join(roles)} would run on this CPU, which has no "
        "instructions for it (avx512_bf16, amx_bf16) and takes several times as long as in float32; give "
        "--model.dtype float32"
    )


def cpu_has_bfloat16() -> bool:
    """True if the CPU multiplies bfloat16 by itself; taken for granted where there is no /proc/cpuinfo."""
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
