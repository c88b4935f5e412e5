"""Judges for tests: a tiny reward model in a folder, and an OpenAI-compatible server on the loopback."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from small import make_model
from transformers import Qwen3Config, Qwen3ForSequenceClassification

Reply = tuple[int, Any]  # status and body


def make_reward_model(folder: Path, **more: Any) -> Path:
    """A random reward model with the tokenizer of the small model."""
    make_model(folder)
    config = Qwen3Config.from_pretrained(folder, num_labels=1, **more)
    torch.manual_seed(1)
    model = Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.mul_(50)  # so that scores differ visibly
    model.save_pretrained(folder)
    return folder


class JudgeServer:
    """Answers by `reply(route, body)`; counts the requests."""

    def __init__(self, reply: Callable[[str, Any], Reply]) -> None:
        self.reply, self.requests = reply, []  # type: ignore[var-annotated]
        self.headers: list[dict[str, str]] = []
        self.url = ""


@contextmanager
def serve(reply: Callable[[str, Any], Reply], port: int = 0) -> Iterator[JudgeServer]:
    """The server, until the end of the block."""
    judge = JudgeServer(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size) or b"null")
            judge.requests.append((self.path, body))
            judge.headers.append(dict(self.headers))
            status, answer = judge.reply(self.path, body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()


def says(text: str) -> Reply:
    """A language model's reply."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}
