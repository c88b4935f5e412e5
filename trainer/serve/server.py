"""The server's process, in the place of the controller: engine pool, weights of a live run, HTTP."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

from trainer.config import Config, ConfigError
from trainer.controller.controller import Emit
from trainer.controller.deadline import Deadline
from trainer.controller.process import note, run_controller, until_stopped
from trainer.engines.pool import EnginePool
from trainer.engines.protocol import EngineClient
from trainer.roles import role_name
from trainer.run_folder import latest
from trainer.serve.body import Served
from trainer.serve.endpoint import Endpoint
from trainer.serve.routes import Routes
from trainer.serve.scores import score

LOOK_S = 2.0  # between two looks for a new checkpoint
CLOSE_S = 5.0  # for running requests to end once the server is to stop


def serve_main(
    config: Config, model_dir: str, engine_conns: Sequence[Connection], learner: None, start: dict[str, Any],
    telemetry: Connection,
) -> None:  # fmt: skip
    """Entry of the spawned process, as that of the controller. `start`: the `endpoint`."""
    endpoint: Endpoint = start["endpoint"]

    async def work(stack: ExitStack, emit: Emit) -> None:
        clients = [EngineClient(conn, role_name("engine", i)) for i, conn in enumerate(engine_conns)]
        deadline = Deadline(config.pipeline.deadline_s, config.pipeline.start_deadline_s)
        pool = stack.enter_context(closing(EnginePool(clients, deadline.wait_for, partial(note, emit))))
        listener = stack.enter_context(_listen(endpoint))
        served = describe(config, model_dir, endpoint.name, pool)
        for info in await pool.ready():
            emit("ready", {"engine": info})
        await pool.update_weights(endpoint.version, "")
        runner = await start_http(Routes(served).application(endpoint.token), listener)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        note(emit, f"serving {endpoint.name} at {url}")
        scoring = endpoint.scoring
        serving = score(scoring, endpoint, url, pool) if scoring else _follow(endpoint, pool, emit)
        await until_stopped(serving, telemetry, pool)
        await runner.cleanup()
        emit("done", {})

    run_controller(telemetry, work)


async def start_http(application: web.Application, listener: socket.socket) -> web.AppRunner:
    """Serve on this socket until the runner's `cleanup`. Handlers are cancelled when their client leaves."""
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner


def _listen(endpoint: Endpoint) -> socket.socket:
    """The socket; ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        return socket.create_server((endpoint.host, endpoint.port), family=family)
    except (OSError, OverflowError) as e:
        where = f"--host {endpoint.host} --port {endpoint.port}"
        raise ConfigError(f"{where}: {getattr(e, 'strerror', e)}; give another --port, or --host") from e


def describe(config: Config, model_dir: str, name: str, pool: EnginePool) -> Served:
    """The model in `model_dir`, with the longest sequence that its engines take."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoConfig.from_pretrained(model_dir).get_text_config()
    texts = tuple(tokenizer.batch_decode([[i] for i in range(model.vocab_size)]))
    prompt = max(one.data.max_prompt_tokens for one in config.scored.values())
    length = min(model.max_position_embeddings, prompt + config.engine.longest_completion())

    @lru_cache(maxsize=256)
    def tokens_with(text: str) -> frozenset[int]:
        return frozenset(i for i, token in enumerate(texts) if text in token)

    return Served(name, pool, tokenizer, texts, tokens_with, length, config.data.chat_options)


async def _follow(endpoint: Endpoint, pool: EnginePool, emit: Emit) -> None:
    """Serve each newer checkpoint of the run once it is complete. Running requests go on with its weights."""
    version = endpoint.version
    while True:
        await asyncio.sleep(LOOK_S)
        newest = latest(endpoint.run) if endpoint.run else None
        if newest and (step := int(newest.name.removeprefix("step-"))) > version:
            await pool.update_weights(step, str(newest))
            version = step
            note(emit, f"serving step {step} from now on")
