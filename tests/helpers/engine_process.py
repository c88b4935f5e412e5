"""Starts an engine of either kind as the launcher does, and computes what its tests expect."""

import asyncio
import importlib.util
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import forked
import numpy as np
import pytest
import torch
from processes import alive as alive
from processes import descendants
from processes import wait_until_gone as wait_until_gone
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.config import Config
from trainer.engines.protocol import EngineClient
from trainer.launcher import supervisor as launcher
from trainer.messages import Abort, Event, Failed, Ready, Shutdown, Spans
from trainer.types import Completion, Request

START_S = 240  # a loaded machine, and vLLM
VOCAB = 67  # no multiple of anything
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.2,  # distributions far from uniform
    "max_position_embeddings": 8192,
}


def need_vllm() -> None:
    """Skip the test if vLLM is not installed; fail instead if SIGMOID_RL_REQUIRE_VLLM is set."""
    if importlib.util.find_spec("vllm") is None:
        if os.environ.get("SIGMOID_RL_REQUIRE_VLLM"):
            pytest.fail("SIGMOID_RL_REQUIRE_VLLM is set and vLLM is not installed")
        pytest.skip("vLLM is not installed (make test-vllm)")


def settings(model: str, run_dir: Path, kind: str, dtype: str = "float32", **engine: Any) -> Config:
    """A run on this model whose engine takes sequences of up to 4,000 tokens."""
    config = Config(run_dir=str(run_dir))
    return replace(
        config,
        model=replace(config.model, path=model, dtype=dtype),
        engine=replace(config.engine, kind=kind, **({"slots": 8, "max_new_tokens": 5952} | engine)),
    )


class EngineProcess:
    """An engine's process. Only one event loop may have a `client` of it at a time."""

    running: ClassVar[set["EngineProcess"]] = set()  # closed by a fixture if a test fails

    def __init__(self, config: Config, role: str = "engine", target: str = "", where: int | str = 1) -> None:
        self.role, self.version = role, 0
        self.spans: list[Spans] = []
        self.events: list[Event] = []
        self.failure: Failed | None = None
        (Path(config.run_dir) / "logs").mkdir(parents=True, exist_ok=True)
        self.log = Path(config.run_dir) / "logs" / f"{role}.log"
        context: Any = forked.CONTEXT if config.engine.kind == "torch" and not target else launcher.CONTEXT
        self.conn, theirs = launcher.CONTEXT.Pipe()
        self.telemetry, sender = launcher.CONTEXT.Pipe()
        args = (config, config.model.path, theirs, where, role)
        self.temporary = Path(tempfile.mkdtemp(prefix="engine-"))  # short enough for the paths of sockets
        env = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(self.temporary), **launcher.CPU_ENVIRONMENT}
        target = target or launcher.ENGINES[config.engine.kind]
        self.process = context.Process(
            target=launcher._role_entry,
            args=(os.getpid(), target, sender, args, str(self.log), env),
            name=role,
        )
        self.process.start()
        self.running.add(self)
        theirs.close()
        sender.close()
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ready(self) -> dict[str, Any]:
        """Wait until it can take work; fails with its error and log if it dies."""
        try:
            assert self.conn.poll(START_S), f"{self.role} did not start"
            message = self.conn.recv()
        except EOFError:
            self._listener.join(10)
            raise AssertionError(f"{self.role} died: {self.failure}\n{self.log.read_text()}") from None
        assert isinstance(message, Ready)
        return message.info

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        """A client of the engine in this event loop."""
        client = EngineClient(self.conn, self.role)
        try:
            yield client
        finally:
            asyncio.get_running_loop().remove_reader(self.conn.fileno())

    async def push(self, client: EngineClient, path: str) -> int:
        """Push the weights of this file under the next version, which is returned."""
        self.version += 1
        await client.update_weights(self.version, path)
        return self.version

    def processes(self) -> set[int]:
        """The ids of the process and of all its descendants."""
        assert self.process.pid is not None
        return descendants(self.process.pid)

    def close(self) -> None:
        """Ask it to end, and kill it if it does not."""
        self.running.discard(self)
        with suppress(OSError):
            self.conn.send(Shutdown())
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.conn.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _listen(self) -> None:
        try:
            while True:
                match message := self.telemetry.recv():
                    case Spans():
                        self.spans.append(message)
                    case Event():
                        self.events.append(message)
                    case Failed():
                        self.failure = message
        except (EOFError, OSError):
            pass


def request(name: str, prompt: Sequence[int], **changes: Any) -> Request:
    """A request for 12 tokens of one sample at T = 1, without stop ids."""
    plain = {"n": 1, "max_tokens": 12, "temperature": 1.0, "stop_ids": frozenset(), "seed": 5}
    return Request(name, tuple(prompt), **(plain | changes))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist())


async def generate(client: EngineClient, *requests: Request) -> dict[tuple[str, int], Completion]:
    """All completions of these requests, which run concurrently."""

    async def one(r: Request) -> list[Completion]:
        return [c async for ended in client.stream(r) for c in ended]

    done = await asyncio.gather(*(one(r) for r in requests))
    return {(c.request_id, c.index): c for completions in done for c in completions}


def abort(conn: Connection, *names: str) -> None:
    """Send what a client sends when it leaves its loop early; the caller still reads the completions."""
    conn.send(Abort(frozenset(names)))


def load(folder: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def perturb(model: PreTrainedModel, path: Path, seed: int = 1, scale: float = 0.3) -> str:
    """Change the model's weights and write them as the learner does: parameters by name, tied ones once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.mul_((1 + scale * noise).to(p.dtype))
    return write(model, path)


def write(model: PreTrainedModel, path: Path) -> str:
    save_file({k: v.detach().contiguous() for k, v in model.named_parameters()}, path)
    return str(path)


@torch.no_grad()
def teacher_forced(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], t: float = 1.0
) -> np.ndarray:
    """Log-probs of the tokens from one forward; the head's products in float64, of the body's own dtype."""
    hidden = model.get_decoder()(torch.tensor([[*prompt, *tokens]])).last_hidden_state
    logits = hidden[0, len(prompt) - 1 : -1].double() @ model.get_output_embeddings().weight.double().T
    return torch.log_softmax(logits / t, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


@torch.no_grad()
def stale_kv(
    old: PreTrainedModel, new: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], swap: int
) -> np.ndarray:
    """Log-probs of tokens[swap:] under `new`, where the keys of all that was fed before come from `old`."""
    fed = [*prompt, *tokens]
    cache = old(torch.tensor([fed[: len(prompt) + swap - 1]]), use_cache=True).past_key_values
    logits = new(
        torch.tensor([fed[len(prompt) + swap - 1 : -1]]), past_key_values=cache, use_cache=True
    ).logits
    chosen = torch.tensor(tokens[swap:])[:, None]
    return torch.log_softmax(logits[0].double(), -1).gather(1, chosen)[:, 0].numpy()


def assert_logprobs(c: Completion, model: PreTrainedModel, prompt: Sequence[int], t: float = 1.0) -> None:
    """The completion's log-probs are the model's, at this temperature."""
    expected = teacher_forced(model, prompt, c.token_ids.tolist(), t)
    np.testing.assert_allclose(c.logprobs_gen, expected, atol=2e-5)


def assert_swapped(
    c: Completion, old: PreTrainedModel, new: PreTrainedModel, prompt: Sequence[int], version: int
) -> int:
    """From this version on the tokens are of `new` with the keys of `old`; returns how many came before."""
    tokens, swap = c.token_ids.tolist(), int(np.argmax(c.versions == version))
    assert 0 < swap < len(tokens) - 4
    assert c.versions.tolist() == [version - 1] * swap + [version] * (len(tokens) - swap)
    np.testing.assert_allclose(c.logprobs_gen[:swap], teacher_forced(old, prompt, tokens[:swap]), atol=2e-5)
    np.testing.assert_allclose(c.logprobs_gen[swap:], stale_kv(old, new, prompt, tokens, swap), atol=2e-5)
    return swap
