"""bench.pipeline: runs in virtual time against cases worked by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import harness
from bench.pipeline import splits
from bench.pipeline.splits import fit_engine
from bench.pipeline.timed import Rates, Workload
from bench.pipeline.virtual_run import Scheme, lognormal_lengths, run
from trainer.config import Config, EngineConfig, PipelineConfig
from trainer.launcher.advice import ASSUMED, assumed_rates, assumed_step
from trainer.launcher.placement import Split

SMALL = [
    "--devices=3", "--prompts=4", "--completions=2", "--mean=50", "--p95=100", "--longest=200",
    "--processes=1",
]  # fmt: skip
# 2 prompts × 2 completions of 10 tokens: 40 tokens a step
WORK = Workload(prompts=2, completions=2, lengths=np.full(1, 10))
# 0.1 s a decoding step: 1 s for a batch, and 0.05 s a token in training: 2 s for a step on one device
RATES = {"decode_step_s": 0.1, "decode_token_s": 0.0, "slots": 1000, "train_token_s": 0.05}
PER_TOKEN = {"decode_step_s": 0, "decode_token_s": 0.1}
STAGES_OF_A_STEP = {"push_s": 0.25, "step_s": 0.5, "prefill_token_s": 0.1}


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
    assert 3600 / out.steps_per_hour == pytest.approx(prefill + generate + train + 0.25 + 0.5)


def test_weights_swap_in_mid_sequence() -> None:
    # The learner takes 2.5 s, the pushed version reaches sequences of 10 s at their tokens 1, 26, 51 ...
    work = Workload(prompts=1, completions=2, lengths=np.full(1, 100))
    rates = Rates(**RATES | {"train_token_s": 0.0125})
    out = run(work, rates, Split(1, 1), Scheme("pipeline", 4), steps=12)
    assert 3600 / out.steps_per_hour == pytest.approx(2.5, rel=0.02)
    assert [out.lag[k] for k in (1, 2, 3, 4)] == pytest.approx([0.25] * 4, abs=0.02) and out.lag_max == 4


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


def test_the_command_writes_tables_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(splits, "STEPS", 6)
    assert harness.run("pipeline", splits, [*SMALL, "--k=0,2", "--record"]) == 0
    _, rows = harness.read(tmp_path / "pipeline.jsonl")
    text = capsys.readouterr().out
    schemes = ["PipelineRL-0", "PipelineRL-2", "PPO-off-policy-2"]
    assert [(r["scheme"], r["split"]) for r in rows] == [
        (scheme, split) for scheme in schemes for split in ("2+1", "1+2")
    ]
    for r in rows:
        assert f"{r['steps_per_hour']:.2f}" in text and r["lag_max"] <= 2
        assert sum(r["lag"].values()) == pytest.approx(1) and 0 <= r["engine_idle"] <= 1
    best = max(rows, key=lambda r: r["steps_per_hour"])
    assert f"best of all: {best['scheme']} on {best['split']}" in text
    assert text.count(" * |") == len(schemes)
    for constant in (splits.CONSTANTS["slots"], splits.PUSH, *ASSUMED.values()):
        assert constant.source in text
    assert "mean = 50 tokens per completion: GIVEN" in text


def test_the_engines_rate_is_fitted_to_what_was_measured() -> None:
    # 10 ms a step and 1 ms a sequence: 1 -> 1/.011 tokens/s, 10 -> 10/.020, 90 -> 90/.1
    step, token = fit_engine(f"1:{1 / 0.011},10:{10 / 0.020},90:900")
    assert step == pytest.approx(0.010) and token == pytest.approx(0.001)


def test_lengths_have_the_mean_and_percentile_asked_for() -> None:
    lengths = lognormal_lengths(1000, 2500, 10**9)
    assert lengths.mean() == pytest.approx(1000, rel=0.01)
    assert np.percentile(lengths, 95) == pytest.approx(2500, rel=0.02)
    assert lognormal_lengths(1000, 2500, 2000).max() == 2000
    assert (lognormal_lengths(50, 50, 100, 64) == 50).all()
    with pytest.raises(ValueError, match="95th percentile 900: expected a percentile of 1 to 3"):
        lognormal_lengths(1000, 900, 10)
