"""bench.pipeline.splits: what it prints and writes, and the rates that it reads off a run made by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bench.pipeline import splits as pipeline
from bench.pipeline.lengths import lognormal_lengths
from bench.pipeline.measured_run import Interval, Speed, read_run
from bench.pipeline.simulate import Scheme
from bench.pipeline.splits import fit_engine
from trainer.controller.journal import Journal
from trainer.launcher.placement import Split
from trainer.types import Group, Prompt, Rollout

SMALL = [
    "--devices=3",
    "--prompts=4",
    "--completions=2",
    "--mean=50",
    "--p95=100",
    "--longest=200",
    "--steps=6",
]


def test_the_command_writes_tables_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, picture = tmp_path / "out.json", tmp_path / "out.png"
    pipeline.main([*SMALL, "--k=0,2", "--learner=1", f"--json={record}", f"--png={picture}"])
    result, text = json.loads(record.read_text()), capsys.readouterr().out
    schemes = ["PipelineRL-0", "PipelineRL-2", "PPO-off-policy-2"]
    assert [(r["scheme"], r["split"]) for r in result["records"]] == [
        (scheme, split) for scheme in schemes for split in ("2+1", "1+2")
    ]
    for r in result["records"]:
        assert f"{r['steps_per_hour']:.2f}" in text and r["lag_max"] <= 2
        assert sum(r["lag"].values()) == pytest.approx(1) and 0 <= r["engine_idle"] <= 1
    best = max(result["records"], key=lambda r: r["steps_per_hour"])
    assert (
        f"best of all: {best['scheme']} on {best['split']}" in text and text.count(" *") == len(schemes) + 1
    )
    for constant in result["constants"].values():
        assert constant["source"] and constant["source"] in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_engines_rate_is_fitted_to_what_was_measured() -> None:
    # 10 ms a step and 1 ms a sequence: 1 -> 1/.011 tokens/s, 10 -> 10/.020, 90 -> 90/.1
    step, token = fit_engine(f"1:{1 / 0.011},10:{10 / 0.020},90:900")
    assert step == pytest.approx(0.010) and token == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--model=9b"], "expected one of"),
        (["--k=a"], "whole numbers from 0 on"),
        (["--k=-1"], "whole numbers from 0 on"),
        (["--devices=1"], "expected 2 devices or more"),
        (["--learner=8"], "leaves one to the engine"),
        (["--learner=0"], "leaves one to the engine"),
        (["--prompts=0"], "--prompts 0: expected 1 or more"),
        (["--push-s=-1"], "--push-s -1: expected 0 or more"),
        (["--mean=100", "--p95=50"], "--mean 100 --p95 50: no log-normal"),
        (["--train-tokens-per-s=0"], "a rate above 0"),
        (["--engine-rate=1:x"], "SEQUENCES:TOKENS/S"),
        (["--engine-rate=1:5"], "two points or more"),
        (["--run", "nowhere"], "expected the folder of a training run"),
        (["--rates-from=a"], "--rates-from needs --run"),
        (["--run", "a", "--png=x.png"], "do not go with --run"),
    ],
)
def test_bad_options_say_what_was_expected(options: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        pipeline.main(options)


def test_work_on_shared_cores_is_wall_time_at_the_speed_of_all_who_are_busy() -> None:
    busy = {"engine": [Interval(0, 4)], "learner": [Interval(2, 6)], "controller": [Interval(3, 4)]}
    speed = Speed(busy, {"engine": 2, "learner": 2, "controller": 1}, cores=2)
    # 0–2 alone at 1, 2–3 with 4 threads at 1/2, 3–4 with 5 at 2/5, 4–6 alone
    assert speed.work(busy["engine"]) == pytest.approx(2 + 0.5 + 0.4)
    assert speed.work(busy["learner"]) == pytest.approx(0.5 + 0.4 + 2)
    assert speed.mean([Interval(2, 3), Interval(3, 4)]) == pytest.approx(0.45)
    own = Speed(busy, {"engine": 2, "learner": 2, "controller": 1}, cores=0)
    assert own.work(busy["engine"]) == 4


# A step on policy, stage by stage, in seconds.
STAGES = {
    "report": 0.25, "push": 0.5, "issue": 0.125, "generate": 8.0, "verify": 0.375, "build": 0.75,
    "pack": 0.5, "forward_backward": 3.0, "optimizer": 0.25, "publish": 0.25,
}  # fmt: skip
PROMPTS, COMPLETIONS, LENGTH, STEPS = 2, 4, 10, 12


def make_run(folder: Path, cores: int = 0) -> float:
    """A run of PipelineRL-0 with these stages, on shared cores or with engines of 1 and 2
    GPUs; returns the seconds of a step."""
    spans, rows, now = [], [], 5.0

    def during(roles: tuple[str, ...], state: str, seconds: float) -> None:
        nonlocal now
        for role in ("learner", *engines):
            spans.append(
                {
                    "role": role,
                    "state": state if role in roles else "idle",
                    "start": now,
                    "end": now + seconds,
                }
            )
        now += seconds

    engines = ("engine",) if cores else ("engine", "engine-1")
    rows.append({"step": 0, "time": now, "eval/pass_rate": 0.5})
    for step in range(1, STEPS + 1):
        began = now
        if step > 1:
            during((), "idle", STAGES["report"])
            rows[-1]["time"] = now
            during(engines, "weight_update", STAGES["push"])
        during((), "idle", STAGES["issue"])
        during(engines, "generate", STAGES["generate"])
        during((), "idle", STAGES["verify"])
        waited = now - began - (STAGES["report"] if step > 1 else 0)
        during((), "idle", STAGES["build"])
        during((), "idle", STAGES["pack"])
        for state in ("forward_backward", "optimizer", "publish"):
            during(("learner",), state, STAGES[state])
        rows.append({
            "step": step, "time": now, "train/wait_s": waited, "learner/tokens": 40.0,
            "learner/input_tokens": 60.0, "lag/histogram": {"0": 80},
            "learner/seconds": STAGES["pack"] + STAGES["forward_backward"] + STAGES["optimizer"],
        })  # fmt: skip
    journal = Journal(folder / "journal")
    prompt = Prompt("p", "1 + 1", (1, 2), "2", {})
    for group_id in range(PROMPTS * STEPS):
        versions = np.full(LENGTH, group_id // PROMPTS, np.int32)
        rollout = Rollout(
            np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.float32), versions, np.ones(LENGTH, np.bool_),
            "2", 1.0, "correct", truncated=False, interrupted=False,
        )  # fmt: skip
        journal.finished(Group(group_id, 0, prompt, (rollout,) * COMPLETIONS))
    journal.close()
    settings = {"max_lag": 0, "prompts_per_step": PROMPTS, "completions_per_prompt": COMPLETIONS}
    config = {
        "pipeline": settings, "engine": {"slots": 8, "threads": 0}, "learner": {"threads": 0},
        "evaluation": {"every": 100},
    }  # fmt: skip
    devices = {"learner": 1.0, "engine": 1.0, "engine-1": 2.0, "controller": 0.0}
    if cores:
        devices = {"learner": cores / 2, "engine": cores / 2, "controller": 0.0}
    books = {
        "unit": "core-hours" if cores else "GPU-hours",
        "roles": {role: {"devices": n} for role, n in devices.items()},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "ledger.json").write_text(json.dumps(books))
    for name, lines in (("metrics", rows), ("timeline", spans)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return sum(STAGES.values())


def test_the_rates_of_a_run_are_read_off_its_books(tmp_path: Path) -> None:
    step = make_run(tmp_path)
    run = read_run(tmp_path)
    assert run.scheme == Scheme("pipeline", 0) and run.split == Split(1, 2)
    assert 3600 / run.steps_per_hour == pytest.approx(step) and run.lag_mean == 0
    assert run.learner_idle == pytest.approx(1 - 4 / step)  # packing is work
    assert run.engine_idle == pytest.approx(1 - 8.5 / step)
    r = run.rates
    read = {
        "report": r.report_s,
        "push": r.push_s,
        "issue": r.issue_s,
        "verify": r.verify_s,
        "build": r.build_s,
    }
    assert read == pytest.approx({name: STAGES[name] for name in read})
    assert r.train_token_s * 60 == pytest.approx(3.75) and r.step_s == pytest.approx(0.25)
    assert r.train_scatter == pytest.approx([1] * len(r.train_scatter)) and len(r.train_scatter) == STEPS - 2
    assert r.decode_scatter == pytest.approx([1] * len(r.decode_scatter)) and len(r.decode_scatter) > 5
    assert r.slots == 8 and run.work.trained_share == pytest.approx(60 / 80)


@pytest.mark.parametrize("cores", [0, 2])
def test_a_run_is_predicted_by_its_own_rates(
    tmp_path: Path, cores: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, cores)
    assert read_run(tmp_path).split == (Split(2, 2, 2) if cores else Split(1, 2))
    record = tmp_path / "out.json"
    pipeline.main(["--run", str(tmp_path), f"--json={record}"])
    (result,) = json.loads(record.read_text())["runs"]
    assert {n: f["error"] for n, f in result["figures"].items() if "lag" not in n} == pytest.approx(
        {"steps per hour": 0, "learner idle": 0, "engine idle": 0}, abs=1e-6
    )
    assert "over 15%" not in capsys.readouterr().out


def test_a_decoding_steps_own_time_can_be_given(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = read_run(tmp_path, decode_step_s=0.3)
    # two engines of 8 s a step: 16 s for 80 tokens; 10 decoding steps of .3 s on each leave 10 s
    assert run.rates.decode_token_s * 80 == pytest.approx(10)
    with pytest.raises(SystemExit, match="more than all the time"):
        read_run(tmp_path, decode_step_s=0.9)


def test_a_resumed_or_short_run_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)

    def with_lines(chosen: list[str]) -> Any:
        metrics.write_text("".join(chosen))
        return pytest.raises(SystemExit, match="expected an unbroken run")

    with with_lines(lines[:4]):
        read_run(tmp_path)
    with with_lines([*lines[7:], *lines[1:7]]):
        read_run(tmp_path)


def test_lengths_have_the_mean_and_percentile_asked_for() -> None:
    lengths = lognormal_lengths(1000, 2500, 10**9, 16)
    assert lengths.mean() == pytest.approx(1000, rel=0.01)
    assert np.percentile(lengths, 95) == pytest.approx(2500, rel=0.02)
    assert lognormal_lengths(1000, 2500, 2000, 16).max() == 2000
    assert (lognormal_lengths(50, 50, 100, 4) == 50).all()
    with pytest.raises(ValueError, match="95th percentile 900: expected a percentile of 1 to 3"):
        lognormal_lengths(1000, 900, 10, 4)
