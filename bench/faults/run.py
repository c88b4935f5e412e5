"""A training run under test: started as a user starts it, and watched from outside."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO

from bench.faults import machine
from bench.faults.cells import MIXTURE, SERVER
from bench.harness import ROOT
from trainer.jsonl import read_lines

INJECT = Path(__file__).parent / "inject"
DEADLINE_S = 20  # pipeline.deadline_s
START_DEADLINE_S = 120  # pipeline.start_deadline_s, of each part of a start
STARTED_S = 480  # for all of them: vLLM's take more than 120 s on cores with others' work
PROMPTS, HELD_OUT, PROMPTS_PER_STEP, LAG = 80, 20, 8, 1


def command(folder: Path, more: tuple[str, ...]) -> list[str]:
    """The command that starts the run with further options, and its data: sums, on which the math verifier's
    workers decide, if no environment does."""
    data = folder / "sums.jsonl"
    sums = [(a, b) for a in range(10, 20) for b in range(10, 20)]
    rows = [{"question": f"Calculate {a} + {b}.", "answer": str(a + b)} for a, b in sums]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: dict[str, object] = {
        "--run-dir": folder / "run", "--model.path": "tiny",
        "--data.source": data, "--data.held_out": HELD_OUT,
        "--verifier.kind": "math", "--verifier.timeout_s": 2, "--verifier.workers": 2,
        "--engine.kind": "torch", "--engine.max_new_tokens": 5,
        "--pipeline.prompts_per_step": PROMPTS_PER_STEP, "--pipeline.completions_per_prompt": 4,
        "--pipeline.max_lag": LAG, "--pipeline.no_positive_resampling": "false",
        "--pipeline.deadline_s": DEADLINE_S, "--pipeline.start_deadline_s": START_DEADLINE_S,
        "--objective.zero_variance": "keep",
        "--evaluation.every": 3, "--evaluation.samples": 2,
        "--logging.checkpoint_every": 2, "--logging.tensorboard": "false",
    }  # fmt: skip
    if "--environment.kind" in more:
        flags = {name: value for name, value in flags.items() if not name.startswith("--verifier")}
    settings = (str(x) for pair in flags.items() for x in pair)
    return [sys.executable, "-m", "trainer.main", *settings, *more]


def mixture(folder: Path) -> Path:
    """A random mixture of 2 of 16 experts with the tokenizer of `tiny`, in `folder`; made once."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from trainer.models.tiny import make_tokenizer

    if not (path := folder / "mixture").exists():
        tokenizer = make_tokenizer()
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, num_experts=16, num_experts_per_tok=2,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server of the model `tiny`, a teacher, as the leader of a process group; and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "trainer.serve", "tiny", "--port", str(port), "--out", str(folder / "server")]
    quiet, command = subprocess.DEVNULL, [sys.executable, *words]
    server = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=quiet, stderr=quiet)
    end = time.monotonic() + STARTED_S
    while time.monotonic() < end and server.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.2)
    return server, f"http://127.0.0.1:{port}"


class Run:
    """A run in `folder`/run; `mark` tells its processes from all others."""

    def __init__(self, folder: Path, more: tuple[str, ...], environment: dict[str, str]) -> None:
        self.folder, self.dir, self.mark = folder, folder / "run", folder.name
        self.entered: Counter[tuple[str, str]] = Counter()  # (role, state) -> how often
        self.lines: list[tuple[float, str]] = []  # what the run has printed, and when
        self.server: subprocess.Popen[bytes] | None = None  # of a teacher
        os.environ.setdefault("SIGMOID_RL_TOKEN", "token")
        if SERVER in more:
            self.server, url = start_server(folder)
            more = tuple(url if word == SERVER else word for word in more)
        if MIXTURE in more:
            more = tuple(str(mixture(folder)) if word == MIXTURE else word for word in more)
        address = str(folder / "states")
        Path(address).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        path = os.pathsep.join([str(folder), os.environ["PATH"]])  # the mark: see machine.py
        python = os.pathsep.join([str(INJECT), str(ROOT)])
        env = os.environ | {"PATH": path, "PYTHONPATH": python, "FAULTS_SOCKET": address} | environment
        resume = ("--resume",) if (self.dir / "config.yaml").exists() else ()
        (self.dir / "pids.json").unlink(missing_ok=True)  # of the process before
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*machine.with_shared_memory(folder), *command(folder, more), *resume],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._threads = [
            Thread(target=self._listen, daemon=True),
            Thread(target=self._read, args=(self.process.stdout,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        while True:
            try:
                role, state = self._socket.recv(256).decode().split()
            except OSError:
                return
            self.entered[role, state] += 1

    def _read(self, out: IO[str]) -> None:
        for line in out:
            self.lines.append((time.monotonic(), line.rstrip()))

    def printed(self, pattern: str, since: float = 0.0) -> float | None:
        """Time of the first line with this pattern, at `since` or later; None: there is none."""
        return next((t for t, line in list(self.lines) if t >= since and re.search(pattern, line)), None)

    @property
    def error(self) -> str:
        """The last line that begins with "error:"."""
        return next((line for _, line in reversed(self.lines) if line.startswith("error:")), "")

    def until(self, condition: Callable[[], object], seconds: float, every_s: float = 0.002) -> bool:
        """Wait for the condition; False if the run ends, or the time is up, before it holds."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                return bool(condition())
            time.sleep(every_s)
        return True

    def pid(self, role: str) -> int:
        """The process of a role; 0 if there is none."""
        if role == "launcher":
            return self.process.pid
        if role == "teacher" and self.server:
            return -self.server.pid  # its process group
        if role in ("fork server", "verifier worker"):
            server, workers = machine.verifiers(self.mark)
            return server if role == "fork server" else min(workers, default=0)
        try:
            return int(json.loads((self.dir / "pids.json").read_text()).get(role, 0))
        except FileNotFoundError:
            return 0

    def last_step(self) -> int:
        """The last step in metrics.jsonl."""
        path = self.dir / "metrics.jsonl"
        return max((row["step"] for row in read_lines(path)), default=0) if path.exists() else 0

    def signal(self, role: str, number: int) -> bool:
        """Send a role's process a signal; False if there is no such process."""
        if pid := self.pid(role):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                return True
        return False

    def survivors(self, seconds: float) -> dict[int, str]:
        """The processes that are still there after so long."""
        end = time.monotonic() + seconds
        while (running := machine.processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        return running

    def close(self) -> None:
        """End what is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        machine.kill_all(self.mark)
        self.process.wait()
        if self.server:
            for number in (signal.SIGCONT, signal.SIGTERM):
                self.signal("teacher", number)
            self.server.wait()
        self._socket.close()
        self._threads[1].join(5)
