"""The stages of `python -m bench gpu` that no other benchmark has. [minutes]

  machine                 versions, and copies over PCIe and within the card
  qwen3-0.6b, qwen3-4b    a step of the learner: kernels by class, idle time, where it waits, peak memory
                          beside the estimate
  ipc                     another process writes into a tensor of this one; memory offloaded is free for it
  launcher                a run with a learner: killed, resumed, ended

On a CPU they run with a tiny model.
"""

import contextlib
import json
import re
import signal
import statistics
import subprocess
import tempfile
import traceback
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.autograd import DeviceType

from bench.faults.run import START_DEADLINE_S, Run
from bench.faults.trial import ORPHANS_S, audit
from bench.harness import ROOT, Case, Row, chosen
from bench.learner import step as learner_step
from bench.learner.step import PACKS, TINY, StepProblem
from bench.measure import DEVICE, milliseconds, synchronize
from trainer.config import Config, LearnerConfig, ModelConfig
from trainer.launcher.memory_estimate import rank_bytes, size_of
from trainer.launcher.placement import Devices
from trainer.learner.offload import Offload

OPTIONS: dict[str, Any] = {"only": ("", "comma-separated: stages whose name contains one of these")}
CLASSES = {  # of a kernel, by its name; the first that matches
    "copies": r"memcpy|memset|copy",
    "attention": r"flash|fmha|attention|varlen",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|_mm|addmm",
    "optimizer": r"adam|multi_tensor",
    "reductions": r"reduce|softmax|norm",
    "elementwise": r"elementwise|vectorized|index|cat",
}
LAUNCHED_STEPS = 3  # before the run is killed


def machine_stage() -> Row:
    """Versions and copies."""
    driver = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        driver = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
    nccl = torch.cuda.nccl.version() if DEVICE == "cuda" else ()
    size = (256 if DEVICE == "cuda" else 1) << 20
    card = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    hosts = {"pageable": torch.ones(size, dtype=torch.uint8)}
    if DEVICE == "cuda":
        hosts["pinned"] = hosts["pageable"].pin_memory()
    copies, rates = {"within the card": (torch.empty_like(card), card)}, dict[str, float]()
    for name, host in hosts.items():
        copies |= {f"to the card, {name}": (card, host), f"from the card, {name}": (host, card)}
    for name, (a, b) in copies.items():
        _, *ms = [milliseconds(partial(a.copy_, b), DEVICE) for _ in range(8)]
        rates[name] = size / 1e6 / statistics.median(ms)
    return {"nvidia_smi": driver, "nccl": ".".join(map(str, nccl)), "gb_per_s": rates}


def profile_stage(model: str) -> Row:
    """One step of the learner under the profiler, after two without it."""
    p = replace(PACKS, model=model, checkpoint="4b" in model) if DEVICE == "cuda" else TINY
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        learner_step.save_model(p, folder)
        step = partial(learner_step.ours(p, folder), learner_step.make_batch(p))
        step()
        seconds = milliseconds(step, DEVICE) / 1e3
        record: Row = {"model": p.model, "step_s": seconds} | _memory(p, folder)
        with torch.profiler.profile() as profiler:
            step()
            synchronize(DEVICE)
        return record | _kernels(profiler) | {"waits": _waits(step)}


def _memory(p: StepProblem, folder: str) -> Row:
    """The peak of torch's allocator, and what the launcher expects of it."""
    config = Config(
        model=ModelConfig(path=folder, dtype=p.dtype),  # type: ignore[arg-type]  # MODELS names dtypes of the config
        learner=LearnerConfig(micro_batch_tokens=p.micro_batch_tokens, checkpoint_activations=p.checkpoint),
    )
    devices = Devices(1, (("0",) if DEVICE == "cuda" else (),), (("1",) if DEVICE == "cuda" else (),))
    peak, gpu = 0, None
    if DEVICE == "cuda":
        peak, gpu = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    estimated = rank_bytes(config, size_of(folder), devices, gpu)
    return {"peak_gib": peak / 2**30, "estimated_gib": estimated / 2**30}


def _kernels(profiler: Any) -> Row:
    """Milliseconds by class and of the longest kernels, and of no kernel at all."""
    wanted = DeviceType.CUDA if DEVICE == "cuda" else DeviceType.CPU
    events = [e for e in profiler.events() if e.device_type == wanted and not e.is_user_annotation]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    by_class, by_name, busy, until = Counter[str](), Counter[str](), 0.0, 0.0
    for start, end, name in spans:
        kind = next((k for k, pattern in CLASSES.items() if re.search(pattern, name.lower())), "other")
        by_class[kind] += (end - start) / 1e3
        by_name[name[:120]] += (end - start) / 1e3
        busy += max(0.0, end - max(start, until)) / 1e3
        until = max(until, end)
    span = (until - spans[0][0]) / 1e3
    return {
        "kernels": len(events), "span_ms": span, "idle_ms": span - busy,
        "ms_by_class": dict(by_class.most_common()), "ms_by_kernel": dict(by_name.most_common(30)),
    }  # fmt: skip


def _waits(call: Callable[[], object]) -> dict[str, int]:
    """Number of times that each line of ours waits for the GPU; none is seen on a CPU."""
    lines: Counter[str] = Counter()

    def record(message: object, *rest: object, **more: object) -> None:
        stack = [
            f for f in traceback.extract_stack() if str(ROOT) in f.filename and "stages.py" not in f.filename
        ]
        if "synchroniz" in str(message).lower():
            lines[" < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in stack[:-4:-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record  # catch_warnings puts it back
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return dict(lines.most_common())


def ipc_stage() -> Row:
    """A tensor shared with another process, and what offloading leaves to it."""
    context = mp.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=_other_process, args=(there, back))
    child.start()
    shared = torch.zeros(1 << 20, device=DEVICE)
    there.put(shared)
    back.get()
    record: Row = {"written by the other": bool((shared == 7).all())}
    large = torch.randn((1 << 28 if DEVICE == "cuda" else 1 << 10), device=DEVICE)
    before, offload = large.clone().cpu(), Offload()
    free = []
    for move in (None, offload.offload, offload.reload):
        if move:
            move([large])
        there.put(None)
        free.append(back.get())
    record |= {"free_gib_resident_offloaded_reloaded": free, "same_bits": torch.equal(large.cpu(), before)}
    there.put("end")
    child.join(20)
    freed = DEVICE == "cpu" or free[1] - free[0] > 0.9
    return record | {"failed": not (record["written by the other"] and record["same_bits"] and freed)}


def _other_process(there: Any, back: Any) -> None:
    """Writes into the tensor that comes, and says how much memory of the GPU is free whenever it is asked."""
    there.get().fill_(7)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    back.put(None)
    while there.get() is None:
        back.put(torch.cuda.mem_get_info()[0] / 2**30 if DEVICE == "cuda" else 0.0)


def launcher_stage() -> Row:
    """Kill the launcher after some steps, resume, and check that no step and no prompt is lost."""
    flags = ("--pipeline.deadline_s", str(START_DEADLINE_S), *("--learner.ranks", "1") * (DEVICE == "cuda"))
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        run = Run(Path(folder), (*flags, "--pipeline.steps", "100000"), {})
        try:
            run.until(lambda: run.last_step() >= LAUNCHED_STEPS, START_DEADLINE_S)
            run.signal("launcher", signal.SIGKILL)
            orphans, killed_after = sorted(run.survivors(ORPHANS_S).values()), run.last_step()
        finally:
            run.close()
        record = {"killed_after": killed_after, "orphans": orphans, **audit(Path(folder), flags)}
        books = json.loads((run.dir / "ledger.json").read_text())
    failed = bool(orphans or record["problems"] or killed_after < LAUNCHED_STEPS)
    failed |= books["unit"] != ("GPU-hours" if DEVICE == "cuda" else "core-hours")
    return record | {"unit": books["unit"], "roles": books["roles"], "failed": failed}


STAGES: dict[str, Callable[[], Row]] = {
    "machine": machine_stage, "qwen3-0.6b": partial(profile_stage, "qwen3-0.6b"),
    "qwen3-4b": partial(profile_stage, "qwen3-4b"), "ipc": ipc_stage, "launcher": launcher_stage,
}  # fmt: skip


def cases(options: Namespace) -> Iterator[Case]:
    """The stages asked for."""
    for name in chosen(options.only, STAGES):
        yield name, STAGES[name]


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The rows as they are."""
    return json.dumps(rows, indent=1)
