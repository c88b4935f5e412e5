"""Time and peak memory of a call, and what the machine is; the same on CPU and CUDA."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


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


def rounds_of(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: each begins with the next name, so that no name always goes first."""
    for i in range(rounds):
        first = i % max(1, len(names))
        yield [*names[first:], *names[:first]]


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Milliseconds per round of each call, and the errors of those that failed, which are not called again.

    The calls take turns, so that a slow moment of the machine affects all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}
    began = time.perf_counter()
    for i, order in enumerate(rounds_of(list(calls), rounds), 1):
        for name in order:
            if name in failed:
                continue
            try:
                times[name].append(milliseconds(calls[name], device))
            except Exception as error:
                failed[name] = error.with_traceback(None)  # its frames would hold tensors
            gc.collect()
        left = (time.perf_counter() - began) / i * (rounds - i)
        say(f"round {i}/{rounds} timed, about {left:.0f} s left")
    return times, failed


def summary(times: list[float]) -> dict[str, float]:
    """Median and quartiles of milliseconds."""
    if len(times) < 2:
        return dict.fromkeys(("median", "low", "high"), times[0]) if times else {}
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


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


def resident_peak_bytes(call: Callable[[], object]) -> tuple[int, str]:
    """Growth of this process's peak resident memory while `call` runs, results included, and how it was read.

    Call it in a process of its own, after one warm-up call: then memory that a library keeps for good does
    not count. On Linux the kernel's high-water mark is reset just before the call.
    """
    gc.collect()
    try:
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        call()
        return max(0, _status("VmHWM") - before), "VmHWM, reset before the second call, own process"
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        return grown * unit, "ru_maxrss growth over the first call's peak (a lower bound), own process"


def process_peak_bytes() -> int:
    """Peak resident memory of this process since it began; without /proc by ru_maxrss, which a child
    inherits from its parent."""
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


# ------------------------------------------------------------------------------------------------ machine


def machine(device: str) -> dict[str, Any]:
    """The machine that the numbers were measured on."""
    found: dict[str, Any] = {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "flags": _cpu_flags(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _cpu_flags() -> list[str]:
    flags = set(_cpuinfo("flags").split())
    return [flag for flag in ISA_FLAGS if flag in flags]
