"""Promises of a teacher behind a URL: ids in, log-probs out, asked once; a wrong answer is one clear line."""

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judges import JudgeServer, Reply, serve
from small import make_model
from transformers import AutoTokenizer

from trainer import cli
from trainer.config import ConfigError, KLConfig
from trainer.controller.batch import build_batch
from trainer.controller.journal import Journal, replay
from trainer.controller.sampler import IssuedPrompt
from trainer.controller.scores import to_score, with_teacher
from trainer.controller.teacher import Teacher
from trainer.types import Group, Prompt, Rollout, TokenScores
from trainer.verifiers import http_client
from trainer.verifiers.http_client import ServerFailedError

CONFIG = KLConfig(to="", coefficient=0.5, estimator="k1", place="as_advantage", deadline_s=20)
PROMPT = Prompt("id", "1+2=", (3, 12, 4, 13), "3", {})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_model(tmp_path_factory.mktemp("teacher")))


def rollout(*ids: int) -> Rollout:
    n = len(ids)
    arrays = np.array(ids, np.int32), np.full(n, -0.5, np.float32), np.zeros(n, np.int32), np.ones(n, bool)
    return Rollout(*arrays, "", 1.0, "correct", False, False)


GROUP = Group(7, 0, PROMPT, (rollout(5, 0), rollout(6, 7, 0), rollout(5, 0)))


def logprobs(ids: list[int]) -> list[float]:
    """A teacher's, which depend on the token, its place and all before."""
    return [-(0.1 * i + 0.01 * place + 0.001 * sum(ids[:place])) for place, i in enumerate(ids)]


def answers(tokenizer: Any, change: Any = lambda logprobs: None) -> Any:
    """A server's reply in the format of vLLM 0.32 and of `python -m trainer.serve`, after `change`."""

    def reply(route: str, body: Any) -> Reply:
        if route == "/v1/models":
            return 200, {"data": [{"id": "large", "max_model_len": 64}]}
        ids = [*body["prompt"], 9]
        values: list[Any] = [None, *logprobs(ids)[1:]]
        said = {"tokens": [tokenizer.decode([i]) for i in ids], "token_logprobs": values}
        change(said)
        return 200, {"choices": [{"index": 0, "logprobs": said, "prompt_token_ids": body["prompt"]}]}

    return reply


def asked(server: JudgeServer, tokenizer: Any, *groups: Group, **settings: Any) -> list[Group]:
    async def run() -> list[Group]:
        teacher = Teacher(replace(CONFIG, to=server.url, **settings))
        await teacher.start(tokenizer, longest=32)
        return list(await asyncio.gather(*map(teacher.score, groups)))

    return asyncio.run(run())


def test_ids_go_in_and_each_completion_gets_its_own_scores_and_is_asked_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-secret")
    with serve(answers(tokenizer)) as server:
        scored, again = asked(server, tokenizer, GROUP, replace(GROUP, group_id=8), api_key_env="TEACHER_KEY")
    for r, x in zip(GROUP.rollouts, scored.logprobs_ref, strict=True):
        expected = logprobs([*PROMPT.token_ids, *r.token_ids.tolist()])[4:]
        assert x.dtype == np.float32 and x == pytest.approx(expected, rel=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip(scored.logprobs_ref, again.logprobs_ref, strict=True))
    bodies = [body for route, body in server.requests if route == "/v1/completions"]
    assert len(bodies) == 1 + 2  # the probe, and two distinct completions
    assert {"model": "large", "echo": True, "max_tokens": 1}.items() <= bodies[1].items()
    assert sorted(b["prompt"] for b in bodies[1:]) == [[3, 12, 4, 13, 5, 0], [3, 12, 4, 13, 6, 7, 0]]
    assert all(h["Authorization"] == "Bearer sk-secret" for h in server.headers)


def drop(said: Any) -> None:
    if len(said["tokens"]) < 10:  # not the probe
        del said["token_logprobs"][-2:]


def add(said: Any) -> None:
    said["token_logprobs"] += [-1.0] * 2


def write(value: Any) -> Any:
    def change(said: Any) -> None:
        if len(said["tokens"]) < 10:
            said["token_logprobs"][5] = value

    return change


def nothing(said: Any) -> None:
    del said["token_logprobs"]


WRONG = {
    "gave 5 log-probs for 6 tokens": drop,
    "gave 9 log-probs for 6 tokens": add,
    "gave the log-prob nan for token 6 of 6": write(math.nan),
    "gave the log-prob nan for token 6": write(None),
    "gave the log-prob -9999.0 for token 6": write(-9999.0),
    "gave the log-prob 0.5 for token 6": write(0.5),
    "its answer has no log-probs .*echo": nothing,
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_answer_ends_the_run_with_one_line(says: str, tokenizer: Any) -> None:
    with serve(answers(tokenizer, WRONG[says])) as server, pytest.raises(ServerFailedError, match=says) as e:
        asked(server, tokenizer, replace(GROUP, rollouts=GROUP.rollouts[:1]))
    assert str(e.value).startswith(f"the teacher at {server.url} ") or "the teacher at" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_teacher_with_other_tokens_or_too_few_positions_is_named_at_the_start(tokenizer: Any) -> None:
    def shift(said: Any) -> None:
        said["tokens"] = said["tokens"][1:] + said["tokens"][:1]

    with serve(answers(tokenizer, shift)) as server:
        with pytest.raises(ConfigError, match=r"its tokens differ from the policy's in 1\d of 16 compared"):
            asked(server, tokenizer)
        server.reply = lambda route, body: (400, "id 15") if body else answers(tokenizer)(route, body)
        with pytest.raises(ConfigError, match="refuses token ids of the policy: HTTP 400 id 15; expected"):
            asked(server, tokenizer)
        server.reply = lambda route, body: (200, "hello")
        with pytest.raises(ServerFailedError, match="/v1/models lists no model: JSONDecodeError"):
            asked(server, tokenizer)
        server.reply = lambda route, body: (200, "hello") if body else answers(tokenizer)(route, body)
        with pytest.raises(ServerFailedError, match=r"its answer has no log-probs \(JSONDecodeError"):
            asked(server, tokenizer)
        few = 200, {"data": [{"id": "large", "max_model_len": 32}]}
        server.reply = lambda route, body: few
        with pytest.raises(ConfigError, match="takes 32 tokens, and prompt and completion have up to 32"):
            asked(server, tokenizer)


@pytest.mark.parametrize("texts", [None, [], ["a"], [None] * 99])
def test_a_teacher_that_does_not_tell_the_texts_of_its_tokens_is_named(texts: Any, tokenizer: Any) -> None:
    says = "gave .* as the texts of 16 tokens; expected one for each"
    changed = answers(tokenizer, lambda said: said.update(tokens=texts))
    with serve(changed) as server, pytest.raises(ServerFailedError, match=says):
        asked(server, tokenizer)


def test_a_slow_or_busy_teacher_is_waited_for_and_one_that_is_away_named(tokenizer: Any) -> None:
    plain, failures = answers(tokenizer), [(503, "busy")] * 3

    def slow(route: str, body: Any) -> Reply:
        time.sleep(0.2)
        return failures.pop() if failures else plain(route, body)

    with pytest.raises(ConfigError, match=r"objective.kl.to: expected .* PORT a number"):
        Teacher(replace(CONFIG, to="http://host:port"))
    with serve(slow) as server:
        (scored,) = asked(server, tokenizer, GROUP)
    assert len(scored.logprobs_ref) == 3
    says = f"the teacher at {server.url} has not answered for objective.kl.deadline_s = 2 s .*kl.to"
    with pytest.raises(ServerFailedError, match=says):
        asked(server, tokenizer, GROUP, deadline_s=2)


def test_the_journal_holds_the_scores_and_a_group_without_them_is_asked_for(tmp_path: Path) -> None:
    scored = replace(GROUP, logprobs_ref=tuple(np.float32([-i, -2 * i, -3])[: len(r.token_ids)]
                                               for i, r in enumerate(GROUP.rollouts, 1)))  # fmt: skip
    journal = Journal(tmp_path / "journal")
    for group in (scored, replace(GROUP, group_id=8)):
        journal.issued(IssuedPrompt(group.group_id, 0, PROMPT, 0))
        journal.finished(group)
    journal.scored(scored)
    _, finished, _ = replay(journal.folder, 0, {"id": PROMPT})
    for a, b in zip(finished[7].logprobs_ref, scored.logprobs_ref, strict=True):
        assert np.array_equal(a, b)
    assert finished[8].logprobs_ref == ()
    with pytest.raises(ConfigError, match="group 8 has no scores of a teacher behind a URL"):
        with_teacher([finished[7], finished[8]], {7: [], 8: []})


@pytest.mark.parametrize("place", ["as_advantage", "in_advantage", "loss", "reward"])
def test_a_batch_is_that_of_a_teacher_by_folder(place: Any) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(-1, 0.3, (2, len(r.token_ids))).astype(np.float32) for r in GROUP.rollouts]
    group = replace(GROUP, logprobs_ref=tuple(ref for _, ref in rows))
    kl = replace(CONFIG, to="http://teacher", place=place)
    objective = replace(cli.parse([]).config.objective, kl=kl, zero_variance="keep")
    assert not objective.needs_reference and objective.needs_logprobs == (place == "reward")
    learner = [TokenScores(logp) if place == "reward" else TokenScores() for logp, _ in rows]
    folder = [replace(s, logprobs_ref=ref) for s, (_, ref) in zip(learner, rows, strict=True)]
    by_url = with_teacher([group], {7: learner if objective.needs_scores else []})[7]
    ours, expected = (build_batch([group], 1, objective, 0, s) for s in (by_url, folder))
    assert ours.stats == expected.stats and len(ours.sequences) == len(to_score([group]))
    for a, b in zip(ours.sequences, expected.sequences, strict=True):
        assert np.array_equal(a.advantages, b.advantages)
        assert (a.logprobs_ref is None) == (b.logprobs_ref is None) == (place != "loss")
        assert place != "loss" or np.array_equal(a.logprobs_ref, b.logprobs_ref)  # type: ignore[arg-type]


MISFITS = {
    ("--engine.temperature=0.7",): "engine.temperature is 0.7, and the log-probs of a server, .* are at 1",
    (
        "--pipeline.deadline_s=99",
        "--objective.kl.deadline_s=99",
    ): "objective.kl.deadline_s is 99; expected less",
}


@pytest.mark.parametrize("flags", MISFITS)
def test_settings_that_a_server_cannot_follow_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=MISFITS[flags]):
        cli.parse(["--recipe", "distill", "--objective.kl.to", "http://host:8000", *flags])
