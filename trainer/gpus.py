"""The GPUs and cores that this process may use, and the GPUs' memory, without importing torch.

nvidia-smi says it. Where that is missing, as in containers with the driver's library alone, the library does,
in a process of its own: a process that has started CUDA must not fork.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

FIELDS = "index,uuid,name,memory.total"
MIG = re.compile(r"\s+MIG \S*?(\d+)gb\S* .*\(UUID: (MIG-[^)]+)\)")  # a slice of a GPU, in `nvidia-smi -L`
FROM_LIBRARY = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, device = ctypes.c_int(), ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for i in range(count.value):
        name, size = ctypes.create_string_buffer(200), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), i)
        cuda.cuDeviceGetName(name, 200, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        print(i, "", name.value.decode(), size.value // 2**20, sep=", ")
"""


def cpu_cores() -> list[int]:
    """The CPU cores that this process may use; all where the system pins no process, as macOS."""
    pinned = hasattr(os, "sched_getaffinity")
    return sorted(os.sched_getaffinity(0)) if pinned else list(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One that the driver lists."""

    name: str  # as CUDA_VISIBLE_DEVICES takes it: a number, or the UUID of a slice
    uuid: str  # empty where only the driver's library was asked
    card: str
    memory: float | None  # bytes; None if it is shared with the CPU


def number_as_listed() -> None:
    """Let CUDA number the GPUs of this process and its children as nvidia-smi lists them, not fastest first.

    Not where CUDA_VISIBLE_DEVICES is set: its numbers are the user's.
    """
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def without_cuda() -> str:
    """The version of torch if it is a build that cannot use the GPUs of this machine; else empty."""
    version = importlib.metadata.version("torch")
    return version if version.endswith("+cpu") and listed_gpus() else ""


def usable_gpus() -> tuple[str, ...]:
    """The visible GPUs; none if torch cannot use them, which a notice says.

    Where there is no driver, those that CUDA_VISIBLE_DEVICES names: so a dry run plans for another machine.
    """
    return () if without_cuda() else visible_gpus()


def visible_gpus() -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; empty without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    return tuple(gpu.name for gpu in listed_gpus())


def smallest_gpu_memory() -> float | None:
    """Memory in bytes of the smallest visible GPU; None where the driver does not report it."""
    names = visible_gpus()
    # CUDA takes the first letters of a UUID.
    uuids = tuple(name for name in names if name.startswith(("GPU-", "MIG-")))
    sizes = [g.memory for g in listed_gpus() if g.name in names or (uuids and g.uuid.startswith(uuids))]
    return min((size for size in sizes if size is not None), default=None)


def listed_gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine, in the order of their numbers; of a GPU that is sliced (MIG), its slices."""
    listing = _lines("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in listing]
    rows = [row for row in rows if len(row) == 4 and row[0].isdecimal()]
    if not rows:
        rows = [line.split(", ") for line in _library()]
    slices = _slices()
    gpus: list[Gpu] = []
    for index, uuid, card, mib in rows:
        memory = float(mib) * 2**20 if mib.isdecimal() else None  # [N/A] if CPU and GPU share memory
        gpus += slices.get(index) or [Gpu(index, uuid, card, memory)]
    return tuple(gpus)


def _slices() -> dict[str, list[Gpu]]:
    """The slices of each GPU by its number. The size in a slice's name is in GB, rounded."""
    slices: dict[str, list[Gpu]] = {}
    index, card = "", ""
    for line in _lines("nvidia-smi", "-L"):
        if whole := re.match(r"GPU (\d+): (.*) \(UUID", line):
            index, card = whole[1], whole[2]
        elif part := MIG.match(line):
            gpu = Gpu(part[2], part[2], f"{card} MIG", float(part[1]) * 1e9)
            slices.setdefault(index, []).append(gpu)
    return slices


@cache
def _library() -> list[str]:
    """A line for each GPU that libcuda lists, as nvidia-smi's; none without a driver."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return _lines(sys.executable, "-c", FROM_LIBRARY, env=environment)


def _lines(*command: str, env: dict[str, str] | None = None) -> list[str]:
    """The lines that a command prints; none where it is missing or fails."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
