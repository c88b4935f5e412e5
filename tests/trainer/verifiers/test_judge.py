"""Promises of the judge: its scores are the model's, by folder or by URL; nothing is asked twice; a server
that is away is waited for, and then named."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judges import make_reward_model, says, serve
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trainer.config import ConfigError, JudgeConfig
from trainer.types import Prompt, Verdict
from trainer.verifiers import http_client, judge_model
from trainer.verifiers.http_client import ServerFailedError
from trainer.verifiers.judge import Judge

PROMPT = Prompt("id", "2+2=", (1, 2), "4", {})
CONFIG = JudgeConfig(model="judge", deadline_s=20)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("judge"), max_position_embeddings=32)


def ask(config: JudgeConfig, *completions: str, notes: list[str] | None = None) -> list[Verdict]:
    """The verdicts on completions that are judged at the same time."""

    async def run() -> list[Verdict]:
        judge = Judge(config, (notes if notes is not None else []).append)
        try:
            return list(await asyncio.gather(*(judge.score(PROMPT, text) for text in completions)))
        finally:
            judge.close()

    return asyncio.run(run())


def test_a_model_by_folder_gives_its_own_scores_up_to_its_positions(folder: Path) -> None:
    texts = ["4", "5\n", "2+2=4", "1234567890" * 2, "4"]
    long, notes = "1" * 40, list[str]()  # with the prompt 44 tokens; the model has 32 positions
    config = JudgeConfig(path=str(folder), threshold=0.0)
    *verdicts, a, b = ask(config, *texts, long, long + "1", notes=notes)
    assert a == b == Verdict(0.0, "unparsable")
    assert len(notes) == 1 and "longer than the judge's model allows" in notes[0]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, verdict in zip(texts, verdicts, strict=True):
        ids = torch.tensor([tokenizer.encode(PROMPT.text + text)])
        expected = model(input_ids=ids).logits.item()  # alone and in float64
        assert verdict.score == pytest.approx(expected, abs=1e-4)
        assert verdict.outcome == ("correct" if expected >= 0 else "wrong")
    assert len({v.score for v in verdicts}) == 4


def test_padding_that_is_eos_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that pads with EOS cannot tell where a conversation ends, so each goes alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: tokenizer)
    monkeypatch.setattr(judge_model, "_loaded", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    judge_model.load(str(folder), "cpu", "")
    texts = ["1+1=2", "7", "12345"]
    assert judge_model.scores(texts) == [judge_model.scores([text])[0] for text in texts]
    assert not judge_model._loaded["pads"]


@pytest.mark.slow
def test_a_model_with_two_outputs_is_no_judge(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"it has 2 outputs; expected a reward model with one"):
        ask(JudgeConfig(path=str(tmp_path)), "4")


REPLIES = {
    "0.7": 0.7,
    "The answer is off by 1, so I give 0.25.": 0.25,
    "<think>2 + 2 is 4</think>\n0": 0.0,
    ".5": 0.5,
    "1": 1.0,
}


@pytest.mark.axis("verifier.judge.api", "chat")
@pytest.mark.parametrize("reply", REPLIES)
def test_a_language_models_score_is_the_last_number_it_writes(reply: str) -> None:
    with serve(lambda route, body: says(reply)) as server:
        (verdict,) = ask(replace(CONFIG, url=server.url), "four")
    assert verdict == Verdict(REPLIES[reply], "correct" if REPLIES[reply] >= 0.5 else "wrong")
    ((route, body),) = server.requests
    assert (route, body["model"], body["temperature"]) == ("/v1/chat/completions", "judge", 0)
    assert all(part in body["messages"][0]["content"] for part in ("2+2=", "4", "four"))


@pytest.mark.parametrize(("reply", "score"), [("Score: 8/10", 8.0), ("-1.5", -1.5), ("9" * 300, 1e300)])
def test_a_grade_outside_0_to_1_counts_only_under_a_template_of_ones_own(reply: str, score: float) -> None:
    with serve(lambda route, body: says(reply)) as server:
        config = replace(CONFIG, url=server.url)
        (verdict,) = ask(replace(config, template="Grade {completion} from -9 to 9."), "4")
        assert ask(config, "4") == [Verdict(0.0, "unparsable")]
    assert verdict.score == pytest.approx(score)


def test_half_a_surrogate_pair_does_not_end_the_run() -> None:
    with serve(lambda route, body: says("1")) as server:
        assert ask(replace(CONFIG, url=server.url), "4\ud800") == [Verdict(1.0, "correct")]
    assert "4?" in server.requests[0][1]["messages"][0]["content"]


def test_a_reply_without_a_number_scores_0_and_a_judge_that_never_scores_ends_the_run() -> None:
    with serve(lambda route, body: says("It depends.")) as server:
        config = replace(CONFIG, url=server.url)
        assert ask(config, "4") == [Verdict(0.0, "unparsable")]
        with pytest.raises(ServerFailedError, match=r"none of 50 completions: there is no number .*depends"):
            ask(config, *map(str, range(50)))


ENTRIES: list[tuple[Any, dict[str, Any], float]] = [
    ("classify", {"index": 0, "label": "LABEL_0", "probs": [-2.5], "num_classes": 1}, -2.5),
    ("pooling", {"index": 0, "object": "pooling", "data": [1.25]}, 1.25),
    ("pooling", {"index": 0, "object": "pooling", "data": [[0.1], [0.2], [3.0]]}, 3.0),  # per token
]


@pytest.mark.axis("verifier.judge.api", "classify", "pooling")
@pytest.mark.parametrize(("api", "entry", "score"), ENTRIES)
def test_vllms_reward_models_are_asked_with_the_conversation_and_without_activation(
    api: Any, entry: dict[str, Any], score: float
) -> None:
    with serve(lambda route, body: (200, {"object": "list", "data": [entry]})) as server:
        config = replace(CONFIG, url=server.url, api=api)
        assert ask(config, "5") == [Verdict(score, "correct" if score >= 0.5 else "wrong")]
        ask(replace(config, template="Q {question} A {completion} of {answer}"), "5")
    turns = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "5"}]
    body = {"model": "judge", "messages": turns, "use_activation": False}
    assert server.requests[0] == (f"/{api}", body)
    assert server.requests[1][1]["input"] == "Q 2+2= A 5 of 4"


def test_a_classifier_of_two_classes_is_no_reward_model() -> None:
    two = (200, {"data": [{"probs": [0.3, 0.7]}]})
    refused = pytest.raises(ServerFailedError, match=r"is not that of verifier.judge.api classify")
    with serve(lambda route, body: two) as server, refused:
        ask(replace(CONFIG, url=server.url, api="classify"), "4")


def test_the_same_completion_is_asked_once_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.verifiers.judge.CACHED", 2)

    async def run(config: JudgeConfig) -> list[int]:
        judge, counts = Judge(config, print), []
        for texts in (["a", "a", "b", "a"], ["a"], ["c"], ["a"], ["b"]):
            await asyncio.gather(*(judge.score(PROMPT, text) for text in texts))
            counts.append(len(server.requests))
        return counts

    with serve(lambda route, body: says("1")) as server:
        # a and b; a is cached; c drops b, the least recently used; a is still there; b is asked again
        assert asyncio.run(run(replace(CONFIG, url=server.url))) == [2, 2, 3, 3, 4]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_that_fails_by_the_servers_fault_is_sent_again(status: int) -> None:
    failures = [(status, "busy")] * 3
    with serve(lambda route, body: failures.pop() if failures else says("1")) as server:
        assert ask(replace(CONFIG, url=server.url), "4") == [Verdict(1.0, "correct")]
    assert len(server.requests) == 4


def test_a_refused_text_scores_0_and_a_refused_key_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    notes: list[str] = []
    refuse = lambda route, body: (400, "too long") if "long" in str(body) else says("1")  # noqa: E731
    with serve(refuse) as server:
        config = replace(CONFIG, url=server.url + "/v1", api_key_env="JUDGE_KEY")
        assert ask(config, "long", "4", notes=notes) == [Verdict(0.0, "unparsable"), Verdict(1.0, "correct")]
        assert len(server.requests) == 2 and "HTTP 400 too long" in notes[0]
        assert server.headers[0]["Authorization"] == "Bearer sk-secret"
        server.reply = lambda route, body: (401, "sk-secret is wrong")
        with pytest.raises(
            ServerFailedError, match=r"refuses /v1/chat/completions: HTTP 401 \*\*\* is wrong"
        ):
            ask(config, "4")


def test_without_a_name_the_servers_first_model_judges() -> None:
    def reply(route: str, body: Any) -> Any:
        return (200, {"data": [{"id": "first"}, {"id": "second"}]}) if route == "/v1/models" else says("1")

    with serve(reply) as server:
        ask(replace(CONFIG, url=server.url, model=""), "4")
    assert server.requests[1][1]["model"] == "first"


def test_a_server_that_is_away_is_named_after_the_deadline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerFailedError, match=f"the judge at {url} has not answered for .* = 0.2 s"):
            ask(replace(CONFIG, url=url, deadline_s=0.2), "4")


def test_a_server_that_comes_back_before_the_deadline_is_not_missed() -> None:
    with serve(lambda route, body: says("1")) as server:
        port = int(server.url.rpartition(":")[2])

    async def run() -> Verdict:
        asked = asyncio.create_task(Judge(replace(CONFIG, url=server.url), print).score(PROMPT, "4"))
        await asyncio.sleep(0.1)
        with serve(lambda route, body: says("1"), port):
            return await asked

    assert asyncio.run(run()) == Verdict(1.0, "correct")


WRONG = {
    r"expected http\(s\)://HOST:PORT": JudgeConfig(url="judge:8000"),
    "without a name or password": JudgeConfig(url="http://me:secret@judge"),
    "url: expected .* PORT a number": JudgeConfig(url="http://judge:port"),
    r"\$NO_SUCH_KEY is not set": JudgeConfig(url="http://judge", api_key_env="NO_SUCH_KEY"),
    "template: KeyError: 'text'; expected {question}": JudgeConfig(url="http://judge", template="{text}"),
    "device 'gpu': expected cpu or cuda:N": JudgeConfig(path="a", device="gpu"),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_wrong_setting_is_named(problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Judge(WRONG[problem], print)
