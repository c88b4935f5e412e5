"""Tasksets of verifiers (0.4.0): its own rollout runs in the episode's process, and only the model elsewhere.

verifiers calls a model by HTTP. Here it calls this process, and the call waits until `step` brings the
model's turn. So its environments, harnesses, stops and rewards work as they are, and the ids of the tokens
are the engine's. Options are those of its `[env]` table: `{taskset: {id: my_tasks}, agent: {max_turns: 4}}`.
Needs `environment.network`.

    python -m trainer.environments.verifiers '{"taskset": {"id": "my_tasks"}}' > rows.jsonl
"""

import asyncio
import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.utils.loaders import default_harness_id, load_taskset, resolve_env_config

__all__ = ["Chat", "Verifiers", "rows"]
HARNESS = "sigmoid_rl_chat"  # verifiers imports a harness by its id, which has no dots
sys.modules[HARNESS] = sys.modules[__name__]
Message = dict[str, Any]


def rows(count: int = 4000, numbered: bool = False, **env: Any) -> Iterator[dict[str, Any]]:
    """The taskset's first tasks. `numbered`: the prompts begin with the task's number, as prompts must
    differ; a task without a prompt, whose environment speaks first, has the number alone."""
    for task in islice(load_taskset(resolve_env_config(env).taskset), count):
        first, *more = _prompt(task.data) or [{"role": "user", "content": ""}]
        if numbered or not first["content"]:
            first = first | {"content": f"{task.data.idx:04d}\n{first['content']}"}
        question = [first, *more] if more or first["role"] != "user" else first["content"]
        yield {"question": question, "task": task.data.model_dump(mode="json")}


def _prompt(data: vf.TaskData) -> list[Message]:
    """The messages that a task begins with."""
    system: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *map(message_to_wire, data.prompt or ())]


class Chat(NullHarness):
    """verifiers' harness `null`, chat with the taskset's MCP tools, without a program of its own to start."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Any) -> None:
        pass

    async def launch(  # the signature is verifiers'
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        messages, timeout = _prompt(data), aiohttp.ClientTimeout()  # the model takes its time
        specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack, aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            tools, names, servers = await connect_mcp({"mcpServers": specs}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with http.post(f"{endpoint}/chat/completions", json=body) as reply:
                    reply.raise_for_status()  # the rollout knows the cause
                    messages.append((await reply.json())["choices"][0]["message"])
                if not (calls := messages[-1].get("tool_calls")):
                    return ProgramResult(0, "", "")
                for call in calls:
                    content = await _tool(call["function"], names, servers)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _tool(call: Mapping[str, str], names: dict[str, Any], servers: dict[str, Any]) -> Any:
    """The result of a tool call, or one line on what is wrong with it, for the model."""
    if call["name"] not in names:
        return f"error: unknown tool {call['name']!r}"
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError as e:
        return f"error: the arguments are no JSON: {e}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(servers, names, call["name"], arguments)


class Verifiers:
    """An episode of one task. The servers that it needs go on in its process, for the next one."""

    _serving: tuple[vf.Env[Any], Any, AsyncExitStack] | None = None
    _now: "Verifiers"  # whose turn the model is asked for

    def __init__(self, **env: Any) -> None:
        self._options = env
        self._requests = asyncio.Queue[tuple[Message, asyncio.Future[Message]]]()
        self._traces: list[Any] = []
        self._last = False

    @staticmethod
    def prepare(**env: Any) -> vf.Env[Any]:
        """verifiers' environment. Agents without a harness chat; without a runtime they are here."""
        config = resolve_env_config(env)
        for agent in agent_config_fields(config).values():
            if agent.harness is None and default_harness_id(config.taskset.id) == "bash":
                agent.harness = vf.HarnessConfig(id=HARNESS)
            if "runtime" not in agent.model_fields_set:
                agent.runtime = SubprocessConfig()
        return vf.load_environment(config)

    async def start(self, row: dict[str, Any]) -> tuple[list[Message], list[Any]]:
        Verifiers._now = self
        Verifiers._serving = Verifiers._serving or await _serve(self.prepare(**self._options))
        env, client, _ = Verifiers._serving
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(row["task"]), env.config.taskset.task)
        self._known = _prompt(task.data)
        context = vf.ModelContext(model="policy", client=client)
        self._run = asyncio.create_task(env.run_episode(task, context, on_trace=self._traces.append))
        if (new := await self._next()) is None:
            self._reward()
            raise ValueError("verifiers' run ended before the model's first turn")
        return new, self._tools

    async def step(self, message: Message) -> tuple[list[Message], float | None, bool]:
        calls = enumerate(message.get("tool_calls", ()))
        turn = {k: v for k, v in message.items() if k in ("role", "content", "reasoning_content")}
        if "tool_calls" in message:
            turn["tool_calls"] = [{"id": f"call-{len(self._known)}-{i}", **call} for i, call in calls]
        self._last = message["last"]
        self._known.append(turn)
        self._answer.set_result(turn)
        new = await self._next()
        return ([], self._reward(), True) if new is None else (new, None, False)

    async def close(self) -> None:
        self._run.cancel()
        await asyncio.wait([self._run])
        self._answer.cancel()

    async def complete(self, request: Message) -> Message | None:
        """The model's turn, once `step` brings it. After the last one there is none: verifiers then ends the
        run and scores it."""
        if self._last:
            for trace in self._traces:
                trace.stop("trainer_limit")
            return None
        answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((request, answer))
        turn: Message = await answer
        return turn

    async def _next(self) -> list[Message] | None:
        """The messages behind the ones that are known, once the model is called; None at the run's end."""
        waiting = asyncio.ensure_future(self._requests.get())
        await asyncio.wait((waiting, self._run), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            return None
        body, self._answer = waiting.result()
        messages, known = body["messages"], self._known
        if [*map(_said, messages[: len(known)])] != [*map(_said, known)]:
            raise ValueError("the harness rewrote the conversation or began another; expected one that grows")
        self._known, self._tools = messages, body.get("tools", [])
        return [message | {"content": _text(message)} for message in messages[len(known) :]]

    def _reward(self) -> float | None:
        """The sum of the weighted rewards; None if nothing was scored. An episode that failed raises."""
        episode = self._run.result()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not ok")
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        values = [reward.value for trace in traces for reward in trace.rewards.values() if reward is not None]
        return sum(values) if values else None


async def _serve(env: vf.Env[Any]) -> tuple[vf.Env[Any], Any, AsyncExitStack]:
    """The environment with its servers, and the model that it is to call: this process."""
    path, stack = f"/{secrets.token_urlsafe()}/v1", AsyncExitStack()
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post(f"{path}/chat/completions", _complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}{path}")
    await stack.enter_async_context(env.serving())
    return env, client, stack


async def _complete(request: web.Request) -> web.Response:
    body = await request.json()
    if (turn := await Verifiers._now.complete(body)) is None:
        return web.json_response({"error": {"message": "no further turn"}}, status=400)
    reason = "tool_calls" if "tool_calls" in turn else "stop"
    choice = {"index": 0, "message": turn, "finish_reason": reason}
    head = {"id": "0", "object": "chat.completion", "created": 0, "model": body["model"]}
    return web.json_response({**head, "choices": [choice]})


def _text(message: Message) -> Any:
    """The content, whose parts of text are joined."""
    content = message.get("content") or ""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _said(message: Message) -> tuple[str, Any]:
    return message["role"], _text(message)


if __name__ == "__main__":
    for row in rows(**json.loads(sys.argv[1])):
        print(json.dumps(row))
