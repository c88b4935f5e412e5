"""Promises of `sigmoid-rl view`: for the holder of the token alone, and only the runs that were named."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from report_folder import HOSTILE
from view_run import ask, opened, serving, write_view_run

from trainer.run_folder import ENDED, copy_tokenizer
from trainer.view.__main__ import main
from trainer.view.page import export, live_page, report_page
from trainer.view.state import open_run
from trainer.view.tokens import group_view

BEARER = {"Authorization": "Bearer secret"}


def test_only_the_token_opens_it_and_no_path_leads_out(tmp_path: Path) -> None:
    runs = opened(write_view_run(tmp_path / "run"))
    with serving(runs) as port:
        for path in ("/", "/api/runs", "/report", "/?token=wrong", "/api/groups?token="):
            status, answer, _ = ask(port, path)
            assert status == 403 and "token" in answer["error"]
        status, _, headers = ask(port, "/?token=secret")
        assert (status, headers["Location"]) == (303, "/") and "HttpOnly; Path=/; SameSite=Strict" in headers[
            "Set-Cookie"
        ]
        cookie = headers["Set-Cookie"].partition(";")[0]
        status, page, headers = ask(port, "/", Cookie=cookie)
        assert status == 200 and "<h1>sigmoid-rl view</h1>" in page and "secret" not in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert ask(port, "/api/runs", Host="evil.example", **BEARER)[0] == 403
        for path in ("/../config.yaml", "/%2e%2e/config.yaml", "/api/../../run/config.yaml", "/config.yaml"):
            assert ask(port, path, **BEARER)[0] == 404
        for query in ("run=1", "run=-1", "run=../x", "id=999", "id=0&rollout=3", "id=0&start=-1"):
            status, answer, _ = ask(port, f"/api/group?{query}", **BEARER)
            assert status == 400 and answer["error"], query
        for query in ("order=best", "reward_min=x", "interrupted=2", "step=a"):
            assert ask(port, f"/api/groups?{query}", **BEARER)[0] == 400, query


def test_it_answers_with_the_runs_their_groups_and_the_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer" / "view").mkdir(parents=True)  # a module where the user is must not be run
    for name in ("__init__.py", "view/__init__.py", "view/page.py"):
        (tmp_path / "trainer" / name).write_text("print('another curve')")
    monkeypatch.chdir(tmp_path)
    with serving(opened(write_view_run(tmp_path / "a"), write_view_run(tmp_path / "b"))) as port:
        first, second = ask(port, "/api/runs", **BEARER)[1]["runs"]
        assert (first["name"], second["name"], first["step"], first["steps"]) == ("a", "b", 60, 60)
        assert first["tasks"] == ["code", "math"] and first["read"] == first["size"] > 0
        assert ["forecast of the end", 0.77] in first["metrics"]
        assert first["processes"][0]["role"] == "learner" and first["processes"][0]["shares"][0][1] == 0.5
        query = "run=1&step=1-2&order=oldest&outcome=correct"
        page = ask(port, f"/api/groups?{query}", **BEARER)[1]
        assert [row["id"] for row in page["rows"]] == [0, 1, 2, 3]
        assert len(ask(port, "/api/group?run=1&id=3", **BEARER)[1]["rollouts"]) == 3
        report = ask(port, "/report", **BEARER)[1]
        assert "2 recipes, one run each" in report and HOSTILE[0] not in report


def test_the_state_follows_a_run_and_a_resume_begins_it_anew(tmp_path: Path) -> None:
    folder = write_view_run(tmp_path / "run")
    run = open_run(folder, "run")
    metrics = folder / "metrics.jsonl"
    run.update()
    assert run.step == 60 and run.view()["state"] == "training"
    with metrics.open("a") as file:
        file.write(
            '{"step": 61, "train/reward": 0.5, "warning/entropy": "entropy collapses", "time": 1}\n{"st'
        )
    run.update()
    assert run.step == 61 and run.warnings[-1] == (61, "entropy collapses")
    metrics.write_text('{"step": 2, "train/reward": 0.25}\n')
    run.update()
    assert run.step == 2 and not run.warnings and run.view()["metrics"] == [("reward", 0.25)]
    (folder / ENDED).write_text('{"by": "compute"}')
    assert run.view()["state"] == "ended by compute"


@pytest.mark.parametrize("content", [None, "- a\n", "pipeline: {}\n", "a: [\n"])
def test_a_folder_without_a_run_is_one_clear_line(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert main([str(tmp_path)]) == 2 and main([str(tmp_path / "none")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and "config.yaml" in first and "no such folder" in second
    assert ("expected YAML with a number as pipeline.steps (" in first) == (content is not None)


def test_no_bytes_in_a_request_and_no_fault_bring_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = opened(write_view_run(tmp_path / "run"))
    with serving(runs) as port:
        for headers in ({"Authorization": "Bearer \xff\xfe"}, {"Cookie": f"sigmoid-rl-{port}=\xff"}):
            status, answer, back = ask(port, "/", **headers)
            assert status == 403 and "token" in answer["error"]
            assert back["X-Content-Type-Options"] == "nosniff"
        status, _, back = ask(port, "/", Host="evil.example", **BEARER)
        assert status == 403 and back["X-Frame-Options"] == "SAMEORIGIN"
        runs[0].rollouts.entries[0].rewards = [None, 1.0, 0.0]  # as the journal has NaN
        for order in ("lowest reward", "highest reward"):
            page = ask(port, f"/api/groups?order={order.replace(' ', '+')}", **BEARER)[1]
            assert len(page["rows"]) == 6
        monkeypatch.setattr(runs[0].rollouts.__class__, "page", lambda *args: 1 / 0)
        status, answer, back = ask(port, "/api/groups", **BEARER)
        assert (status, answer) == (500, {"error": "ZeroDivisionError: division by zero"})
        assert back["X-Content-Type-Options"] == "nosniff"


def test_the_printed_address_quotes_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def no_serve(view: Any, listener: socket.socket) -> None:
        assert view.token == "a&b /#"

    monkeypatch.setenv("SIGMOID_RL_TOKEN", "a&b /#")
    monkeypatch.setattr("trainer.view.server.serve", no_serve)
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "config.yaml").write_text("pipeline: {steps: 3}\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().endswith("/?token=a%26b%20%2F%23")


def test_the_tokenizer_is_that_of_the_last_start(tmp_path: Path) -> None:
    for name in ("a", "b", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
    (tmp_path / "without/tokenizer.json").unlink()
    for name in ("a", "b", "without"):
        copy_tokenizer(str(tmp_path / name), str(tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "b" and len(list(tmp_path.iterdir())) == 4


def test_a_run_that_has_just_begun_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("pipeline: {steps: 3}\n")
    (run,) = opened(tmp_path)
    run.update()
    assert run.view()["state"] == "training" and run.view()["groups"] == 0
    assert "begins with the first evaluation" in report_page([tmp_path])


def test_the_exported_file_holds_curve_groups_and_tokens_and_hostile_text_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.view.tokens.AT_ONCE", 15)  # rollouts are whole nevertheless
    folder, out = write_view_run(tmp_path / "run"), tmp_path / "out.html"
    assert main([str(folder), "--export", str(out)]) == 0
    assert "6 of 6 groups" in capsys.readouterr().out
    text = out.read_text()
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)[0])
    assert set(data["groups"][0]) == {str(i) for i in range(6)} and len(data["rows"][0]) == 6
    assert [len(r["tokens"]["text"]) for r in data["groups"][0]["0"]["rollouts"]] == [12, 13, 14]
    assert "Reward over compute" in data["report"] and data["groups"][0]["3"]["rollouts"][0]["blocks"]
    assert text.count("<script") == 2 and "http://" not in text.replace("http://www.w3.org", "")
    policy, scripts = live_page()[1], re.findall(r"'sha256-[^']+'", text)
    assert scripts[0] in policy and len(set(scripts)) == 2  # the page's and the report's


def test_each_run_has_its_share_of_an_exported_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_view_run(tmp_path / "run")
    (run,) = opened(folder)
    sizes = [len(json.dumps(group_view(folder, *run.rollouts.record(i)))) for i in (5, 4)]
    monkeypatch.setattr("trainer.view.page.EXPORTED_BYTES", 2 * sum(sizes))
    assert export(opened(folder, folder), tmp_path / "two.html") == (4, 12)
    monkeypatch.setattr("trainer.view.page.EXPORTED_BYTES", 1)
    assert export([run], tmp_path / "one.html") == (1, 6)  # a group that is too large alone
