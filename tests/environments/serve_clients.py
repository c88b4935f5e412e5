"""Real clients of `python -m trainer.serve`, in an environment of their own: openai, lm-eval, verifiers.

`make test-environments` runs it. $SIGMOID_RL_PYTHON is the Python with sigmoid-rl, which serves SmolLM2; this
one has requirements/clients.txt. What the clients get is compared with transformers' own log-probs.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import openai
import pytest
from lm_eval.tasks import TaskManager
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

PYTHON = os.environ["SIGMOID_RL_PYTHON"]
TOKEN = os.environ["SIGMOID_RL_TOKEN"] = os.environ["OPENAI_API_KEY"] = "the-token-of-this-test"
MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
# Log-probs of tokens after the first, in lists of ids; and whether each is the likeliest in its place.
SCORES = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
for ids in json.load(sys.stdin):
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    print(json.dumps([chosen.tolist(), (chosen == logprobs.max(-1).values).tolist()]))
"""


def own_python(code: str, *argv: str, stdin: str = "") -> str:
    command = [PYTHON, "-c", code, *argv]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def folder() -> str:
    """The model and its tokenizer."""
    code = f"from trainer.models.resolve import resolve_model; print(resolve_model({MODEL!r}))"
    return own_python(code)


@pytest.fixture(scope="session")
def url(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address."""
    out = tmp_path_factory.mktemp("serve")
    command = [PYTHON, "-m", "trainer.serve", MODEL, "--port", "0", "--out", out, "--engine.slots", "16"]
    log = out / "stderr.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        deadline = time.monotonic() + 240
        while not (found := re.search(r" at (http://\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield found[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()


def scores(folder: str, sequences: Sequence[Sequence[int]]) -> list[tuple[list[float], list[bool]]]:
    """transformers' log-probs of each sequence's tokens, and which are greedy."""
    return [json.loads(line) for line in own_python(SCORES, folder, stdin=json.dumps(sequences)).splitlines()]


def test_openai(url: str, folder: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    (model,) = client.models.list().data
    assert model.id == MODEL
    done = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8, logprobs=1,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    (choice,) = done.choices
    assert choice.text.startswith(" Paris") and done.usage and done.usage.completion_tokens == 8
    prompt, ids = choice.prompt_token_ids, choice.token_ids  # type: ignore[attr-defined]
    ((logprobs, greedy),) = scores(folder, [[*prompt, *ids]])
    assert choice.logprobs and choice.logprobs.token_logprobs == pytest.approx(logprobs[-8:], abs=1e-4)
    assert all(greedy[-8:])
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, n=2, max_tokens=5, seed=3
    )
    assert [len(one.logprobs.content) for one in chat.choices] == [5, 5]  # type: ignore[union-attr, arg-type]
    assert chat.choices[0].message.content
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model=MODEL, prompt="1", top_p=0.5)
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.completions.create(model="gpt-4", prompt="1")
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model=MODEL, prompt="1", max_tokens=2560)


def test_verifiers_train_client(url: str, folder: str) -> None:
    """Two turns; the second is rendered from messages, as DefaultRenderer has no bridge."""
    config = TrainClientConfig(
        base_url=f"{url}/v1", api_key_var="SIGMOID_RL_TOKEN", renderer_model_name=folder
    )

    async def turns() -> list[Any]:
        client, messages, responses = TrainClient(config), list(QUESTION), []
        for text in ("And 3+3?", ""):
            sampling = SamplingConfig(temperature=1.0, max_tokens=12, cache_salt="v0")
            body = {"model": MODEL, "messages": messages}
            responses.append(await client.get_response(ChatDialect(), body, sampling, session_id="trace"))
            messages += [
                {"role": "assistant", "content": responses[-1].message.content or ""},
                {"role": "user", "content": text},
            ]
        await client.close()
        return responses

    responses = asyncio.run(turns())
    tokens = [response.tokens for response in responses]
    expected = scores(folder, [[*t.prompt_ids, *t.completion_ids] for t in tokens])
    for response, t, (logprobs, _) in zip(responses, tokens, expected, strict=True):
        n = len(t.completion_ids)
        assert 0 < n <= 12 and response.finish_reason in ("stop", "length")
        assert t.completion_logprobs == pytest.approx(logprobs[-n:], abs=1e-4)
    assert len(tokens[1].prompt_ids) > len(tokens[0].prompt_ids)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """output_type: multiple_choice
doc_to_choice: "{{options}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""
WRITES = """output_type: generate_until
doc_to_target: "{{options[right]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""
ROWS = [
    {"question": "The capital of France is", "options": ["Paris", "Madrid", "London"], "right": 0},
    {"question": "The capital of Spain is", "options": ["Paris", "Madrid", "Berlin"], "right": 1},
    {"question": "Two plus two is", "options": ["purple", "four", "Tuesday"], "right": 1},
    {"question": "The opposite of hot is", "options": ["fast", "green", "cold"], "right": 2},
]


def test_lm_eval_local_completions(url: str, folder: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, kind in (("own_choices", CHOICES), ("own_writes", WRITES)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + kind)
    arguments = {"model": MODEL, "tokenizer": folder, "base_url": f"{url}/v1/completions", "max_length": 512}
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments | {"num_concurrent": 4, "tokenizer_backend": "huggingface"},
        tasks=["own_choices", "own_writes"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results and results["results"]["own_choices"]["acc,none"] == 1.0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [
        (sample["doc"]["question"], f"{sample['doc']['question']} {option}", answer)
        for sample in results["samples"]["own_choices"]
        for option, answer in zip(sample["doc"]["options"], sample["filtered_resps"], strict=True)
    ]
    expected = scores(folder, [tokenizer.encode(whole) for _, whole, _ in samples])
    assert len(samples) == 12
    for (context, whole, (logprob, is_greedy)), (logprobs, greedy) in zip(samples, expected, strict=True):
        n = len(tokenizer.encode(whole)) - len(tokenizer.encode(context))
        assert float(logprob) == pytest.approx(sum(logprobs[-n:]), abs=1e-4)
        assert (str(is_greedy) == "True") == all(greedy[-n:])
    texts = [sample["filtered_resps"][0] for sample in results["samples"]["own_writes"]]
    assert len(texts) == 4 and all("\n" not in text and "." not in text for text in texts)
    assert any("Paris" in text for text in texts)
