"""bench.pipeline: runs in virtual time against cases worked by hand, and what is read off a real run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bench.pipeline import __main__ as pipeline
from bench.pipeline.__main__ import fit_engine
from bench.pipeline.measured_run import read_run
from bench.pipeline.timed import Rates, Workload
from bench.pipeline.virtual_run import Scheme, lognormal_lengths, run
from trainer.config import Config, EngineConfig, PipelineConfig
from trainer.controller.journal import Journal
from trainer.launcher.advice import ASSUMED, assumed_rates, assumed_step
from trainer.launcher.placement import Split
from trainer.types import Group, Prompt, Rollout

SMALL = [
    "--devices=3", "--prompts=4", "--completions=2", "--mean=50", "--p95=100", "--longest=200", "--steps=6",
]  # fmt: skip
# 2 prompts × 2 completions of 10 tokens: 40 tokens a step
WORK = Workload(prompts=2, completions=2, lengths=np.full(1, 10))
# 0.1 s a decoding step: 1 s for a batch, and 0.05 s a token in training: 2 s for a step on one device
RATES = {"decode_step_s": 0.1, "decode_token_s": 0.0, "slots": 1000, "train_token_s": 0.05}
PER_TOKEN = {"decode_step_s": 0, "decode_token_s": 0.1}
STAGES_OF_A_STEP = {"push_s": 0.25, "step_s": 0.5, "verify_s": 0.125, "build_s": 0.0625, "report_s": 1.0,
                    "issue_s": 2.0, "prefill_token_s": 0.1}  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "split", "changes", "seconds", "learner_idle", "engine_idle"),
    [
        (Scheme("pipeline", 0), Split(1, 1), {}, 3, 1 / 3, 2 / 3),  # in turns
        (Scheme("pipeline", 1), Split(1, 1), {}, 2, 0, 1 / 2),  # the engine's 1 s is hidden
        (Scheme("ppo", 1), Split(1, 1), {}, 3, 1 / 3, 2 / 3),  # on policy
        # Four batches decode side by side, then come four steps of 2 s.
        (Scheme("ppo", 4), Split(1, 1), {}, (1 + 8) / 4, 1 / 9, 8 / 9),
        (Scheme("pipeline", 0), Split(1, 1), {"slots": 1}, 4 + 2, 4 / 6, 2 / 6),  # one after another
        # 4 sequences at 0.1 s each and step: two on each of two engines, 2 s; training on two devices.
        (Scheme("pipeline", 0), Split(2, 2), PER_TOKEN, 2 + 1, 2 / 3, 1 / 3),
        (Scheme("pipeline", 0), Split(2, 2, 2), {}, 3, 1 / 3, 2 / 3),  # shared cores: never both
        # 1 s of generation takes 2 s beside the learner, which gets 1 s done meanwhile, and 1 s more alone.
        (Scheme("pipeline", 1), Split(2, 2, 2), {}, 3, 0, 1 / 3),
        (Scheme("pipeline", 1), Split(1, 1, 2), {}, 2, 0, 1 / 2),  # a core for each
    ],
)  # fmt: skip
def test_a_step_takes_what_was_worked_by_hand(
    scheme: Scheme,
    split: Split,
    changes: dict[str, Any],
    seconds: float,
    learner_idle: float,
    engine_idle: float,
) -> None:
    out = run(WORK, Rates(**RATES | changes), split, scheme, steps=8)
    assert 3600 / out.steps_per_hour == pytest.approx(seconds)
    assert (out.learner_idle, out.engine_idle) == pytest.approx((learner_idle, engine_idle), abs=1e-6)
    assert sum(out.lag.values()) == pytest.approx(1) and out.lag_max <= max(0, scheme.batches_open - 1)
    assert out.tokens == 40


def test_every_stage_of_an_on_policy_step_adds_up() -> None:
    work = Workload(prompts=2, completions=2, lengths=np.full(1, 10), prompt_tokens=3.0)
    out = run(work, Rates(**RATES | STAGES_OF_A_STEP), Split(1, 1), Scheme("pipeline", 0), steps=4)
    prefill, generate, train = 2 * 3 * 0.1, 1.0, (40 + 2 * 3) * 0.05
    stages = sum(STAGES_OF_A_STEP.values()) - STAGES_OF_A_STEP["prefill_token_s"]
    assert 3600 / out.steps_per_hour == pytest.approx(prefill + generate + train + stages)


def test_weights_swap_in_mid_sequence() -> None:
    # The learner takes 2.5 s, the pushed version reaches sequences of 10 s at their tokens 1, 26, 51 ...
    work = Workload(prompts=1, completions=1, lengths=np.full(1, 100))
    rates = Rates(**RATES | {"train_token_s": 0.025})
    out = run(work, rates, Split(1, 1), Scheme("pipeline", 4), steps=12)
    assert 3600 / out.steps_per_hour == pytest.approx(2.5, rel=0.02)
    assert [out.lag[k] for k in (1, 2, 3, 4)] == pytest.approx([0.25] * 4, abs=0.02) and out.lag_max == 4


@pytest.mark.parametrize("scheme", [Scheme("pipeline", k) for k in (0, 1, 4)] + [Scheme("ppo", 2)], ids=str)
def test_faster_stages_never_make_a_slower_run(scheme: Scheme) -> None:
    lengths = np.random.default_rng(0).integers(1, 61, 500)
    work = Workload(prompts=8, completions=4, lengths=lengths, prompt_tokens=5.0)
    slow = RATES | {
        "decode_token_s": 0.002,
        "slots": 24,
        "push_s": 0.4,
        "step_s": 0.2,
        "prefill_token_s": 0.01,
    }
    base = run(work, Rates(**slow), Split(1, 1), scheme, steps=8)
    for name in ("decode_token_s", "train_token_s", "push_s", "step_s"):
        out = run(work, Rates(**slow | {name: 0.5 * slow[name]}), Split(1, 1), scheme, steps=8)
        assert out.steps_per_hour >= 0.99 * base.steps_per_hour, name


@pytest.mark.parametrize(("kind", "k"), [("pipeline", -1), ("ppo", 0)])
def test_schemes_have_a_least_k(kind: str, k: int) -> None:
    with pytest.raises(ValueError, match="expected k of at least"):
        Scheme(kind, k)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("longest", [800, 14336])
@pytest.mark.parametrize("scheme", [Scheme("pipeline", 1), Scheme("pipeline", 4), Scheme("ppo", 4)], ids=str)
def test_the_closed_form_of_the_advice_agrees_with_the_virtual_run(scheme: Scheme, longest: int) -> None:
    k, kind = max(1, scheme.k), "ppo_off_policy" if scheme.kind == "ppo" else "pipeline_rl"
    config = Config(
        engine=EngineConfig(kind="vllm", slots=64, max_new_tokens=longest),
        pipeline=PipelineConfig(
            prompts_per_step=16, completions_per_prompt=8, max_lag=scheme.k, minibatches=k,
            scheme=kind,  # type: ignore[arg-type]  # both are of its Literal
        ),
    )  # fmt: skip
    mean = ASSUMED["mean_share"].value * longest
    work = Workload(
        prompts=16, completions=8, lengths=lognormal_lengths(mean, 0.85 * longest, longest),
        prompt_tokens=ASSUMED["prompt_tokens"].value, unit=longest // 100,
    )  # fmt: skip
    rates = assumed_rates(8 * 10**9, 36, 1024, work.context)
    timed = Rates(slots=64, **{name: getattr(rates, name) for name in type(rates).__dataclass_fields__})
    splits = [Split(8 - e, e) for e in (2, 4, 5, 6)]
    made = {s: run(work, timed, s, scheme, steps=12).steps_per_hour for s in splits}
    closed = {s: 3600 / assumed_step(config, rates, s).step for s in splits}
    assert made[max(splits, key=lambda split: closed[split])] >= 0.95 * max(made.values())
    assert closed == pytest.approx(made, rel=0.25)


def test_the_command_writes_tables_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, picture = tmp_path / "out.json", tmp_path / "out.png"
    pipeline.main([*SMALL, "--k=0,2", "--learner=1", f"--json={record}"])
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
    pipeline.draw(result, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_engines_rate_is_fitted_to_what_was_measured() -> None:
    # 10 ms a step and 1 ms a sequence: 1 -> 1/.011 tokens/s, 10 -> 10/.020, 90 -> 90/.1
    step, token = fit_engine(f"1:{1 / 0.011},10:{10 / 0.020},90:900")
    assert step == pytest.approx(0.010) and token == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--k=a"], "whole numbers from 0 on"),
        (["--k=-1"], "whole numbers from 0 on"),
        (["--devices=1"], "expected 2 devices or more"),
        (["--learner=8"], "leaves one to the engine"),
        (["--learner=0"], "leaves one to the engine"),
        (["--prompts=0"], "--prompts is 0; expected at least 1"),
        (["--push-s=-1"], "--push-s is -1; expected at least 0"),
        (["--mean=100", "--p95=50"], "--mean 100 --p95 50: no log-normal"),
        (["--train-tokens-per-s=0"], "a rate above 0"),
        (["--engine-rate=1:x"], "SEQUENCES:TOKENS/S"),
        (["--engine-rate=1:5"], "two points or more"),
        (["--run", "nowhere"], "expected the folder of a training run"),
        (["--rates-from=a"], "--rates-from needs --run"),
        (["--run", "a", "--record"], "does not go with --run"),
    ],
)
def test_bad_options_say_what_was_expected(options: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        pipeline.main(options)


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
    one = read_run(tmp_path)
    assert one.scheme == Scheme("pipeline", 0) and one.split == Split(1, 2)
    assert 3600 / one.figures.steps_per_hour == pytest.approx(step) and one.figures.lag_mean == 0
    r = one.rates
    # Report, issue, verify, build and pack: nobody works.
    assert (r.push_s, r.build_s, r.slots) == pytest.approx((0.5, 0.25 + 0.125 + 0.375 + 0.75 + 0.5, 8))
    # Packing is no span of the learner here: it works 3.5 s a step on one GPU, two engines 8 s each.
    assert r.train_token_s * 80 == pytest.approx(3.5) and r.decode_token_s * 80 == pytest.approx(16)


@pytest.mark.parametrize("cores", [0, 2])
def test_a_run_is_predicted_by_its_own_rates(
    tmp_path: Path, cores: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, cores)
    record = tmp_path / "out.json"
    pipeline.main(["--run", str(tmp_path), f"--json={record}"])
    (result,) = json.loads(record.read_text())["runs"]
    assert result["split"] == str(Split(2, 2, 2) if cores else Split(1, 2))
    assert abs(result["figures"]["steps per hour"]["error"]) < 1e-6
    assert "over 15%" not in capsys.readouterr().out


def test_a_decoding_steps_own_time_can_be_given(tmp_path: Path) -> None:
    make_run(tmp_path)
    # two engines of 8 s a step: 16 s for 80 tokens; 10 decoding steps of .3 s on each leave 10 s
    assert read_run(tmp_path, decode_step_s=0.3).rates.decode_token_s * 80 == pytest.approx(10)
    with pytest.raises(SystemExit, match="more than all the time"):
        read_run(tmp_path, decode_step_s=0.9)


def test_a_resumed_or_short_run_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    for kept in (lines[:4], [*lines[7:], *lines[1:7]]):
        metrics.write_text("".join(kept))
        with pytest.raises(SystemExit, match="expected an unbroken run"):
            read_run(tmp_path)


def test_lengths_have_the_mean_and_percentile_asked_for() -> None:
    lengths = lognormal_lengths(1000, 2500, 10**9)
    assert lengths.mean() == pytest.approx(1000, rel=0.01)
    assert np.percentile(lengths, 95) == pytest.approx(2500, rel=0.02)
    assert lognormal_lengths(1000, 2500, 2000).max() == 2000
    assert (lognormal_lengths(50, 50, 100, 64) == 50).all()
    with pytest.raises(ValueError, match="95th percentile 900: expected a percentile of 1 to 3"):
        lognormal_lengths(1000, 900, 10)
