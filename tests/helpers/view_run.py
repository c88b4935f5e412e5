"""An invented run for `sigmoid-rl view`: a report's folder, and a journal as a controller writes it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fakes import rollout
from report_folder import EPISODE, HOSTILE, write_run

from trainer import models
from trainer.controller.journal import Journal
from trainer.controller.rounds import Minibatch
from trainer.controller.sampler import IssuedPrompt
from trainer.run_folder import TOKENIZER
from trainer.types import Group, Prompt, Rollout, TrainBatch, TrainSequence
from trainer.view.state import RunState, open_run

TEXTS = ("12+30=42", "Grün: 7", HOSTILE[0])


def tokenizer() -> Any:
    """That of the built-in tiny model."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(models.__file__).parent / "tiny_model" / TOKENIZER))


def write_view_run(folder: Path, groups: int = 6, tokens: int = 12) -> Path:
    """A run of two groups a step, of two tasks; group 3 is of episodes, the last two are not trained on."""
    write_run(folder)
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"pipeline": {"steps": 60}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / TOKENIZER).write_text(tokenizer().to_str())
    journal, made = Journal(folder / "journal"), [invented(i, tokens) for i in range(groups)]
    for one in made:
        journal.issued(IssuedPrompt(one.group_id, one.epoch, one.prompt, 0))
        journal.finished(one)
    for step in range(1, (groups - 1) // 2 + 1):
        train(journal, step, made[2 * step - 2 : 2 * step])
    journal.close()
    return folder


def invented(number: int, tokens: int) -> Group:
    """A group of three rollouts: a right one, a wrong one that was interrupted, and a wrong one."""
    rng = np.random.default_rng(number)
    text, task = f"Calculate {number}. {HOSTILE[1]}", "math" if number % 2 else "code"
    prompt = Prompt(f"id{number:04d}", text, (1, 2), "42", {}, task)
    rollouts = []
    for i in range(3):
        mask = np.ones(tokens + i, bool)
        if i == 1 or number == 3:
            mask[4:7] = False
        ids = rng.integers(5, 15, len(mask), np.int32)
        one = rollout(1.0 if i == 0 else -1.0, mask, token_ids=ids, text=f"{TEXTS[i]} of {number}")
        numbers = -rng.random(len(mask)).astype(np.float32) * mask
        versions = np.full(len(mask), number // 2, np.int32)
        episode = {k: EPISODE[k] for k in ("turns", "count", "seconds", "error")} if number == 3 else {}
        rollouts.append(replace(one, logprobs_gen=numbers, versions=versions, episode=episode))
    return Group(number, 0, prompt, tuple(rollouts))


def train(journal: Journal, step: int, groups: Sequence[Group]) -> None:
    """Record a step on these groups, whose third rollouts the loss left out."""
    trained = [r for g in groups for r in g.rollouts[:2]]
    sequences = tuple(_sequence(r) for r in trained)
    counts = [int(r.sampled.sum()) for r in trained]
    tokens = {i: np.array([[0.25] * n, [1.5] * n], np.float16) for i, n in enumerate(counts)}
    journal.trained(step, Minibatch(tuple(groups)))
    journal.learned(step, groups, TrainBatch(step, sequences, {}), tokens)


def _sequence(one: Rollout) -> TrainSequence:
    weights = one.sampled.astype(np.float32)
    prompt, advantages = np.array([1, 2], np.int32), np.full(len(weights), one.reward / 2, np.float32)
    return TrainSequence(prompt, one.token_ids, one.logprobs_gen, one.versions, weights, advantages)


def opened(*folders: Path) -> list[RunState]:
    """The runs, with all of their journals read."""
    runs = [open_run(folder, folder.name) for folder in folders]
    for run in runs:
        run.rollouts.update(60.0)
    return runs


@contextmanager
def serving(runs: Sequence[RunState], token: str = "secret") -> Iterator[int]:
    """The server of these runs in a thread; its port."""
    from trainer.view.server import View, serve

    listener = socket.create_server(("127.0.0.1", 0))
    port, loop = listener.getsockname()[1], asyncio.new_event_loop()
    task = loop.create_task(serve(View(runs, token, port), listener))

    def work() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.run_until_complete(loop.shutdown_default_executor())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        loop.close()


def ask(port: int, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, answer and headers of a GET; JSON is read. Redirects are not followed."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, json.loads(text) if is_json else text, dict(answer.headers)
