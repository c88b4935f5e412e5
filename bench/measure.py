"""Time and peak memory of a call, and what the machine is; the same on CPU and CUDA."""

import gc
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distributions
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = TypeVar("T")


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Duration of one call: CUDA events around it on a GPU, the wall clock elsewhere."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def synchronize(device: str) -> None:
    """Wait for the GPU, where there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------ memory


def cuda_peak_bytes(call: Callable[[], object]) -> int:
    """Growth of torch's allocated CUDA memory while `call` runs, its results included."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def resident_peak_bytes(call: Callable[[], object]) -> int:
    """Growth of this process's peak resident memory while `call` runs, results included.

    Call it in a process of its own, after one warm-up call: then memory that a library keeps for good does
    not count. Linux only: the kernel's high-water mark is reset just before the call.
    """
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    call()
    return max(0, process_peak_bytes() - before)


def process_peak_bytes() -> int:
    """Peak resident memory of this process since it began."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def alone(function: Callable[..., T], *args: object, environment: Mapping[str, str] | None = None) -> T:
    """The function's result from a new process of its own; one that is killed is an error."""
    with mock.patch.dict(os.environ, environment or {}), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# ------------------------------------------------------------------------------------------------ machine


def machine() -> dict[str, Any]:
    """The machine that the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    name = re.search("model name.*: (.*)", info.read_text()) if info.exists() else None
    cpu, isa = name[1] if name else platform.machine(), torch.backends.cpu.get_cpu_capability()
    facts: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "isa": isa}
    if torch.cuda.is_available():
        facts |= {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def versions() -> dict[str, str]:
    """Versions of torch, transformers, and what the loss is compared with; "missing" if there is none."""
    installed = {d.name.lower().replace("-", "_"): d.version for d in distributions()}
    names = ("triton", "transformers", "liger_kernel", "cut_cross_entropy", "trl", "vllm")
    return {"torch": str(torch.__version__)} | {name: installed.get(name, "missing") for name in names}
