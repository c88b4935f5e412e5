"""A vLLM server on another machine as an engine: it takes our messages and calls vLLM's HTTP routes.

Weights are uploaded as the safetensors file that the learner has written, or come by NCCL. No wait is
endless: calls that control the server have a deadline, and a generation may last as long as GET /health is
answered.
"""

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

import httpx2
import numpy as np

from trainer.config import Config, ConfigError
from trainer.engines.backend import weight_files
from trainer.engines.vllm.engine import SECRET, with_rank_offset
from trainer.engines.vllm.process import VLLM, Sample, run_vllm
from trainer.messages import Event
from trainer.roles import role_index
from trainer.telemetry import send
from trainer.types import Completion

HEALTH_TIMEOUT_S = 15.0  # without an answer to GET /health for so long, the server or the link is dead
CHUNK_BYTES = 4 << 20  # of an upload


def engine_main(
    config: Config, model_dir: str, conn: Connection, url: str, role: str, telemetry: Connection
) -> None:
    """Entry of the spawned process `role`; returns on Shutdown or when the controller is dead."""

    async def start() -> tuple[RemoteVLLM, dict[str, Any]]:
        vllm = RemoteVLLM(url, role, config)
        try:
            end = time.monotonic() + config.pipeline.deadline_s / 2
            if not await vllm.answers():
                text = f"waiting for the server of {role} at {url}"
                send(telemetry, Event("note", time.monotonic(), {"text": text}))
                while time.monotonic() < end and not await vllm.answers():  # it may start with the run
                    await asyncio.sleep(1)
            await vllm.connect()
            if config.engine.weight_push == "nccl":
                await vllm.transfer("shutdown_weight_transfer_engine", {})  # of an earlier run
            else:
                await vllm.load(0, *weight_files(model_dir))
            await vllm.resume()
        except BaseException:
            await vllm.close()
            raise
        return vllm, {"kind": "vllm", "dtype": config.model.dtype, "url": url}

    run_vllm(role, conn, telemetry, config.engine.slots, start)


class RemoteVLLM(VLLM):
    """One server."""

    def __init__(self, url: str, role: str, config: Config) -> None:
        self.limit, self._label = 0, f"{role} at {url.rstrip('/')}"
        self._engine, self._index = config.engine, role_index(role)
        self._deadline_s = config.pipeline.deadline_s
        self._health_timeout_s = min(HEALTH_TIMEOUT_S, self._deadline_s / 2)
        self._http = httpx2.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {os.environ.get(SECRET, '')}"},
            timeout=httpx2.Timeout(None, connect=self._health_timeout_s),
            # A connection per call: the server may close an idle one just as we use it again.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def answers(self) -> bool:
        """True if a server listens at the URL."""
        with suppress(httpx2.HTTPError, TimeoutError):
            await self._health()
            return True
        return False

    async def _health(self) -> int:
        """The status that the server answers in time."""
        return (await asyncio.wait_for(self._http.get("/health"), self._health_timeout_s)).status_code

    async def connect(self) -> None:
        """Check that the server accepts our secret, and abort what an earlier run has left on it."""
        models = await self._call("GET", "/v1/models")
        self.limit = int(models["data"][0]["max_model_len"])
        await self._call("POST", "/abort_requests", json={})
        await self._call("POST", "/pause", params={"mode": "abort", "clear_cache": "true"})

    async def sample(self, sample: Sample, salt: int) -> Completion:
        body = {
            "request_id": sample.id,
            "token_ids": list(sample.request.prompt_ids),
            "cache_salt": f"v{salt}",
            "sampling_params": sample.parameters,
        }
        answer = await self._call("POST", "/inference/v1/generate", json=body, has_deadline=False)
        (choice,) = answer["choices"]
        entries = (choice["logprobs"] or {}).get("content") or ()
        logprobs = np.asarray([entry["logprob"] for entry in entries], np.float32)
        logprobs[logprobs <= -9999] = -np.inf  # the server writes −9999 for −inf and NaN: JSON has neither
        spans = [(span["start"], span["end"], span["version"]) for span in choice["weight_versions"] or ()]
        positions = [at for at in answer.get("prompt_logprobs") or () if at]
        prompt_logprobs = [{int(i): x["logprob"] for i, x in at.items()} for at in positions]
        ids, reason = choice["token_ids"] or (), choice["finish_reason"]
        experts = None  # in numpy's file format
        if encoded := choice.get("routed_experts"):
            experts = np.load(BytesIO(base64.b64decode(encoded)))
        return sample.completion(ids, logprobs, spans, reason, prompt_logprobs, experts)

    async def abort(self, sample_ids: Iterable[str]) -> None:
        if ids := [f"generate-tokens-{sample}" for sample in sample_ids]:  # the server adds this prefix
            await self._call("POST", "/inference/v1/abort_requests", json={"request_ids": ids})

    async def pause(self, free_gpu: bool) -> None:
        """A server does not share its GPUs with the learner."""
        await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})

    async def resume(self, free_gpu: bool = False) -> None:
        await self._call("POST", "/resume")

    async def transfer(self, call: str, info: dict[str, Any]) -> None:
        """vLLM's routes have the names of the calls."""
        bodies = {
            "init_weight_transfer_engine": {"init_info": with_rank_offset(info, self._engine, self._index)},
            "update_weights": {"update_info": info},
        }
        await self._call("POST", f"/{call}", json=bodies.get(call, {}))

    async def load(self, version: int, *paths: str) -> None:
        if paths:
            await self._call("POST", "/start_weight_update")
            for path in paths:
                remote_path = (await self._call("PUT", "/weights", content=_chunks(path)))["path"]
                await self._call("POST", "/update_weights", json={"update_info": {"path": remote_path}})
            await self._call("POST", "/finish_weight_update", json={})
        await self._call("POST", "/update_weight_version", json={"new_version": str(version)})

    async def check(self) -> dict[str, float]:
        try:
            status = await self._health()
        except (httpx2.HTTPError, TimeoutError) as e:
            raise RuntimeError(
                f"{self._label} has not answered for {self._health_timeout_s:g} s ({_reason(e)}); check that "
                "the server runs and that the network reaches it"
            ) from e
        if status != 200:
            raise RuntimeError(f"{self._label}: its engine has died (health {status}); see its log")
        return {}

    async def close(self) -> None:
        """Close the connections; the server aborts their requests and keeps running."""
        await self._http.aclose()

    async def _call(self, method: str, route: str, has_deadline: bool = True, **content: Any) -> Any:
        """Call a route and return its answer; errors name the engine and its URL."""
        try:
            async with asyncio.timeout(self._deadline_s if has_deadline else None):
                answer = await self._http.request(method, route, **content)
        except (httpx2.HTTPError, TimeoutError) as e:
            if self.limit:
                raise RuntimeError(f"{self._label}: {method} {route} failed ({_reason(e)})") from e
            raise ConfigError(
                f"{self._label} cannot be reached ({_reason(e)}); expected a server started by `python -m "
                "trainer.engines.vllm_server` at this address of engine.urls"
            ) from e
        if answer.status_code == 401:
            raise ConfigError(f"{self._label} refuses ${SECRET}; set the same secret on both machines")
        if answer.status_code != 200:
            text = " ".join(answer.text.split())[:300]
            raise RuntimeError(f"{self._label}: {method} {route} answered {answer.status_code}: {text}")
        return json.loads(answer.content) if answer.content else None


async def _chunks(path: str) -> AsyncIterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
