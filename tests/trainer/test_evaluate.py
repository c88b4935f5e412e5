"""Promises of `python -m trainer.evaluate`: a run's own numbers again, other questions, and nothing lost."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small import FLAGS, MAIN, Begin, environment, fork_roles, metrics, run, started, until

from trainer.evaluate import record
from trainer.evaluate.__main__ import decided, evaluate, main
from trainer.evaluate.question import question_of
from trainer.evaluate.view import table
from trainer.jsonl import read_lines
from trainer.scaling.reading.options import ReadOptions
from trainer.scaling.reading.read import read_inputs

STEPS = [0, 2, 4]
OF_THE_MACHINE = {"seconds", "device_hours", "gain_per_hour"}
TRAINED = (
    "--pipeline.max_lag=0 --logging.checkpoint_every=2 --logging.keep_checkpoints=9 --evaluation.samples=4"
)


@pytest.fixture(scope="module")
def trained(begin: Begin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a checkpoint at each evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    run(begin(folder / "run", *TRAINED.split()), folder)
    return folder / "run"


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("evaluations")))


def ask(tmp: Path, *argv: str, code: int = 0) -> tuple[str, str]:
    return run([*MAIN, *argv], tmp, code, main)


def numbers(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The scores in a line of metrics.jsonl or results.jsonl."""
    scores = {key.removeprefix(prefix): x for key, x in row.items() if key.startswith(prefix)}
    return {key: x for key, x in scores.items() if key not in OF_THE_MACHINE}


def test_a_run_s_checkpoints_give_its_own_numbers_and_its_curve_again_bit_for_bit(
    trained: Path, tmp_path: Path
) -> None:
    before = {name: (trained / name).read_bytes() for name in ("metrics.jsonl", "ledger.json")}
    out, err = ask(tmp_path, str(trained))
    folder, evaluations = trained / "evaluations" / "held_out", metrics(trained, "eval/pass_rate")
    rows = record.results(folder)
    assert [row["step"] for row in rows] == [row["step"] for row in evaluations] == STEPS
    for row, own in zip(rows, evaluations, strict=True):
        assert numbers(row, "eval/held_out/") == numbers(own, "eval/")
        assert row["compute/total"] == own["compute/total"]
        assert f"{own['eval/pass_rate']:.3f} ± {own['eval/pass_rate_se']:.3f}" in out
    assert len({row["eval/held_out/pass_rate"] for row in rows}) > 1  # or the weights did not matter

    (own,) = read_inputs([str(trained)])
    (again,) = read_inputs([str(trained)], ReadOptions(reward_column="eval/held_out/pass_rate"))
    assert again.curve == own.curve and again.settings == own.settings
    assert {name: (trained / name).read_bytes() for name in before} == before
    books = json.loads((folder / "ledger.json").read_text())
    assert books["compute"]["total"] == 0 < books["compute"]["evaluation"] and "learner" not in books["roles"]

    lines, later = (
        {line["step"]: line for line in read_lines(f / "held_out.jsonl")} for f in (trained, folder)
    )
    assert later == {step: lines[step] for step in STEPS}  # for `scaling inference --set held_out`
    samples = list(read_lines(folder / "samples.jsonl"))
    for row in rows:
        outcomes = [c["outcome"] for s in samples if s["step"] == row["step"] for c in s["completions"]]
        assert len(outcomes) == 8 * 4
        assert outcomes.count("correct") / len(outcomes) == row["eval/held_out/pass_rate"]
    page = (folder / "report.html").read_text()
    assert all(f"{row['eval/held_out/pass_rate']:.3f}" in page for row in rows)
    assert samples[0]["prompt"] in page and "http" not in page.replace("http-equiv", "")
    report = (trained / "report.html").read_text()  # of the run, written anew
    assert "Checkpoints evaluated after training" in report and '"evaluations":["held_out"]' in report
    assert ask(tmp_path, str(trained))[1] == ""  # nothing is left to do
    assert "CPU cores for 1 engine" in err


def test_a_model_is_asked_what_a_run_would_ask_it_before_step_1(
    trained: Path, begin: Begin, tmp_path: Path
) -> None:
    settings = yaml.safe_load((trained / "config.yaml").read_text())
    data, model = settings["data"]["source"], settings["model"]["path"]
    flags = [
        f"--data.source={data}",
        "--model.dtype=float32",
        "--evaluation.samples=4",
        "--evaluation.pass_at=[1,4]",
    ]
    asked = [flag for flag in FLAGS.split() if not flag.startswith("--evaluation.samples")]
    out, _ = ask(tmp_path, model, *asked, *flags, f"--out={tmp_path / 'base'}")
    (row,) = record.results(tmp_path / "base")
    scores = numbers(row, next(key for key in row if key.endswith("pass_rate")).removesuffix("pass_rate"))
    own = numbers(metrics(trained, "eval/pass_rate")[0], "eval/")
    assert {key: scores[key] for key in own} == own
    assert scores["pass@1"] == pytest.approx(own["pass_rate"]) and scores["pass@4"] >= scores["pass@1"]
    assert "pass@4" in out and "compute/total" not in row


@pytest.mark.parametrize(("engine", "set_"), [({}, False), ({"slots": 7}, True)])
def test_slots_that_a_task_sets_are_not_derived_again(
    engine: dict[str, int], set_: bool, trained: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load((trained / "config.yaml").read_text())
    task = {"data": {"source": config["data"]["source"]}, "engine": engine}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    question = question_of(config["model"]["path"], {"task": str(tmp_path / "task.yaml")})
    assert question.slots_are_set == set_ and question_of(str(trained), {}).slots_are_set


def test_another_task_has_its_own_prompts_and_verifier_and_keeps_the_run_s_settings(
    trained: Path, tmp_path: Path
) -> None:
    rows = [{"problem": f"{i}+9=", "solution": str(i)} for i in range(5)]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "data": {
            "source": str(tmp_path / "exam.jsonl"),
            "prompt_column": "problem",
            "answer_column": "solution",
        },
        "verifier": {"kind": "exact", "wrong_reward": -0.5},
        "engine": {"max_new_tokens": 3, "slots": 7},
        "evaluation": {"samples": 2},
    }
    (tmp_path / "exam.yaml").write_text(yaml.safe_dump(task))
    out, err = ask(tmp_path, f"{trained}@4", "--task", str(tmp_path / "exam.yaml"))
    assert f"engine.max_new_tokens: as in {trained}, not as in --task" in err
    folder = trained / "evaluations" / "exam"
    (row,) = record.results(folder)
    assert (row["eval/exam/prompts"], row["eval/exam/samples"]) == (5, 2)  # all, as there are no others
    samples = list(read_lines(folder / "samples.jsonl"))
    assert {s["prompt"] for s in samples} == {row["problem"] for row in rows}
    completions = [c for s in samples for c in s["completions"]]
    assert np.mean([c["reward"] for c in completions]) == pytest.approx(row["eval/exam/mean_reward"])
    assert f"{row['eval/exam/mean_reward']:+.3f} ± " in out
    assert {c["reward"] for c in completions} <= {1.0, -0.5} and max(c["tokens"] for c in completions) > 3
    (reading,) = read_inputs([str(trained)], ReadOptions(reward_column="eval/exam/pass_rate"))
    assert reading.settings["scorer"] == "exact" and [p.step for p in reading.curve.evaluations] == [4]


REFUSED = {
    "{run}@3": "evaluate: {run} has no checkpoint of step 3; it has those of 2, 4",
    "{run}/none@3": "{run}/none holds no run (no config.yaml); expected RUN@STEP, a run or a model",
    "tiny": "tiny holds no run, so it must be a model: ask it by --task or --data.source",
    "no-such-model --task addition": "model.path 'no-such-model'",
    "{run} --recipe grpo": "--recipe is for a model that is no run's",
    "{run} --name a/b": "--name 'a/b': expected a name",
    "{run} --model.path x": "expected --out FOLDER and WHAT as the model",
    "{run} --evaluation.pass_at [9]": "evaluation.pass_at: 9; expected at most evaluation.samples",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_command_is_one_line(words: str, trained: Path, tmp_path: Path) -> None:
    _, error = ask(tmp_path, *words.format(run=trained).split(), code=2)
    assert REFUSED[words].format(run=trained) in error and error.count("\n") == 1


def test_a_dry_run_says_what_would_be_asked_of_which_checkpoints_and_starts_nothing(
    copy: Path, tmp_path: Path
) -> None:
    out, _ = ask(tmp_path, str(copy), "--evaluation.samples", "2", "--dry-run")
    asked = out.splitlines()
    assert [line.split(":")[0] for line in asked[:3]] == [f"step {step}" for step in STEPS]
    assert "evaluation.samples: 2" in asked and asked[-1] == f"results: {copy}/evaluations/held_out"
    assert not (copy / "evaluations").exists()


def test_results_of_another_question_are_not_mixed(copy: Path, tmp_path: Path) -> None:
    ask(tmp_path, f"{copy}@2")
    _, error = ask(tmp_path, str(copy), "--evaluation.samples", "2", code=2)
    assert "holds results with another evaluation.samples; give another --name or --out" in error
    _, error = ask(tmp_path, f"{copy}@2", "--data.held_out", "9", "--name", "more")
    assert "data.held_out is above the run's 8: it may have trained on the rest" in error
    data = yaml.safe_load((copy / "config.yaml").read_text())["data"]["source"]
    elsewhere = question_of(f"{copy}@2", {"data.held_out_source": data, "data.held_out": "9"})
    assert not elsewhere.notices  # that source is for evaluations alone
    ask(tmp_path, str(copy / "checkpoints" / "step-000004"))  # a checkpoint's folder is RUN@STEP
    assert [row["step"] for row in record.results(copy / "evaluations" / "held_out")] == [2, 4]


def test_a_damaged_checkpoint_is_left_out_of_the_run_and_refused_alone(copy: Path, tmp_path: Path) -> None:
    (copy / "checkpoints" / "step-000002" / "state" / ".metadata").unlink()  # no engine reads it
    file = copy / "checkpoints" / "step-000004" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    _, error = ask(tmp_path, f"{copy}@4", code=2)
    assert "step-000004 is damaged (model.safetensors is corrupt: its SHA-256 differs); give another" in error
    _, error = ask(tmp_path, str(copy))
    assert "step-000004 is damaged" in error and "step 4 is left out" in error
    assert [row["step"] for row in record.results(copy / "evaluations" / "held_out")] == [0, 2]


def test_a_broken_off_evaluation_goes_on_with_what_is_missing(copy: Path, tmp_path: Path) -> None:
    ask(tmp_path, str(copy))
    folder = copy / "evaluations" / "held_out"
    whole = {name: (folder / name).read_text().splitlines() for name in ("results.jsonl", "samples.jsonl")}
    (folder / "results.jsonl").write_text("\n".join(whole["results.jsonl"][:2]) + '\n{"step": 4, "ev')
    ask(tmp_path, str(copy))
    again = {name: (folder / name).read_text().splitlines() for name in whole}
    assert again["results.jsonl"][:2] == whole["results.jsonl"][:2]
    first, second = (numbers(json.loads(w["results.jsonl"][2]), "eval/held_out/") for w in (whole, again))
    assert first == second
    assert sorted(again["samples.jsonl"]) == sorted(whole["samples.jsonl"])


@pytest.mark.parametrize(
    "deleted", [["step-000004"], ["step-000002", "step-000004"]], ids=["later", "the first"]
)
def test_a_checkpoint_that_its_run_deletes_meanwhile_costs_one_line(
    deleted: list[str], copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first one is what the engines start with."""
    question = question_of(str(copy), {})
    checkpoints = [c for c in question.checkpoints if c.step or len(deleted) == 1]
    config, devices = decided(question.config, slots_are_set=True)
    for name in deleted:
        shutil.rmtree(copy / "checkpoints" / name)
    with pytest.MonkeyPatch.context() as patch:
        environment(tmp_path)
        fork_roles(tmp_path, patch)
        code = evaluate(replace(question, config=config, checkpoints=tuple(checkpoints)), devices)
    error = capfd.readouterr().err
    assert "deleted meanwhile" in error and "logging.keep_at" in error
    assert code == (0 if len(deleted) == 1 else 1)
    done = [row["step"] for row in record.results(copy / "evaluations" / "held_out")]
    assert done == ([0, 2] if len(deleted) == 1 else [])


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(copy: Path, tmp_path: Path) -> None:
    argv = [*MAIN[:2], "trainer.evaluate", str(copy), "--evaluation.samples", "600"]
    results = copy / "evaluations" / "held_out" / "results.jsonl"
    with started(argv, tmp_path) as process:
        until(lambda: results.exists() and results.read_text().count("\n") == 1, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert "the same command goes on" in (tmp_path / "err.log").read_text()
    done = [row["step"] for row in record.results(results.parent)]
    assert 0 in done and 4 not in done
    ask(tmp_path, str(copy), "--evaluation.samples", "600")
    assert [row["step"] for row in record.results(results.parent)] == STEPS


def test_the_table_has_a_row_for_each_set_and_the_reward_s_parts_beside_it() -> None:
    scores = {"pass_rate": 0.5, "pass_rate_se": 0.1, "prompts": 4, "prompts_se": 0.2, "reward/judge": 0.25}
    row = {f"eval/x/{part}{key}": x for part in ("", "math/aime/") for key, x in scores.items()}
    head, *cells = table([{"step": 3, "compute/total": 0.5} | row], "x", "GPU-hours")
    assert head == ["step", "GPU-hours", "set", "pass rate", "reward/judge", "prompts"]
    assert cells == [["3", "0.5", part, "0.500 ± 0.100", "0.250", "4"] for part in ("all", "math/aime")]
