"""Environments of others with their real packages: verifiers 0.4.0, OpenEnv 0.10.0, skyrl-gym, TextArena.

`make test-environments` runs it with the trainer's own Python. $SIGMOID_RL_VERIFIERS and $SIGMOID_RL_OPENENV
are the interpreters of requirements/clients.txt and requirements/openenv.txt.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from small import metrics

from trainer.config import EnvironmentConfig
from trainer.environments.pool import EnvironmentFailure, EnvironmentPool, Step

HERE = Path(__file__).parent
VERIFIERS, OPENENV = os.environ["SIGMOID_RL_VERIFIERS"], os.environ["SIGMOID_RL_OPENENV"]
Row = dict[str, Any]


def verifiers(taskset: str, **more: Any) -> EnvironmentConfig:
    options = {"taskset": {"id": taskset}, **more}
    kind = "trainer.environments.verifiers:Verifiers"
    return EnvironmentConfig(kind=kind, options=options, python=VERIFIERS, network=True)


def rows(**options: Any) -> list[Row]:
    command = [VERIFIERS, "-m", "trainer.environments.verifiers", json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def play(config: EnvironmentConfig, *stories: tuple[Row, Sequence[Any]]) -> list[Any]:
    """The steps of an episode for each row and what the model says; its failure if it has one. The last thing
    that it says is its last turn."""

    async def one(pool: EnvironmentPool, row: Row, turns: Sequence[Any]) -> Any:
        async with pool.episode() as episode:
            try:
                steps = [await episode.start(row)]
                for n, turn in enumerate(turns, 1):
                    message = turn if isinstance(turn, dict) else {"content": turn}
                    last = {"role": "assistant", "last": n == len(turns)}
                    steps.append(await episode.step(message | last))
                return steps
            except EnvironmentFailure as e:
                return str(e)

    async def all_of_them() -> list[Any]:
        return [await one(pool, *story) for story in stories]

    with closing(EnvironmentPool(config, lambda note: None)) as pool:
        return asyncio.run(all_of_them())


def said(steps: list[Step]) -> list[tuple[str, float | None, bool]]:
    return [("".join(m["content"] for m in step.messages), step.reward, step.done) for step in steps]


def test_verifiers_one_turn() -> None:
    read = rows(taskset={"id": "last_digit"}, count=5)
    assert [row["question"] for row in read] == [f"000{i} = " for i in range(5)]
    right, digit, word = play(verifiers("last_digit"), *((read[4], [text]) for text in ("4\n", "5", "four")))
    assert [said(one) for one in (right, digit, word)] == [
        [("", None, False), ("", reward, True)] for reward in (1.0, 0.5, 0.0)
    ]


def test_verifiers_several_turns_and_its_limits() -> None:
    row = next(row for row in rows(taskset={"id": "higher_lower"}, count=50) if row["task"]["number"] == 5)
    found, ended, cut = play(
        verifiers("higher_lower"), (row, ["4", "6", "5"]), (row, ["4", "x", "6"]), (row, ["4", "6"])
    )
    assert said(found) == [("", None, False), ("+\n", None, False), ("-\n", None, False), ("", 1.5, True)]
    assert said(ended)[-1] == ("", pytest.approx(1 / 3), True)  # verifiers' own limit, player.max_turns
    assert said(cut)[-1] == ("", 0.5, True)  # the trainer's limit: what there is has been scored


def test_verifiers_tools_faults_and_what_is_not_scored() -> None:
    product, unscored, fault, two = rows(taskset={"id": "odd_tasks"})
    system, user = product["question"]
    assert (system["role"], user["content"]) == ("system", "17 * 23?")
    call = {"type": "function", "function": {"name": "calculator_times", "arguments": '{"a": 17, "b": 23}'}}
    wrong = {"type": "function", "function": {"name": "nothing", "arguments": "{}"}}
    turns = [{"content": "", "tool_calls": [call, wrong]}, "It is 391."]
    steps, none, failed, second = play(
        verifiers("odd_tasks"), (product, turns), (unscored, ["?"]), (fault, ["?"]), (two, ["?", "?"])
    )
    (tool,) = steps[0].tools
    assert (
        tool["function"]["name"] == "calculator_times" and tool["function"]["description"] == "The product."
    )
    assert [m["role"] for m in steps[1].messages] == ["tool", "tool"]
    assert said(steps)[1:] == [("391error: unknown tool 'nothing'", None, False), ("", 1.0, True)]
    assert said(none) == [("", None, False), ("", None, True)]
    assert "ZeroDivisionError" in failed or "of the taskset" in failed
    assert "began another; expected one that grows" in second


def test_textarena_wordle_through_verifiers() -> None:
    taskset = {"id": "small_wordle", "game": "Wordle-v0"}
    first, second = rows(taskset=taskset, count=2, numbered=True)
    assert first["question"] != second["question"] and "Wordle" in first["question"][1]["content"]
    words = [f"[{word}]" for word in ("apple", "house", "table", "water")]
    config = verifiers("small_wordle")
    config.options["taskset"] = taskset
    (steps,) = play(config, (first, words))
    ended = next(i for i, step in enumerate(steps) if step.done)
    assert steps[ended].reward == 1.0 and all(
        "G" in text or "X" in text for text, _, _ in said(steps)[1:ended]
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server of OpenEnv."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([OPENENV, str(HERE / "echo_server.py"), str(port)])
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def openenv(**options: Any) -> EnvironmentConfig:
    kind = "trainer.environments.openenv:OpenEnv"
    return EnvironmentConfig(kind=kind, options=options, python=OPENENV, network=True)


def test_openenv(url: str) -> None:
    row = {"reset": {"seed": 3}}
    (steps,) = play(openenv(base_url=url, observation="text"), (row, ["x", "9", "9"]))
    shown = [text[0] for text, _, _ in said(steps)]
    turns = [shown[0], "x", shown[2]]
    again, other = play(openenv(base_url=url, observation="text"), (row, turns), ({"reset": {"seed": 5}}, []))
    expected = [
        (f"{d} = ", r, i == 3) for i, (d, r) in enumerate(zip(shown, (None, 1.0, 0.0, 1.0), strict=True))
    ]
    assert said(again) == expected and said(other) != said(again)[:1]
    functions = {"action": "echo_server:shout", "observation": "echo_server:first_word"}
    (steps,) = play(openenv(base_url=url, **functions), (row, [f"It is {shown[0]}"]))
    assert said(steps) == [(shown[0], None, False), (shown[1], 1.0, False)]
    assert steps[1].messages[0]["role"] == "tool"
    (steps,) = play(openenv(base_url=url), (row, [shown[0]]))
    assert json.loads(steps[0].messages[0]["content"])["text"] == f"{shown[0]} = "


def test_skyrl_gym() -> None:
    def config(env: str, **more: Any) -> EnvironmentConfig:
        kind, options = "trainer.environments.skyrl:SkyRL", {"env": env, **more}
        return EnvironmentConfig(kind=kind, options=options, python=VERIFIERS, network=True)

    row = {"question": "7 + 8?", "answer": 15}
    once, twice, never = play(
        config("skyrl_sum:Sum", config={"share": 0.5}), (row, ["15"]), (row, ["16", "15"]), (row, ["1", "2"])
    )
    assert said(once) == [("Go on.", None, False), ("", 1.0, True)]
    assert said(twice)[1:] == [("Again.", 0.0, False), ("", 0.5, True)] and said(never)[-1] == ("", 0.0, True)
    row = {"question": "7 + 8?", "reward_spec": {"ground_truth": "15"}}
    right, wrong = play(config("gsm8k"), (row, ["It is\n#### 15"]), (row, ["#### 16"]))
    assert said(right)[-1] == ("", 1.0, True) and said(wrong)[-1] == ("", 0.0, True)


def test_a_run_on_a_taskset_of_verifiers(tmp_path: Path) -> None:
    lines = [json.dumps(row) + "\n" for row in rows(taskset={"id": "last_digit"}, count=100)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    flags = f"""--recipe tiny --task last_digit.yaml --data.source {tmp_path}/rows.jsonl --data.held_out 4
    --environment.python {VERIFIERS} --environment.processes 4 --pipeline.prompts_per_step 4
    --pipeline.steps 2 --evaluation.every 2 --run-dir {tmp_path}/run"""
    subprocess.run([sys.executable, "-m", "trainer.main", *flags.split()], check=True, cwd=HERE)
    steps = metrics(tmp_path / "run", "learner/loss")
    assert len(steps) == 2
    assert all(row["environment/error"] == row["environment/unscored"] == 0 for row in steps)
