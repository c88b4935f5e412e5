"""Promises of `python -m trainer.serve`: the engine's own ids and log-probs, its errors, and whose it is."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from engine_process import EngineProcess, generate, load, request, settings, teacher_forced
from helpers.logs import reading_of
from small import CHARS, MAIN, Begin, fork_roles, make_model, metrics, run
from transformers import AutoTokenizer

from trainer.config import ConfigError
from trainer.controller.deadline import Deadline
from trainer.engines.pool import EnginePool
from trainer.engines.protocol import EngineClient
from trainer.jsonl import read_lines
from trainer.messages import Abort
from trainer.run_folder import checkpoints
from trainer.serve.__main__ import main
from trainer.serve.answers import cut, id_choice
from trainer.serve.endpoint import Endpoint, plan
from trainer.serve.routes import Routes
from trainer.serve.server import describe, start_http
from trainer.types import Completion

TOKEN = {"Authorization": "Bearer secret"}
EOS = 0
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}+{% endfor %}{% if last is defined %}{{ last }}{% endif %}"
)
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
Ask = Callable[..., Awaitable[tuple[int, Any]]]  # (route, body or None, headers) -> status, JSON


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("served")
    model = make_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    config = settings(str(model), folder, "torch", slots=4, max_new_tokens=4000)
    process = EngineProcess(replace(config, data=replace(config.data, max_prompt_tokens=96)))
    process.config = process_config = replace(config, data=replace(config.data, max_prompt_tokens=96))  # type: ignore[attr-defined]
    assert process.ready()["kind"] == "torch" and process_config
    yield process
    process.close()


@asynccontextmanager
async def serving(engine: EngineProcess) -> AsyncIterator[tuple[Ask, EngineClient]]:
    """The server over this engine, as its process runs it; and the engine itself."""
    config = engine.config  # type: ignore[attr-defined]
    async with engine.client() as client, aiohttp.ClientSession() as session:
        pool = EnginePool([client], Deadline(60, 60).wait_for)
        served = describe(config, config.model.path, "small", pool)
        runner = await start_http(
            Routes(served).application("secret"), listener := socket.create_server(("127.0.0.1", 0))
        )

        async def ask(route: str, body: Any = None, headers: dict[str, str] = TOKEN) -> tuple[int, Any]:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}{route}"
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            async with session.request(
                "GET" if body is None else "POST", url, data=data, headers=headers
            ) as r:
                return r.status, await r.json()

        try:
            yield ask, client
        finally:
            await runner.cleanup()


def test_ids_in_ids_and_logprobs_out_are_the_engines_own(engine: EngineProcess) -> None:
    async def both() -> None:
        async with serving(engine) as (ask, client):
            for t, seed, n in ((0, 3, 1), (1.0, 4, 1), (0.7, 5, 3)):
                prompt, stops = (3, 12, 5, 13), frozenset({EOS, 9})
                changes = {"n": n, "temperature": t, "seed": seed, "max_tokens": 25, "stop_ids": stops}
                own = await generate(client, request("own", prompt, **changes))
                parameters = {"n": n, "temperature": t, "seed": seed, "max_tokens": 25, "stop_token_ids": [9]}
                body = {
                    "model": "small",
                    "token_ids": prompt,
                    "sampling_params": parameters | {"logprobs": 1},
                }
                status, answer = await ask(GENERATE, body | {"cache_salt": "v1", "priority": 0})
                assert status == 200 and len(answer["choices"]) == n
                for i, choice in enumerate(answer["choices"]):
                    c, content = own["own", i], choice["logprobs"]["content"]
                    assert choice["index"] == i and choice["token_ids"] == c.token_ids.tolist()
                    assert [x["logprob"] for x in content] == c.logprobs_gen.tolist()
                    assert [x["token"] for x in content] == [f"token_id:{j}" for j in choice["token_ids"]]
                    assert choice["finish_reason"] == c.finish_reason
                assert answer["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in own.values())

    asyncio.run(both())


def test_completions_and_chat_are_the_text_of_the_same_ids(engine: EngineProcess) -> None:
    async def all_of() -> None:
        async with serving(engine) as (ask, client):
            tokenizer = AutoTokenizer.from_pretrained(engine.config.model.path)  # type: ignore[attr-defined]
            stops = frozenset({EOS})
            texts = ("1+2=", "33")
            ids = [tokenizer.encode(text) for text in texts]
            own = await generate(
                client,
                *(
                    request(t, i, temperature=0, max_tokens=16, stop_ids=stops)
                    for t, i in zip(texts, ids, strict=True)
                ),
            )
            body = {"temperature": 0, "logprobs": 1, "return_token_ids": True}
            for prompts in (list(texts), ids):
                status, answer = await ask(COMPLETIONS, body | {"prompt": prompts})
                assert status == 200
                for text, choice in zip(texts, answer["choices"], strict=True):
                    c = own[text, 0]
                    assert choice["token_ids"] == c.token_ids.tolist()
                    assert choice["prompt_token_ids"] == tokenizer.encode(text)
                    assert choice["text"] == tokenizer.decode(c.token_ids, skip_special_tokens=True)
                    scores = choice["logprobs"]
                    assert scores["token_logprobs"] == c.logprobs_gen.tolist()
                    pairs = zip(scores["tokens"], scores["token_logprobs"], strict=True)
                    assert scores["top_logprobs"] == [{token: x} for token, x in pairs]
                    assert "".join(scores["tokens"]).startswith(choice["text"])
            text, c = answer["choices"][0]["text"], own[texts[0], 0]
            stop = text[5:7]
            status, cut_off = await ask(COMPLETIONS, body | {"prompt": texts[0], "stop": [stop, "zz"]})
            (choice,) = cut_off["choices"]
            assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
            assert choice["logprobs"]["token_logprobs"] == c.logprobs_gen.tolist()[: text.index(stop)]

            parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+2"}]
            conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": "3"}]
            options = {"chat_template_kwargs": {"last": "7="}}
            rendered = tokenizer.encode("1+2+3+7=")
            changes = {"temperature": 0, "max_tokens": 9, "stop_ids": stops}
            own = await generate(client, request("chat", rendered, **changes))
            status, answer = await ask(
                CHAT,
                {"messages": conversation, "max_completion_tokens": 9, "temperature": 0, "logprobs": True}
                | options,
            )
            (choice,), c = answer["choices"], own["chat", 0]
            assert status == 200 and answer["object"] == "chat.completion"
            assert choice["message"] == {
                "role": "assistant",
                "content": tokenizer.decode(c.token_ids, skip_special_tokens=True),
            }
            assert [x["logprob"] for x in choice["logprobs"]["content"]] == c.logprobs_gen.tolist()

    asyncio.run(all_of())


def test_an_echoed_prompt_has_the_log_probs_of_its_tokens(engine: EngineProcess) -> None:
    """As lm-eval asks: ids, a token more, temperature 0."""

    async def echoed() -> None:
        async with serving(engine) as (ask, client):
            config = engine.config  # type: ignore[attr-defined]
            model = load(config.model.path)
            prompts = [[3, 12, 5, 13, 9], [7, 2]]
            body = {
                "prompt": prompts,
                "temperature": 0,
                "max_tokens": 1,
                "logprobs": 1,
                "echo": True,
                "seed": 1234,
            }
            status, answer = await ask(COMPLETIONS, body)
            assert status == 200
            for prompt, choice in zip(prompts, answer["choices"], strict=True):
                scores = choice["logprobs"]
                own = await generate(client, request("own", prompt, temperature=0, max_tokens=1))
                whole = [*prompt, *own["own", 0].token_ids.tolist()]
                expected = teacher_forced(model, prompt[:1], whole[1:])
                assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
                np.testing.assert_allclose(scores["token_logprobs"][1:], expected, atol=2e-5)
                assert [len(scores[name]) for name in ("tokens", "top_logprobs", "text_offset")] == [
                    len(whole)
                ] * 3
                assert "".join(scores["tokens"]) == choice["text"]
                for place, top in list(enumerate(scores["top_logprobs"]))[1:]:
                    best = max(top, key=lambda token: top[token])
                    logits = model(torch.tensor([whole[:place]])).logits[0, -1]
                    assert best == CHARS[int(logits.argmax())]
                    assert top[CHARS[whole[place]]] == scores["token_logprobs"][place]
            plain = await ask(COMPLETIONS, {"prompt": "1+1=", "echo": True, "n": 2, "max_tokens": 3})
            assert all(choice["text"].startswith("1+1=") for choice in plain[1]["choices"])

    asyncio.run(echoed())


def test_who_lacks_the_token_learns_nothing(engine: EngineProcess) -> None:
    async def refused() -> None:
        async with serving(engine) as (ask, _):
            for headers in (
                {},
                {"Authorization": "Bearer secre"},
                {"Authorization": "secret"},
                {"X": "Bearer secret"},
            ):
                for route, body in (
                    ("/v1/models", None),
                    (GENERATE, {}),
                    (COMPLETIONS, {}),
                    (CHAT, {}),
                    ("/x", None),
                ):
                    status, answer = await ask(route, body, headers)
                    assert status == 401 and answer["error"]["type"] == "invalid_request_error"
            status, answer = await ask("/v1/models")
            assert status == 200 and answer["data"][0]["id"] == "small"
            assert answer["data"][0]["max_model_len"] == 4096  # 96 + 4000, below the model's positions

    asyncio.run(refused())


PLAIN: dict[str, Any] = {"prompt": "1", "max_tokens": 2}
BAD: list[tuple[str, Any, int, str]] = [
    (COMPLETIONS, b"{", 400, "no JSON"),
    (COMPLETIONS, b"\xff", 400, "no JSON"),
    (COMPLETIONS, b"[" * 100_000, 400, "no JSON"),
    (COMPLETIONS, [], 400, "JSON object"),
    (COMPLETIONS, {}, 400, "prompt is missing"),
    (COMPLETIONS, {"prompt": 1}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "0 tokens"),
    (COMPLETIONS, {"prompt": []}, 400, "0 tokens"),
    (COMPLETIONS, {"prompt": ["1", 2]}, 400, "given 2"),
    (COMPLETIONS, {"prompt": [99]}, 400, "0 to 15, given 99"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "given -1"),
    (COMPLETIONS, {"prompt": [True]}, 400, "given True"),
    (COMPLETIONS, PLAIN | {"stop_token_ids": [16]}, 400, "given 16"),
    (COMPLETIONS, PLAIN | {"max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, PLAIN | {"max_tokens": 4096}, 400, "together at most 4096"),
    (COMPLETIONS, PLAIN | {"temperature": -1}, 400, "temperature"),
    (COMPLETIONS, b'{"prompt": "1", "temperature": NaN}', 400, "temperature"),
    (COMPLETIONS, b'{"prompt": "1", "temperature": 1e999}', 400, "temperature"),
    (COMPLETIONS, PLAIN | {"seed": 2**63}, 400, "seed"),
    (COMPLETIONS, PLAIN | {"n": 1025}, 400, "1024 completions"),
    (COMPLETIONS, PLAIN | {"stop": [""]}, 400, "expected texts"),
    (COMPLETIONS, PLAIN | {"echo": True, "logprobs": 0, "n": 2}, 400, "n = 1"),
    (COMPLETIONS, PLAIN | {"logprobs": 5}, 400, "logprobs"),
    (COMPLETIONS, PLAIN | {"stream": True}, 400, "stream"),
    (COMPLETIONS, PLAIN | {"top_p": 0.9}, 400, "top_p"),
    (COMPLETIONS, PLAIN | {"new": 1}, 400, "new"),
    (COMPLETIONS, PLAIN | {"model": "other"}, 404, "small"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"stop": ["1"]}}, 400, "stop"),
    (GENERATE, {"token_ids": "1"}, 400, "token_ids"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "role and content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "role and content"),
    (CHAT, {"messages": [], "chat_template_kwargs": {"chat_template": "x"}}, 400, "the model's template"),
    (CHAT, {"messages": ["1"]}, 400, "role and content"),
    (CHAT, {"messages": [], "chat_template_kwargs": {"messages": 3}}, 400, "chat template"),
    (GENERATE, {"token_ids": [1], "sampling_params": [1]}, 400, "sampling_params"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"prompt": "1"}}, 400, "prompt"),
    ("/v1/other", {}, 404, "Not Found"),
    ("/v1/models", {}, 405, "Not Allowed"),
    (COMPLETIONS, b" " * (33 << 20), 413, "Too Large"),
]


def test_bad_input_is_named_and_harms_no_engine(engine: EngineProcess) -> None:
    async def each() -> None:
        async with serving(engine) as (ask, _):
            for route, body, code, text in BAD:
                status, answer = await ask(route, body)
                assert (status, answer.keys()) == (code, {"error"}), (body, answer)
                assert text in answer["error"]["message"], (body, answer)
                assert len(answer["error"]["message"]) <= 500
            neutral = {"stream": False, "top_p": 1.0, "top_k": -1, "seed": None, "user": "me"}
            assert (await ask(COMPLETIONS, PLAIN | neutral))[0] == 200

    asyncio.run(each())


def test_a_client_that_leaves_ends_its_request(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave() -> None:
        async with serving(engine) as (ask, client):
            sent: list[object] = []
            send = client._send
            monkeypatch.setattr(client, "_send", lambda message: (sent.append(message), send(message)))
            long = {"token_ids": [3], "sampling_params": {"max_tokens": 4000, "ignore_eos": True, "n": 8}}
            leaving = asyncio.create_task(ask(GENERATE, long))
            while not sent:
                await asyncio.sleep(0.01)
            assert client._streams and not leaving.done()
            leaving.cancel()
            deadline = time.monotonic() + 10
            while client._streams and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            (aborted,) = [message for message in sent if isinstance(message, Abort)]
            assert aborted.request_ids == {sent[0].request_id} and not client._streams  # type: ignore[attr-defined]
            assert (await ask(COMPLETIONS, PLAIN))[0] == 200

    asyncio.run(leave())


def test_versions_are_spans_and_a_stop_text_over_two_tokens_is_cut(engine: EngineProcess) -> None:
    arrays = np.array([4, 5, 6, 7], np.int32), np.zeros(4, np.float32), np.array([3, 3, 4, 4], np.int32)
    c = Completion("r", 0, *arrays, "length")
    first, second = id_choice(c, None, None, None)["weight_versions"]
    assert first == {"start": 0, "end": 2, "version": "3"} and second == {
        "start": 2,
        "end": 4,
        "version": "4",
    }
    config = engine.config  # type: ignore[attr-defined]
    served = describe(config, config.model.path, "small", EnginePool([], Deadline(1, 1).wait_for))
    assert cut(c, (), served) == ("2345", 4, "length")
    assert cut(c, ("5", "34"), served) == ("2", 1, "stop")
    assert cut(c, ("9",), served) == ("2345", 4, "length")


@pytest.fixture(scope="module")
def trained(begin: Begin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(begin(folder / "run", "--logging.checkpoint_every=2", "--logging.keep_checkpoints=9"), folder)
    return folder / "run"


def test_a_run_s_newest_weights_are_served_and_its_new_checkpoints(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher runs on this thread, since it takes Ctrl-C; the client on another."""
    copy = Path(shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("step-000004")))
    (newest,) = [path for path in checkpoints(trained) if path.name == "step-000004"]
    seen: list[str] = []

    def wait_for(text: str) -> str:
        while text not in "".join(seen):
            time.sleep(0.1)
            seen.append(capfd.readouterr().err)
        return "".join(seen)

    def ask(url: str) -> dict[str, Any]:
        body = {"prompt": "1+1=", "temperature": 0, "max_tokens": 8, "logprobs": 1}
        full = urllib.request.Request(f"{url}{COMPLETIONS}", json.dumps(body).encode(), TOKEN)
        with urllib.request.urlopen(full) as answer:
            return json.load(answer)

    answers = []

    def client() -> None:
        try:
            url = wait_for("http://").rpartition(" at ")[2].split()[0]
            answers.append(ask(url))
            shutil.copytree(newest, copy / "checkpoints" / newest.name)
            wait_for("serving step 4 from now on")
            answers.append(ask(url))
            shutil.rmtree(copy / "checkpoints" / "step-000002")  # which the engines began with
            os.kill(json.loads((copy / "serve" / "pids.json").read_text())["engine"], signal.SIGKILL)
            answers.append(ask(url))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    fork_roles(tmp_path, monkeypatch)
    monkeypatch.setenv("SIGMOID_RL_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    thread = threading.Thread(target=client)
    thread.start()
    assert main([str(copy), "--port", "0"]) == 0
    thread.join()
    assert [a["system_fingerprint"] for a in answers] == ["step-2", "step-4", "step-4"]
    assert answers[0]["model"] == "copy"
    before, after, again = (a["choices"][0]["logprobs"]["token_logprobs"] for a in answers)
    assert before != after == again  # or the weights did not matter
    assert {p.name for p in copy.iterdir()} == {p.name for p in trained.iterdir()} | {"serve"}


SCORE = """
import json, os, urllib.request
base, token, step = (os.environ[f"SIGMOID_RL_{key}"] for key in ("URL", "TOKEN", "STEP"))
body = {"prompt": "1+1=", "temperature": 0, "max_tokens": 1, "logprobs": 1}
headers = {"Authorization": f"Bearer {token}"}
request = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))
assert answer["system_fingerprint"] == f"step-{step}" and os.path.isdir(os.environ["SIGMOID_RL_CHECKPOINT"])
if os.path.exists("broken") and step == "4":
    raise SystemExit("no such task")
print("some progress")
(logprob,) = answer["choices"][0]["logprobs"]["token_logprobs"]
print(json.dumps({"accuracy": int(step) / 10, "logprob": logprob}))
"""


def test_a_command_s_scores_are_a_curve_of_the_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It fails at step 4 first: what is scored stays, and the same command goes on."""
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "broken").touch()
    monkeypatch.chdir(tmp_path)
    fork_roles(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SIGMOID_RL_TOKEN", raising=False)
    asked = ["--port", "0", "--name", "mine", "--score", f"{sys.executable} score.py"]
    assert main([str(copy), *asked]) == 2
    lines = capfd.readouterr().err.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("serving "))
    assert re.fullmatch(r"token \S{32} \(\$SIGMOID_RL_TOKEN is not set\)", lines[at - 1])
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == ["error: --score, step 4: the command ended with exit code 1: it printed nothing"]
    (tmp_path / "broken").unlink()
    assert main([str(copy), *asked]) == 0
    rows = list(read_lines(copy / "evaluations" / "mine" / "results.jsonl"))
    assert [(row["step"], row["eval/mine/accuracy"]) for row in rows] == [(0, 0.0), (2, 0.2), (4, 0.4)]
    assert len({row["eval/mine/logprob"] for row in rows}) == 3  # each had its own weights
    reading = reading_of(copy, "--reward-column", "eval/mine/accuracy")
    assert [p.pass_rate for p in reading.curve.points] == [0.2, 0.4]
    compute = {row["step"]: row["compute/total"] for row in metrics(trained, "eval/pass_rate")}
    assert [p.compute for p in reading.curve.points] == [compute[2], compute[4]]
    assert main([str(copy), *asked]) == 2
    assert "every checkpoint of" in capfd.readouterr().err
    assert main([str(copy), "--port", "0", "--name", "other", "--score", "echo nan"]) == 2
    said = "--score, step 0: the last line printed is 'nan'; expected numbers in JSON, as {\"accuracy\": 0.5}"
    assert said in capfd.readouterr().err
    assert main([str(copy), "--score", "true"]) == 2
    assert capfd.readouterr().err == "error: expected --score COMMAND and --name NAME together\n"  # no token


def test_the_plan_names_the_weights_and_refuses_what_has_no_effect(trained: Path, tmp_path: Path) -> None:
    endpoint = Endpoint("127.0.0.1", 0, "secret")
    newest, step = (
        plan(str(trained), {}, "", endpoint),
        plan(f"{trained}@2", {"engine.slots": "3"}, "", endpoint),
    )
    assert newest.model.endswith("step-000004") and newest.endpoint.version == 4
    assert newest.endpoint.run == trained and newest.config.run_dir == str(trained / "serve")
    assert step.model.endswith("step-000002") and step.endpoint.name == "run@2" and step.endpoint.run is None
    assert step.config.engine.slots == 3 and step.slots_are_set
    first = plan(f"{trained}@0", {}, "", endpoint)
    model = plan(first.model, {}, str(tmp_path), endpoint)
    assert (
        model.endpoint.name == "model" and not model.slots_are_set and model.config.run_dir == str(tmp_path)
    )
    for what, flags, text in (
        (str(trained), {"learner.lr": "1"}, "learner.lr has no effect"),
        (f"{trained}@3", {}, "no checkpoint of step 3"),
        (str(tmp_path / "none"), {}, "no such folder"),
    ):
        with pytest.raises(ConfigError, match=text):
            plan(what, flags, "", endpoint)
    for argv in (["x", "--port", "70000"], [str(trained), "--engine.kind", "vllm"]):
        assert main(argv) == 2
    assert MAIN
