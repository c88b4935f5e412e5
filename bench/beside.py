"""`sigmoid-rl view` beside a training: does the training get slower? In turns, within a run. [5 min]

  python -m bench beside                        a run of `tiny`, 400 steps, in 40 blocks
  python -m bench beside --recipe demo --blocks 20 --steps 3    the default run, whose steps take seconds

In every other block a page is open that asks as the browser's does: the runs and the newest rollouts every
2 s, and the curve whenever it has been drawn anew; in the others the server is stopped. A pair is two
neighbouring blocks, in an order that changes from pair to pair; the first step of a block is left out.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Case, Row, median_and_range
from bench.table import table
from bench.viewer import Viewer
from trainer.config import ConfigError
from trainer.jsonl import read_lines

OPTIONS: dict[str, Any] = {
    "rounds": (1, "runs"),
    "blocks": (40, "of a run, an even number"),
    "steps": (10, "of a block"),
    "recipe": ("tiny", "of the runs"),
}
POLL_S = 2.0  # as the page


def cases(options: Namespace) -> Iterator[Case]:
    """The runs."""
    if options.blocks < 4 or options.blocks % 2 or options.steps < 2:
        values = f"--blocks {options.blocks} --steps {options.steps}"
        raise ConfigError(f"{values}: expected an even number of blocks from 4 on, of 2 steps or more")
    for seed in range(options.rounds):
        yield f"run {seed + 1}", partial(train, seed, options)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """Seconds a step without and with a page, and how much longer it took, over the pairs."""
    pairs = [pair for row in rows for pair in row["pairs"]]
    without, watched = zip(*pairs, strict=True)
    longer = [100 * (b / a - 1) for a, b in pairs]
    shown = [["without a page, s a step", median_and_range(without, ".2f")]]
    shown += [["with a page, s a step", median_and_range(watched, ".2f")]]
    error = statistics.stdev(longer) / len(longer) ** 0.5
    shown += [["longer by, %", f"{statistics.mean(longer):+.1f} ± {error:.1f} (mean of {len(longer)} pairs)"]]
    shown += [["answers to the page", str(sum(row["answers"] for row in rows))]]
    shown += [["the server's cores, %", median_and_range([100 * row["cores"] for row in rows], ".1f")]]
    return table(["", "median and range"], shown)


def watched(block: int) -> bool:
    """True if a page is open in a block: without, with, with, without, …"""
    return block % 4 in (1, 2)


def train(seed: int, options: Namespace) -> Row:
    """A run with a page in some of its blocks."""
    with tempfile.TemporaryDirectory(prefix="bench-beside-") as folder:
        run, steps = Path(folder) / "run", options.blocks * options.steps
        command = [sys.executable, "-m", "trainer.main", "--recipe", options.recipe, "--run-dir", str(run)]
        command += ["--seed", str(seed), "--pipeline.steps", str(steps), "--evaluation.every", str(steps)]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        answers, cores = watch(run, training, options.steps)
        if training.wait():
            raise RuntimeError(f"the run ended with exit code {training.returncode}")
        times = [line["time"] for line in read_lines(run / "metrics.jsonl") if "learner/loss" in line]
    blocks = [times[i : i + options.steps] for i in range(0, steps, options.steps)]
    seconds = [(block[-1] - block[0]) / (len(block) - 1) for block in blocks]
    pairs = list(zip(seconds[::2], seconds[1::2], strict=True))
    pairs = [pair[::-1] if watched(2 * i) else pair for i, pair in enumerate(pairs)]
    return {"pairs": pairs, "answers": answers, "cores": cores}


def watch(run: Path, training: subprocess.Popen[bytes], steps: int) -> tuple[int, float]:
    """Be the page, in the blocks that have one, until the run has ended; the number of answers, and the cores
    that the server and its drawings kept busy meanwhile."""
    metrics, answers, drawn, seconds = run / "metrics.jsonl", 0, 0, 0.0
    while not metrics.is_file() and training.poll() is None:
        time.sleep(0.2)
    with Viewer(run) as viewer:
        server = viewer.process
        while training.poll() is None:
            time.sleep(POLL_S)
            done = metrics.read_bytes().count(b'"learner/loss"')
            if not watched(done // steps):
                server.send_signal(signal.SIGSTOP)
                continue
            server.send_signal(signal.SIGCONT)
            seconds += POLL_S
            with suppress(OSError):
                newest = json.loads(viewer.ask("/api/runs?curve=1"))["reports"]
                viewer.ask("/api/groups?run=0")
                answers += 2
                if newest != drawn:
                    viewer.ask("/report")
                    answers, drawn = answers + 1, newest
        before = os.times()
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return answers, used / max(seconds, POLL_S)
