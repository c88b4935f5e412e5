"""Promises of a teacher behind a URL, tried as a user tries it: `python -m trainer.serve` is the teacher that
its folder is; when it goes away, the run names it, and a resume or a replay asks for nothing again."""

import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judges import Reply, serve
from small import CHARS, MAIN, Begin, check_no_group_is_lost, metrics, run, started, steps, until
from training import plain_logprobs
from transformers import AutoModelForCausalLM

from trainer.controller.data import _id
from trainer.controller.journal import records, replay
from trainer.types import Prompt

KL = ("--objective.kl.coefficient=0.5", "--objective.kl.estimator=k1", "--engine.interruption.enabled=false")
AS_ADVANTAGE = (*KL, "--objective.kl.place", "as_advantage", "--objective.zero_variance", "keep")
TOKEN = "sk-nobody-may-read-this"


def finished(run_dir: Path) -> Any:
    """The journal's finished groups by id; their prompts have no text."""
    issued = (r for r in records(run_dir / "journal") if "issued" in r)
    prompts = {r["prompt_id"]: Prompt(r["prompt_id"], "", (), "", {}) for r in issued}
    return replay(run_dir / "journal", 0, prompts)[1]


def make_teacher(folder: Path, model: Path) -> Path:
    """Another model with the same tokenizer."""
    shutil.copytree(model, folder)
    lm = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    lm.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_served_teacher_says_what_the_same_model_says_by_folder(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMOID_RL_TOKEN", TOKEN)
    command = begin(tmp_path / "by-url", *AS_ADVANTAGE)
    model = Path(next(flag for flag in command if flag.startswith("--model.path")).partition("=")[2])
    folder = make_teacher(tmp_path / "teacher", model)
    serving = [*MAIN[:2], "trainer.serve", str(folder), "--port", "0", "--out", str(tmp_path / "serve")]
    room = ("--data.max_prompt_tokens", "64", "--engine.max_new_tokens", "64")
    with started([*serving, *room], tmp_path) as process:
        log = tmp_path / "out.log"
        until(lambda: re.search(r"serving teacher at (\S+)", log.read_text() + _err(tmp_path)), process)
        (url,) = re.findall(r"serving teacher at (http\S+)", log.read_text() + _err(tmp_path))
        key = ("--objective.kl.api_key_env", "SIGMOID_RL_TOKEN", "--objective.kl.deadline_s", "30")
        (logs := tmp_path / "logs").mkdir()
        with started([*command, "--objective.kl.to", url, *key], logs) as process:
            assert process.wait(120) == 0
    run(begin(tmp_path / "by-folder", *AS_ADVANTAGE, "--objective.kl.to", str(folder)), tmp_path)
    ours, expected = (metrics(tmp_path / name, "learner/loss") for name in ("by-url", "by-folder"))
    assert len(ours) == len(expected) == 4
    for key_ in ("learner/loss", "kl/ref", "learner/grad_norm"):
        assert ours[0][key_] == pytest.approx(expected[0][key_], abs=1e-5)
    assert ours[0]["kl/ref"] > 0.01

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    questions = (f"{a}+{b}=" for a in range(10) for b in range(4))
    ids = {_id(text): [CHARS.index(c) for c in text] for text in questions}
    groups = finished(tmp_path / "by-url")
    assert len(groups) >= 16
    for g in list(groups.values())[:8]:
        for r, x in zip(g.rollouts, g.logprobs_ref, strict=True):
            exact = plain_logprobs(lm, ids[g.prompt.prompt_id], r.token_ids.tolist())
            np.testing.assert_allclose(x, exact.numpy(), atol=1e-5)

    again = ("--replay", str(tmp_path / "by-url"), "--run-dir", str(tmp_path / "again"))  # no server is there
    out, err = run([*MAIN, *again], tmp_path)
    assert "bit for bit those of the replayed run" in out + err
    replayed = metrics(tmp_path / "again", "learner/loss")
    assert [row["learner/loss"] for row in replayed] == [row["learner/loss"] for row in ours]
    for path in (tmp_path / "by-url").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


def _err(folder: Path) -> str:
    return (folder / "err.log").read_text()


def reply(route: str, body: Any) -> Reply:
    """A teacher that likes small ids."""
    if route == "/v1/models":
        return 200, {"data": [{"id": "m"}]}
    ids, chars = [*body["prompt"], 0], ["<eos>", "<pad>", *"0123456789+=\n "]
    said = {"tokens": [chars[i] for i in ids], "token_logprobs": [None, *(-1 - i / 16 for i in ids[1:])]}
    return 200, {"choices": [{"logprobs": said}]}


@pytest.mark.slow
def test_when_the_teacher_goes_away_nothing_is_lost_or_asked_twice(begin: Begin, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ExitStack() as servers, ExitStack() as stack:
        server = servers.enter_context(serve(reply))
        more = (
            "--objective.kl.to",
            server.url,
            "--objective.kl.deadline_s",
            "2",
            "--pipeline.steps",
            "100000",
        )
        argv = begin(run_dir, *AS_ADVANTAGE, *more)
        process = stack.enter_context(started(argv, tmp_path))
        until(lambda: len(metrics(run_dir)) > 3, process)
        servers.close()
        assert process.wait(60) == 1
    error = _err(tmp_path)
    assert error.startswith("error: controller: the teacher at " + server.url) and error.count("\n") == 1
    assert "for objective.kl.deadline_s = 2 s" in error and "start its server" in error
    last = steps(run_dir)[-1]
    assert f"continue from step-{last:06d} with --resume" in error
    unscored = {i for i, g in finished(run_dir).items() if not g.logprobs_ref}
    assert unscored  # generated, and the teacher was away

    with serve(reply, int(server.url.rpartition(":")[2])):
        run([*MAIN, "--resume", "--run-dir", str(run_dir), "--pipeline.steps", str(last + 2)], tmp_path)
    assert steps(run_dir) == list(range(1, last + 3))
    check_no_group_is_lost(run_dir)
    scored = set[int]()
    for record in records(run_dir / "journal"):
        if "issued" in record:  # again, since its weights are lost
            scored.discard(record["issued"])
        elif "scored" in record:
            assert record["scored"] not in scored, "asked twice"
            scored.add(record["scored"])
    assert all(g.logprobs_ref for i, g in finished(run_dir).items() if i < (last + 2) * 4)


@pytest.mark.slow
def test_a_teacher_that_is_away_at_the_start_is_one_line(begin: Begin, tmp_path: Path) -> None:
    with serve(reply) as server:
        url = server.url
    more = ("--objective.kl.to", url, "--objective.kl.deadline_s", "2")
    _, err = run(begin(tmp_path / "run", *AS_ADVANTAGE, *more), tmp_path, code=1)
    assert (
        err.startswith(f"error: controller: the teacher at {url} has not answered") and err.count("\n") == 1
    )


@pytest.mark.slow
def test_a_run_on_the_forward_kl_over_the_top_k_comes_nearer_to_its_teacher(
    begin: Begin, tmp_path: Path
) -> None:
    command = begin(tmp_path / "run", *KL[1:], "--objective.kl.place=loss", "--objective.zero_variance=keep")
    model = Path(next(flag for flag in command if flag.startswith("--model.path")).partition("=")[2])
    more = ("--objective.kl.to", str(make_teacher(tmp_path / "teacher", model)), "--learner.lr=1e-2")
    run(
        [*command, *more, "--objective.loss=none", "--objective.kl.coefficient=1", "--objective.kl.top_k=5"],
        tmp_path,
    )
    first, *_, last = metrics(tmp_path / "run", "learner/loss")
    assert first["kl/ref"] == pytest.approx(first["learner/loss"], rel=0.5) and first["kl/ref"] > 0.01
    assert last["kl/ref"] < 0.7 * first["kl/ref"]
