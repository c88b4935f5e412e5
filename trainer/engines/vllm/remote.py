"""A vLLM server elsewhere as an engine: our messages on this side, vLLM's HTTP routes on the other.

Weights are uploaded as the safetensors file that the learner has published, or come by NCCL. No wait is
without an end: what controls the server has a deadline, and a generation lasts as long as the server answers
GET /health.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from trainer.config import Config, ConfigError
from trainer.engines.vllm.engine import first_rank, name, parameters, ranked
from trainer.engines.vllm.process import Sample, run
from trainer.messages import Event
from trainer.roles import role_index
from trainer.telemetry import send
from trainer.types import Completion, FinishReason, Request

SECRET = "SIGMOID_RL_SECRET"
SILENCE_S = 15.0  # without an answer to GET /health, the server or the link to it is held to be gone
CHUNK = 4 << 20  # bytes of an upload at a time
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def engine_main(
    config: Config, model_dir: str, conn: Connection, url: str, role: str, telemetry: Connection
) -> None:
    """Entry of the spawned process; returns on Shutdown or when the controller is gone."""

    async def start() -> tuple[Remote, dict[str, Any]]:
        first = first_rank(config.engine, role_index(role))
        backend = Remote(url, role, config.pipeline.deadline_s, first)
        try:
            if not await backend.answers():
                text = f"waiting for the server of {role} at {url}"
                send(telemetry, Event("note", time.monotonic(), {"text": text}))
                await backend.wait()
            await backend.meet()
            if config.engine.weight_push == "nccl":
                await backend.forget_transfer()
                await backend.resume()
            else:
                await backend.load_files(sorted(Path(model_dir).glob("*.safetensors")), 0)
        except BaseException:
            await backend.close()
            raise
        return backend, {"kind": "vllm", "dtype": config.model.dtype, "url": url}

    run(role, conn, telemetry, config.engine.slots, start)


class Remote:
    """One server; see vllm_serve.Backend."""

    def __init__(self, url: str, role: str, deadline_s: float, first_rank: int = 1) -> None:
        self.url, self.role, self.limit = url.rstrip("/"), role, 0
        self._first_rank = first_rank
        self._deadline_s = deadline_s
        self._silence_s = min(SILENCE_S, deadline_s / 2)
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {os.environ.get(SECRET, '')}"},
            timeout=httpx2.Timeout(None, connect=self._silence_s),
            # A connection each: an idle one may be closed by the server just as it is used again.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def answers(self) -> bool:
        """Whether something listens there."""
        try:
            await asyncio.wait_for(self._http.get("/health"), self._silence_s)
        except (httpx2.HTTPError, TimeoutError):
            return False
        return True

    async def wait(self) -> None:
        """Until the server answers, for half of the deadline: it may be starting together with the run."""
        until = time.monotonic() + self._deadline_s / 2
        while time.monotonic() < until and not await self.answers():
            await asyncio.sleep(1)

    async def meet(self) -> None:
        """Check that it is there and ours, and clear away what an earlier run has left there."""
        models = await self._call("GET", "/v1/models")
        self.limit = int(models["data"][0]["max_model_len"])
        await self._call("POST", "/abort_requests", json={})
        await self._call("POST", "/pause", params={"mode": "abort", "clear_cache": "true"})

    async def sample(self, request: Request, index: int, version: int) -> Completion:
        """See Backend."""
        body = {
            "request_id": name((request.request_id, index)),
            "token_ids": list(request.prompt_ids),
            "cache_salt": f"v{version}",
            "sampling_params": parameters(request, index),
        }
        answer = await self._call("POST", "/inference/v1/generate", json=body, limited=False)
        (choice,) = answer["choices"]
        ids = np.asarray(choice["token_ids"] or (), np.int32)
        entries = (choice["logprobs"] or {}).get("content") or ()
        logprobs = np.asarray([entry["logprob"] for entry in entries], np.float32)
        logprobs[logprobs <= -9999] = -np.inf  # vLLM's word for no number, which JSON lacks
        versions = np.zeros(len(ids), np.int32)
        for span in choice["weight_versions"] or ():
            versions[span["start"] : span["end"]] = int(span["version"])
        if choice["finish_reason"] not in REASONS or len(ids) != len(logprobs):
            raise RuntimeError(
                f"{self._who} ended {request.request_id} with {choice['finish_reason']!r}, {len(ids)} tokens "
                f"and {len(logprobs)} log-probs; expected {', '.join(REASONS)} and one log-prob a token"
            )
        reason = REASONS[choice["finish_reason"]]
        return Completion(request.request_id, index, ids, logprobs, versions, reason)

    async def abort(self, samples: Iterable[Sample]) -> None:
        """See Backend."""
        ids = [f"generate-tokens-{name(s)}" for s in samples]  # as the server calls them
        if ids:
            await self._call("POST", "/inference/v1/abort_requests", json={"request_ids": ids})

    async def pause(self) -> None:
        """See Backend."""
        await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})

    async def resume(self) -> None:
        """See Backend."""
        await self._call("POST", "/resume")

    async def sleep(self) -> None:
        """See Backend; its GPUs are its own."""
        await self.pause()

    async def wake(self) -> None:
        """See Backend."""
        await self.resume()

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """See Backend; vLLM's routes bear the names of the calls."""
        bodies = {
            "init_weight_transfer_engine": {"init_info": ranked(info, self._first_rank)},
            "update_weights": {"update_info": info},
        }
        await self._call("POST", f"/{call}", json=bodies.get(call, {}))

    async def forget_transfer(self) -> None:
        """Leave the group over which an earlier run has sent its weights."""
        await self._call("POST", "/shutdown_weight_transfer_engine")

    async def load(self, version: int, path: str) -> None:
        """See Backend."""
        if path:
            await self._send([Path(path)])
        await self._call("POST", "/update_weight_version", json={"new_version": str(version)})

    async def load_files(self, paths: list[Path], version: int) -> None:
        """All of a checkpoint's files, and then go on."""
        await self._send(paths)
        await self._call("POST", "/update_weight_version", json={"new_version": str(version)})
        await self.resume()

    async def check(self) -> None:
        """See Backend."""
        try:
            answer = await asyncio.wait_for(self._http.get("/health"), self._silence_s)
        except (httpx2.HTTPError, TimeoutError) as e:
            raise RuntimeError(
                f"{self._who} has not answered for {self._silence_s:g} s ({_why(e)}); is the server "
                "alive, and the network between?"
            ) from e
        if answer.status_code != 200:
            raise RuntimeError(f"{self._who}: its engine has died (health {answer.status_code}); see its log")

    async def close(self) -> None:
        """End the connections; the server aborts what was theirs, and stays."""
        await self._http.aclose()

    async def _send(self, paths: list[Path]) -> None:
        await self._call("POST", "/start_weight_update")
        for path in paths:
            there = (await self._call("PUT", "/weights", content=_chunks(path)))["path"]
            await self._call("POST", "/update_weights", json={"update_info": {"path": there}})
        await self._call("POST", "/finish_weight_update", json={})

    async def _call(self, method: str, route: str, limited: bool = True, **content: Any) -> Any:
        """The answer of a route, by the deadline unless it is a generation's; errors name engine and URL."""
        try:
            async with asyncio.timeout(self._deadline_s if limited else None):
                answer = await self._http.request(method, route, **content)
        except (httpx2.HTTPError, TimeoutError) as e:
            if self.limit:
                raise RuntimeError(f"{self._who}: {method} {route} failed ({_why(e)})") from e
            raise ConfigError(
                f"{self._who} cannot be reached ({_why(e)}); expected a server started by `python -m "
                "trainer.engines.vllm.server` at that address of engine.urls"
            ) from e
        if answer.status_code == 401:
            raise ConfigError(f"{self._who} refuses ${SECRET}; set the same secret here and there")
        if answer.status_code != 200:
            text = " ".join(answer.text.split())[:300]
            raise RuntimeError(f"{self._who}: {method} {route} answered {answer.status_code}: {text}")
        return json.loads(answer.content) if answer.content else None

    @property
    def _who(self) -> str:
        return f"{self.role} at {self.url}"


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
