"""A vLLM server by URL: the same promises over HTTP, the secret on every route, and a link that fails."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import httpx2
import numpy as np
import pytest
from engine_process import (
    START_S,
    EngineProcess,
    abort,
    assert_logprobs,
    assert_swapped,
    generate,
    load,
    need_vllm,
    perturb,
    prompt_of,
    request,
    settings,
    teacher_forced,
    wait_until_gone,
)
from fakes import having

from trainer.config import ConfigError
from trainer.engines.vllm.server import check_host, check_port

REMOTE = "trainer.engines.vllm.remote:engine_main"
ROOT = Path(__file__).parents[4]


@dataclass(frozen=True)
class Server:
    url: str
    port: int
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def server(tied_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started by its command, on loopback, with other weights than those of the run."""
    need_vllm()
    folder = tmp_path_factory.mktemp("server")
    for file in Path(tied_llama).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    perturb(load(tied_llama), folder / "model.safetensors", seed=7)
    (folder / "tokenizer.json").write_text("{}")  # not read: token in, token out
    os.environ["SIGMOID_RL_SECRET"] = "open sesame"
    port = free_port()
    log = (folder / "log").open("wb")
    command = [sys.executable, "-m", "trainer.engines.vllm_server", "--port", str(port)]
    command += ["--model.path", str(folder), "--engine.slots", "8", "--engine.max_new_tokens", "1952"]
    command += ["--engine.threads", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        try:
            headers = {"Authorization": "Bearer open sesame"}
            if httpx2.get(f"{url}/health", headers=headers, trust_env=False).status_code == 200:
                break
        except httpx2.HTTPError:
            time.sleep(0.5)
    yield Server(url, port, process)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    del os.environ["SIGMOID_RL_SECRET"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remote(model: str, run_dir: Path, url: str, deadline_s: float = 300.0) -> EngineProcess:
    deadlines = {"deadline_s": deadline_s, "start_deadline_s": deadline_s}
    config = having(settings(model, run_dir, "vllm"), pipeline=deadlines)
    return EngineProcess(config, "engine-3", REMOTE, url)


def test_no_route_answers_without_the_secret(server: Server) -> None:
    wrong = {"Authorization": "Bearer open barley"}
    routes = ["GET /health", "GET /v1/models", "GET /openapi.json", "POST /inference/v1/generate"]
    routes += ["POST /update_weights", "POST /pause", "PUT /weights", "POST /collective_rpc"]
    routes += ["OPTIONS /pause"]
    for (method, route), headers in product(map(str.split, routes), ({}, wrong)):
        answer = httpx2.request(method, server.url + route, headers=headers, trust_env=False)
        assert answer.status_code == 401, route


def test_a_remote_engine_keeps_the_contract(server: Server, tied_llama: str, tmp_path: Path) -> None:
    old, new = load(tied_llama), load(tied_llama)
    path, prompt = perturb(new, tmp_path / "new.safetensors"), prompt_of(70)
    engine = remote(tied_llama, tmp_path, server.url)
    assert engine.ready()["url"] == server.url

    async def work() -> tuple[dict, dict]:
        async with engine.client() as client:
            long = asyncio.create_task(generate(client, request("long", prompt, n=2, max_tokens=1900)))
            await asyncio.sleep(0)
            first = await generate(client, request("short", prompt, n=2, max_tokens=6))
            await engine.push(client, path)
            fresh = await generate(client, request("fresh", prompt, n=2, max_tokens=8, seed=9))
            stops = frozenset({int(fresh["fresh", 0].token_ids[3])})
            stop = request("fresh", prompt, n=2, max_tokens=8, seed=9, stop_ids=stops)
            stopped = await generate(client, stop)
            assert stopped["fresh", 0].finish_reason == "stop"
            assert stopped["fresh", 0].token_ids.tolist()[-1] in stops
            scored = await generate(client, request("scored", prompt, score_prompt=True))
            scores = scored["scored", 0].prompt_scores["logprob"]  # though the prefix is in its cache
            np.testing.assert_allclose(scores, teacher_forced(new, prompt[:1], prompt[1:]), atol=2e-5)
            abort(engine.conn, "long")
            running = await long
            await client.pause()
            client.resume()
            return first | fresh, running

    done, running = asyncio.run(asyncio.wait_for(work(), 200))
    for (label, _), c in done.items():
        # The server had other weights before the run began.
        assert_logprobs(c, old if label == "short" else new, prompt)
    for c in running.values():
        assert c.finish_reason == "abort"
        assert_swapped(c, old, new, prompt, 1)
    pids = engine.processes()
    engine.close()
    assert engine.process.exitcode == 0, engine.failure
    wait_until_gone(pids)
    assert server.process.poll() is None  # it keeps running for the next run


def test_a_link_cut_in_silence_is_one_clear_error(server: Server, tied_llama: str, tmp_path: Path) -> None:
    link = Link(server.port)
    deadline_s = 12.0
    url = f"http://127.0.0.1:{link.port}"
    engine = remote(tied_llama, tmp_path, url, deadline_s)
    engine.ready()
    engine.conn.send(request("endless", prompt_of(5), n=2, max_tokens=1900))
    time.sleep(0.5)
    link.cut.set()  # packets are dropped from now on; no connection is closed
    began = time.monotonic()
    engine.process.join(60)
    seconds = time.monotonic() - began
    engine._listener.join(10)
    assert engine.failure is not None and "engine-3" in engine.failure.message
    assert url in engine.failure.message and "\n" not in engine.failure.message
    assert seconds < deadline_s, seconds
    engine.close()


def test_a_wrong_secret_and_an_absent_server_get_clear_errors(
    server: Server, tied_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("SIGMOID_RL_SECRET", "open barley")
    for url, words in ((server.url, "SIGMOID_RL_SECRET"), (absent, "cannot be reached")):
        engine = remote(tied_llama, tmp_path, url, deadline_s=10.0)
        engine.process.join(60)
        engine._listener.join(10)
        assert engine.failure is not None and engine.failure.user_error
        assert words in engine.failure.message and url in engine.failure.message
        engine.close()


def test_a_server_beyond_loopback_needs_the_secret_and_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGMOID_RL_SECRET", raising=False)
    check_host("127.0.0.1")
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is not loopback and \$SIGMOID_RL_SECRET"):
        check_host("0.0.0.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: .*in use"):
            check_port("127.0.0.1", port)


class Link:
    """A TCP forwarder to a port here, until `cut`: then it reads nothing more and passes nothing on."""

    def __init__(self, target: int) -> None:
        self.cut = threading.Event()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            self._open.append(near)  # kept open, whatever happens
            if self.cut.is_set():
                continue
            far = socket.create_connection(("127.0.0.1", self._target))
            self._open.append(far)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.cut.is_set():
                    return
                sink.sendall(data)
            if not self.cut.is_set():
                sink.shutdown(socket.SHUT_WR)
