"""The stages of a card's first ten minutes that no other benchmark has; each returns its record.

machine    versions, the driver's table, copies over PCIe and within the card
tests      pytest on some paths
profile    a step of our learner on a model: kernels by class, idle time of the GPU, peak memory beside the
           launcher's estimate
syncs      where the learner's step and the engine's wait for the GPU
engine     the torch engine's tokens/s, with CUDA graphs and without
nccl       two ranks of the learner on one GPU, which NCCL takes for two hosts: a step beside that of one rank
ipc        another process writes into a CUDA tensor of this one; memory that is offloaded is free for it
launcher   a run with a learner on the GPU: killed, resumed, ended
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import engine as bench_engine
from bench.gpu.kernels import junit
from bench.gpu.trainer import PACKS
from bench.kernels.providers import peer_versions
from bench.learner import step as learner_step
from bench.learner import throughput
from bench.learner.step import StepProblem
from bench.measure import machine, milliseconds
from bench.records import ROOT, Record
from trainer.config import Config, LearnerConfig, ModelConfig
from trainer.engines.torch.engine import TorchEngine
from trainer.launcher.memory_estimate import rank_bytes, size_of
from trainer.launcher.placement import Devices
from trainer.learner.learner import Learner
from trainer.learner.offload import Offload
from trainer.learner.ranks import Ranks, init_ranks
from trainer.telemetry import Clock
from trainer.types import TrainBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = {  # of a kernel, by its name; the first that matches
    "copies": r"memcpy|memset|copy",
    "attention": r"flash|fmha|attention|varlen",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|_mm|addmm",
    "optimizer": r"adam|multi_tensor",
    "reductions": r"reduce|softmax|norm",
    "elementwise": r"elementwise|vectorized|index|cat",
}
LAUNCHED_STEPS = 3  # before the run is killed
DEADLINE_S = 110.0  # of each half of the run


def machine_stage() -> Record:
    """Versions and copies."""
    driver = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        driver = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
    record: Record = {"machine": machine(DEVICE), "versions": peer_versions(), "nvidia_smi": driver}
    if DEVICE == "cuda":
        record["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    size = (256 if DEVICE == "cuda" else 1) << 20
    card = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    hosts = {"pageable": torch.ones(size, dtype=torch.uint8)}
    if DEVICE == "cuda":
        hosts["pinned"] = hosts["pageable"].pin_memory()
    other = torch.empty_like(card)
    copies = {"within the card": (other, card)}
    for name, host in hosts.items():
        copies |= {f"to the card, {name}": (card, host), f"from the card, {name}": (host, card)}
    record["gb_per_s"] = {
        name: size / 1e6 / statistics.median(_times(partial(a.copy_, b))) for name, (a, b) in copies.items()
    }
    return record


def _times(call: Callable[[], object], rounds: int = 7) -> list[float]:
    call()
    return [milliseconds(call, DEVICE) for _ in range(rounds)]


def tests_stage(paths: Sequence[str]) -> Record:
    """pytest; the stage fails with it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code = subprocess.run([*command, *paths], cwd=ROOT).returncode
        return {"exit": code} | (junit(report) if report.exists() else {})


@contextlib.contextmanager
def _learner(model: str) -> Iterator[tuple[StepProblem, str, Callable[[], float]]]:
    """The problem of a model (on a CPU a tiny one), its folder, and a call that makes a step."""
    p = replace(PACKS, model=model, checkpoint="4b" in model)
    p = p if DEVICE == "cuda" else throughput.TINY
    with tempfile.TemporaryDirectory(prefix="bench-first-") as folder:
        learner_step.save_model(p, folder)
        step, batch = learner_step.ours(p, folder), learner_step.make_batch(p)
        yield p, folder, lambda: step(batch)


def profile_stage(model: str) -> Record:
    """One step of the learner under the profiler, after two without it."""
    with _learner(model) as (p, folder, step):
        step()
        seconds = milliseconds(step, DEVICE) / 1e3
        record: Record = {"model": p.model, "seconds": seconds} | _memory(p, folder)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE == "cuda")
        with profile(activities=activities) as profiler:
            step()
            throughput.synchronize(p)
        return record | _kernels(profiler)


def _memory(p: StepProblem, folder: str) -> Record:
    """The peak of torch's allocator, and what the launcher expects of it."""
    config = Config(
        model=ModelConfig(path=folder, dtype=p.dtype),  # type: ignore[arg-type]  # MODELS names dtypes of the config
        learner=LearnerConfig(micro_batch_tokens=p.micro_batch_tokens, checkpoint_activations=p.checkpoint),
    )
    devices = Devices(1, (("0",) if DEVICE == "cuda" else (),), (("1",) if DEVICE == "cuda" else (),))
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"peak_gib": peak / 2**30, "estimated_gib": rank_bytes(config, size_of(folder), devices) / 2**30}


def _kernels(profiler: Any) -> Record:
    """Milliseconds by class and of the longest kernels, and of no kernel at all."""
    wanted = DeviceType.CUDA if DEVICE == "cuda" else DeviceType.CPU
    events = sorted((e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if
                    e.device_type == wanted)  # fmt: skip
    by_class, by_name, busy, until = Counter[str](), Counter[str](), 0.0, 0.0
    for start, end, name in events:
        kind = next((k for k, pattern in CLASSES.items() if re.search(pattern, name.lower())), "other")
        by_class[kind] += (end - start) / 1e3
        by_name[name[:120]] += (end - start) / 1e3
        busy += max(0.0, end - max(start, until)) / 1e3
        until = max(until, end)
    span = (until - events[0][0]) / 1e3
    return {
        "kernels": len(events), "span_ms": span, "idle_ms": span - busy,
        "ms_by_class": dict(by_class.most_common()), "ms_by_kernel": dict(by_name.most_common(30)),
    }  # fmt: skip


def syncs_stage(model: str) -> Record:
    """Waits by the line of ours that waits; none are seen on a CPU."""
    with _learner(model) as (p, _, step):
        step()
        record: Record = {"model": p.model, "learner": _waits(step)}
    with _engine(Path(ROOT, "trainer", "models", "tiny_model")) as (engine, submit):
        submit(8, 40)
        for _ in range(4):  # the first steps of a shape capture its graph
            engine.step()
        return record | {"engine": _waits(engine.step)}


def _waits(call: Callable[[], object]) -> dict[str, int]:
    lines: Counter[str] = Counter()

    def record(message: object, *rest: object, **more: object) -> None:
        stack = [
            f for f in traceback.extract_stack() if str(ROOT) in f.filename and "first.py" not in f.filename
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


@contextlib.contextmanager
def _engine(
    folder: Path | str, slots: int = 64, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[TorchEngine, Callable[[int, int], None]]]:
    """A torch engine, and a call that submits a number of requests of so many tokens."""
    engine = TorchEngine(str(folder), dtype, True, slots, DEVICE, decoder=True)

    def submit(count: int, tokens: int) -> None:
        prompts = bench_engine.random_prompts()[:count] % engine.model.config.vocab_size
        for request in bench_engine.requests(prompts):
            engine.submit(replace(request, max_tokens=tokens))

    yield engine, submit


def engine_stage() -> Record:
    """Tokens/s of 32 sequences, and whether both ways give the same tokens."""
    p = replace(throughput.TINY, model="smollm2-135m") if DEVICE == "cuda" else throughput.TINY
    tokens, dtype = (256, torch.bfloat16) if DEVICE == "cuda" else (8, torch.float32)
    rates: dict[str, float] = {}
    tokens_of: dict[str, dict[tuple[str, int], list[int]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-first-") as folder:
        learner_step.save_model(p, folder)
        for name, graphs in (("graphs", True), ("eager", False)):
            with _engine(folder, bench_engine.SEQUENCES, dtype) as (engine, submit):
                assert engine._decoder is not None
                engine._decoder.graphs &= graphs
                seconds = []
                for _ in range(3):
                    submit(bench_engine.SEQUENCES, tokens)
                    start = time.perf_counter()
                    done: dict[tuple[str, int], list[int]] = {}
                    while not engine.idle:
                        done |= {(c.request_id, c.index): c.token_ids.tolist() for c in engine.step()}
                    seconds.append(time.perf_counter() - start)
                tokens_of[name], rates[name] = done, bench_engine.SEQUENCES * tokens / min(seconds)
    return {"model": p.model, "tokens_per_s": rates, "same_tokens": tokens_of["graphs"] == tokens_of["eager"]}


def nccl_stage() -> Record:
    """Loss and gradient norm of a step on one rank, and on two ranks of the same GPU."""
    p = throughput.TINY
    with tempfile.TemporaryDirectory(prefix="bench-first-") as folder:
        learner_step.save_model(p, folder)
        one = _train(folder, None)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.spawn(_rank, (folder, port), nprocs=2)
        two = json.loads(Path(folder, "two.json").read_text())
    gap = max(abs(two[k] / one[k] - 1) for k in one)
    return {"one rank": one, "two ranks": two, "largest difference": gap, "failed": gap > 1e-3}


def _rank(rank: int, folder: str, port: int) -> None:
    """One of the two; NCCL refuses two ranks of one host on a GPU, and NCCL_HOSTID makes them two hosts."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "NCCL_HOSTID": f"first-{rank}", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = init_ranks(60)
    metrics = _train(folder, ranks)
    if rank == 0:
        Path(folder, "two.json").write_text(json.dumps(metrics))
    ranks.close()
    os._exit(0)  # gloo's threads may outlive the interpreter (pytorch issue 190489)


def _train(folder: str, ranks: Ranks | None) -> dict[str, float]:
    p = throughput.TINY
    config = Config(model=ModelConfig(path=folder), learner=LearnerConfig(micro_batch_tokens=64))
    learner = Learner(config, folder, Clock("learner", lambda spans: None), None, ranks)
    metrics = learner.train(TrainBatch(1, tuple(learner_step.make_batch(p)), {}))
    return {name: metrics[name] for name in ("learner/loss", "learner/grad_norm")}


def ipc_stage() -> Record:
    """A tensor shared with another process, and what offloading leaves to it."""
    context = mp.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=_other_process, args=(there, back))
    child.start()
    shared = torch.zeros(1 << 20, device=DEVICE)
    there.put(shared)
    back.get()
    record: Record = {"written by the other": bool((shared == 7).all())}
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


def launcher_stage() -> Record:
    """Kill the launcher after some steps, resume, and check that no step is lost."""
    with tempfile.TemporaryDirectory(prefix="bench-first-") as folder:
        data, run_dir = Path(folder, "sums.jsonl"), Path(folder, "run")
        rows = [
            {"question": f"Calculate {a} + {b}.", "answer": str(a + b)}
            for a in range(10, 30)
            for b in range(10, 20)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            sys.executable, "-m", "trainer.main", "--run-dir", str(run_dir), "--model.path", "tiny",
            "--data.source", str(data), "--verifier.kind", "number", "--data.held_out", "20",
            "--engine.kind", "torch", "--engine.max_new_tokens", "5", "--pipeline.prompts_per_step", "16",
            "--evaluation.every", "1000", "--logging.checkpoint_every", "1", "--logging.tensorboard", "false",
            "--pipeline.deadline_s", str(DEADLINE_S), *(["--learner.ranks", "1"] if DEVICE == "cuda" else []),
        ]  # fmt: skip
        first = subprocess.Popen([*command, "--pipeline.steps", "100000"], cwd=ROOT)
        try:
            until = time.monotonic() + DEADLINE_S
            while len(_steps(run_dir)) < LAUNCHED_STEPS and first.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        killed = len(_steps(run_dir))
        time.sleep(3)  # its roles end once their pipes are closed
        last = killed + LAUNCHED_STEPS
        resumed = [*command, "--pipeline.steps", str(last), "--resume"]
        code = subprocess.run(resumed, cwd=ROOT, timeout=DEADLINE_S).returncode
        steps = [row["step"] for row in _steps(run_dir)]
        books = json.loads((run_dir / "ledger.json").read_text())
        wanted = "GPU-hours" if DEVICE == "cuda" else "core-hours"
        failed = code != 0 or not killed or steps != list(range(1, last + 1)) or books["unit"] != wanted
        record = {
            "exit": code,
            "killed_after": killed,
            "steps": steps,
            "unit": books["unit"],
            "failed": failed,
        }
        return record | {"roles": books["roles"], "metrics": _steps(run_dir)[-1:]}


def _steps(run_dir: Path) -> list[Record]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    with contextlib.suppress(json.JSONDecodeError):  # the last line may be half written
        for line in lines:
            rows.append(json.loads(line))
    return [row for row in rows if "learner/loss" in row]
