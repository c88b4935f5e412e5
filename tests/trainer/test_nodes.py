"""Promises for several nodes. Each host is a network namespace of this machine with its own addresses.

engine host 10.77.2.2 ---- node 0: 10.77.2.1, 10.77.1.1 ---- node 1: 10.77.1.2
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from small import command, environment, make_data, make_model, steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("ip") or os.geteuid() != 0, reason="network namespaces need root and iproute2"
    ),
]
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
LINKS = (("node0", "10.77.1.1", "node1", "10.77.1.2"), ("node0", "10.77.2.1", "engine", "10.77.2.2"))
STEPS = 3
SECRET = "a shared secret"


@dataclass
class Hosts:
    """Network namespaces by name, and the processes in them."""

    prefix: str
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, host: str, argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[str]:
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", f"{self.prefix}{host}", *argv],
                env=env, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def cut(self, host: str, device: str) -> None:
        """From now on packets are lost there: neither side gets an error or a reset."""
        ip("-n", f"{self.prefix}{host}", "link", "set", device, "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    network = Hosts(f"sigmoid-{os.getpid()}-")
    names = ("node0", "node1", "engine")
    try:
        for name in names:
            ip("netns", "add", network.prefix + name)
            ip("-n", network.prefix + name, "link", "set", "lo", "up")
        for a, a_address, b, b_address in LINKS:
            ends = ((a, f"to-{b}", a_address), (b, f"to-{a}", b_address))
            near, far = ((network.prefix + host, device) for host, device, _ in ends)
            link = f"link add {near[1]} netns {near[0]} type veth peer name {far[1]} netns {far[0]}"
            ip(*link.split())
            for host, device, address in ends:
                ip("-n", network.prefix + host, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", network.prefix + host, "link", "set", device, "up")
        yield network
    finally:
        for name in names:  # kill what still runs there
            pids = subprocess.run(
                ["ip", "netns", "pids", network.prefix + name], capture_output=True, text=True
            )
            subprocess.run(["kill", "-9", *pids.stdout.split()], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", network.prefix + name], check=False, capture_output=True)
        for process in network.running:
            process.wait(10)


def train(hosts: Hosts, tmp_path: Path, *more: str) -> list[subprocess.Popen[str]]:
    """The learner's two nodes, as torchrun starts them on each."""
    (tmp_path / "model").mkdir()
    flags = ("--pipeline.deadline_s", "100", *more)
    argv = command(make_model(tmp_path / "model"), make_data(tmp_path), tmp_path / "run", *flags)
    nodes = []
    for rank in range(2):
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--node-rank", str(rank), "--master-addr", "10.77.1.1", "--master-port", "29571",
        ]  # fmt: skip
        network = {"GLOO_SOCKET_IFNAME": ("to-node1", "to-node0")[rank], "SIGMOID_RL_SECRET": SECRET}
        log = tmp_path / f"node{rank}.log"
        nodes.append(hosts.start(f"node{rank}", [*torchrun, *argv[1:]], environment(tmp_path) | network, log))
    return nodes


def ended(nodes: list[subprocess.Popen[str]], tmp_path: Path, seconds: float) -> str:
    """The output of all nodes once they have ended; the test fails if one still runs after `seconds`."""
    until = time.monotonic() + seconds
    for node in nodes:
        try:
            node.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{printed(tmp_path)}")
    return printed(tmp_path)


def printed(tmp_path: Path) -> str:
    return "\n".join(f"== {log.name}\n{log.read_text()}" for log in sorted(tmp_path.glob("*.log")))


def wait_for(holds: Any, process: subprocess.Popen[str], tmp_path: Path, seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < until, printed(tmp_path)
        time.sleep(0.2)


def test_two_nodes_train_one_model(hosts: Hosts, tmp_path: Path) -> None:
    nodes = train(hosts, tmp_path, "--pipeline.steps", str(STEPS))
    out = ended(nodes, tmp_path, 240)
    assert [node.returncode for node in nodes] == [0, 0], out
    assert steps(tmp_path / "run") == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "step-000003" / "model.safetensors").exists()


def test_a_cut_between_the_nodes_ends_in_an_error_that_names_a_rank(hosts: Hosts, tmp_path: Path) -> None:
    nodes = train(hosts, tmp_path, "--pipeline.steps", "100000")
    wait_for(lambda: len(steps(tmp_path / "run")) > 2, nodes[0], tmp_path)
    hosts.cut("node1", "to-node0")
    out = ended(nodes, tmp_path, 280)
    assert all(node.returncode != 0 for node in nodes), out
    errors = [line for line in out.splitlines() if line.startswith("error: ")]
    assert any("learner rank 1 died, hung or cannot be reached" in line for line in errors), out


@needs_vllm
def test_two_nodes_and_an_engine_host_train_one_model(hosts: Hosts, tmp_path: Path) -> None:
    nodes, server = with_engine_host(hosts, tmp_path, "--pipeline.steps", str(STEPS))
    out = ended(nodes, tmp_path, 300)
    assert [node.returncode for node in nodes] == [0, 0], out
    assert steps(tmp_path / "run") == [1, 2, 3]
    assert server.poll() is None  # it outlives a run, for the next


@needs_vllm
def test_a_cut_to_the_engine_host_ends_in_an_error_that_names_it(hosts: Hosts, tmp_path: Path) -> None:
    nodes, _ = with_engine_host(hosts, tmp_path, "--pipeline.steps", "100000")
    wait_for(lambda: len(steps(tmp_path / "run")) > 1, nodes[0], tmp_path)
    hosts.cut("engine", "to-node0")
    out = ended(nodes, tmp_path, 280)
    assert all(node.returncode != 0 for node in nodes), out
    assert any(line.startswith("error: ") and "10.77.2.2" in line for line in out.splitlines()), out


def with_engine_host(
    hosts: Hosts, tmp_path: Path, *more: str
) -> tuple[list[subprocess.Popen[str]], subprocess.Popen[str]]:
    """The same two nodes, and a vLLM server on a third host."""
    (tmp_path / "served").mkdir()
    make_model(tmp_path / "served")
    env = environment(tmp_path) | {"SIGMOID_RL_SECRET": SECRET}
    argv = [sys.executable, "-m", "trainer.engines.vllm_server", "--host", "10.77.2.2", "--port", "8077",
            "--model.path", str(tmp_path / "served"), "--engine.max_new_tokens", "8"]  # fmt: skip
    server = hosts.start("engine", argv, env, tmp_path / "server.log")
    url = "http://10.77.2.2:8077"
    return train(hosts, tmp_path, "--engine.kind", "vllm", "--engine.urls", url, *more), server
