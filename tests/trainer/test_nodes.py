"""Promises for several nodes. Each host is a network namespace of this machine with its own addresses.

engine host 10.77.2.2 ---- node 0: 10.77.2.1, 10.77.1.1 ---- node 1: 10.77.1.2
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import Begin, environment, make_model, steps, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("ip") or os.geteuid() != 0, reason="network namespaces need root and iproute2"
    ),
]
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
PREFIX = f"sigmoid-{os.getpid()}-"
LINKS = (("node0", "10.77.1.1", "node1", "10.77.1.2"), ("node0", "10.77.2.1", "engine", "10.77.2.2"))
Process = subprocess.Popen[str]


class Hosts:
    """Network namespaces, and the processes in them, which write to HOST.log in a folder."""

    def __init__(self, folder: Path, begin: Begin) -> None:
        self.folder, self.begin, self.run_dir = folder, begin, folder / "run"
        self.running: list[Process] = []

    def start(self, host: str, argv: list[str], **more: str) -> Process:
        env = environment(self.folder) | {"SIGMOID_RL_SECRET": "a shared secret"} | more
        with (self.folder / f"{host}.log").open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", f"{PREFIX}{host}", *argv],
                env=env, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def train(self, *more: str) -> list[Process]:
        """The learner's two nodes, as torchrun starts them on each."""
        argv = self.begin(self.run_dir, "--pipeline.deadline_s", "100", *more)
        torchrun = "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr=10.77.1.1"
        words = [sys.executable, *torchrun.split(), "--master-port=29571"]
        devices = ("to-node1", "to-node0")
        return [
            self.start(f"node{i}", [*words, f"--node-rank={i}", *argv[1:]], GLOO_SOCKET_IFNAME=devices[i])
            for i in range(2)
        ]

    def serve(self) -> Process:
        """A vLLM server on the third host, for a run with ENGINE_HOST."""
        (self.folder / "served").mkdir()
        model = make_model(self.folder / "served")
        flags = f"--host 10.77.2.2 --port 8077 --model.path {model} --engine.max_new_tokens 8"
        return self.start("engine", [sys.executable, "-m", "trainer.engines.vllm_server", *flags.split()])

    def printed(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in sorted(self.folder.glob("*.log")))

    def ended(self, nodes: list[Process], seconds: float) -> list[str]:
        """The lines of all hosts once the nodes have ended; the test fails if one still runs then."""
        deadline = time.monotonic() + seconds
        for node in nodes:
            try:
                node.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running after {seconds} s:\n{self.printed()}")
        return self.printed().splitlines()


ENGINE_HOST = ("--engine.kind", "vllm", "--engine.urls", "http://10.77.2.2:8077")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path, begin: Begin) -> Iterator[Hosts]:
    network, names = Hosts(tmp_path, begin), ("node0", "node1", "engine")
    try:
        for name in names:
            ip("netns", "add", PREFIX + name)
            ip("-n", PREFIX + name, "link", "set", "lo", "up")
        for a, a_address, b, b_address in LINKS:
            link = f"link add to-{b} netns {PREFIX}{a} type veth peer name to-{a} netns {PREFIX}{b}"
            ip(*link.split())
            for host, device, address in ((a, f"to-{b}", a_address), (b, f"to-{a}", b_address)):
                ip("-n", PREFIX + host, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", PREFIX + host, "link", "set", device, "up")
        yield network
    finally:
        for name in names:  # kill what still runs there
            pids = subprocess.run(["ip", "netns", "pids", PREFIX + name], capture_output=True, text=True)
            for words in (["kill", "-9", *pids.stdout.split()], ["ip", "netns", "del", PREFIX + name]):
                subprocess.run(words, check=False, capture_output=True)
        for process in network.running:
            process.wait(10)


@pytest.mark.parametrize("served", [False, pytest.param(True, marks=needs_vllm)], ids=["", "engine_host"])
def test_two_nodes_train_one_model(served: bool, hosts: Hosts) -> None:
    server = hosts.serve() if served else None
    nodes = hosts.train("--pipeline.steps", "3", *(ENGINE_HOST if served else ()))
    out = hosts.ended(nodes, 300)
    assert [node.returncode for node in nodes] == [0, 0], out
    assert steps(hosts.run_dir) == [1, 2, 3]
    assert (hosts.run_dir / "checkpoints" / "step-000003" / "model.safetensors").exists()
    assert server is None or server.poll() is None  # it outlives a run, for the next


@pytest.mark.parametrize(
    ("served", "host", "device", "culprit"),
    [
        (False, "node1", "to-node0", "learner rank 1 died, hung or cannot be reached"),
        pytest.param(True, "engine", "to-node0", "10.77.2.2", marks=needs_vllm),
    ],
    ids=["", "engine_host"],
)
def test_a_cut_between_hosts_ends_in_an_error_that_names_one(
    served: bool, host: str, device: str, culprit: str, hosts: Hosts
) -> None:
    if served:
        hosts.serve()
    nodes = hosts.train("--pipeline.steps", "100000", *(ENGINE_HOST if served else ()))
    until(lambda: len(steps(hosts.run_dir)) > 2, nodes[0], 180)
    ip("-n", PREFIX + host, "link", "set", device, "down")  # neither side gets an error or a reset
    out = hosts.ended(nodes, 280)
    assert all(node.returncode != 0 for node in nodes), out
    assert any(line.startswith("error: ") and culprit in line for line in out), out
