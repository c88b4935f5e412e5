"""bench.gpu_hours: the account by hand, sources beside constants, measured rates taken over."""

from pathlib import Path

import pytest

from bench import gpu_hours, harness
from bench.gpu_hours import account
from bench.sources import CURVES, TABLE_1
from trainer.accounting.kernel_cost import CONSTANTS, MODELS, PUBLISHED_HEADS, Head, Setting, Shape
from trainer.accounting.kernel_rates import measured_heads, read_rates
from trainer.scaling import Sigmoid

# 10 layers of 1,000,000 parameters; head 6 · 100 · 1,000 = 600,000 FLOP per token
SHAPE = Shape("toy", 100, 10, 5, 5, 10, 3_266, 1_000, "by hand")


def test_the_account_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # body: 10 · (100·10·20 + 3·100·3266) = 9,998,000 parameters → 59,988,000 FLOP;
    # attention: 10 layers · 12 · 20/2 tokens · 50 = 60,000 FLOP: 60,048,000 FLOP a token
    assert SHAPE.body_flops(20) == 60_048_000 and SHAPE.head_flops == 600_000
    # 1 PF/s · .5 = 5e14 FLOP/s: 3600 · 5e14 FLOP is one GPU-hour
    setting = Setting(
        peak_tflops=1000, body_mfu=0.5, batch=3e9, length=20, prompt=5, generators=3, trainers=1
    )
    body = 3e9 * 20 * 60_048_000 / (3600 * 5e14)  # 2.0016 GPU-hours
    slow, fast = Head("slow", 10, ""), Head("fast", 100, "")
    head = 3e9 * 15 * 600_000 / (3600 * 1e13)  # 0.75 GPU-hours at 10 TF/s, 0.075 at 100
    assert body == pytest.approx(2.0016) and head == pytest.approx(0.75)
    monkeypatch.setitem(MODELS, "toy", SHAPE)
    monkeypatch.setitem(CURVES, "toy", "toy")
    monkeypatch.setitem(TABLE_1, "toy", Sigmoid(0.3, 0.8, 1.0, 1000.0))
    a, b = (account("toy", each, slow, setting, 1000.0) for each in (slow, fast))
    assert a["head_share"] == pytest.approx(0.75 / 2.7516)
    assert a["trainer_gpu_hours_per_1000"] == pytest.approx(2751.6)
    assert a["run_gpu_hours_per_1000"] == pytest.approx(4 * 2751.6)  # three generators for one trainer
    assert b["run_gpu_hours_per_1000"] == pytest.approx(4 * 2751.6 - 675)
    factor = (4 * 2751.6 - 675) / (4 * 2751.6)
    assert a["cost_factor"] == 1.0 and b["cost_factor"] == pytest.approx(factor)
    assert a["reward"] == pytest.approx(0.55)  # at C_mid, with R0 = .3
    assert b["reward"] == pytest.approx(0.3 + 0.5 / (1 + factor))


def test_models_have_the_parameters_they_are_named_for() -> None:
    billions = {name: shape.body_parameters / 1e9 for name, shape in MODELS.items()}
    assert billions == pytest.approx({"0.6b": 0.44, "4b": 3.6, "8b": 6.95, "scout": 15.1}, rel=0.01)
    scout = MODELS["scout"]
    assert (scout.body_parameters + 2 * scout.hidden * scout.vocab) / 1e9 == pytest.approx(17, rel=0.02)


def test_the_command_prints_every_figure_with_its_source_and_takes_measured_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = harness.RESULTS / "compare-cpu-bfloat16.jsonl"
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert harness.run("gpu_hours", gpu_hours, ["--models=8b,0.6b", f"--kernels={record}", "--record"]) == 0
    _, rows = harness.read(tmp_path / "gpu-hours.jsonl")
    assert [(r["model"], r["head"]) for r in rows] == [
        (model, head) for model in ("8B dense", "0.6B") for head in ("naive FP32", "best peer", "ours")
    ]
    text = capsys.readouterr().out
    for r in rows:
        assert f"{r['run_gpu_hours_per_1000']:,.0f}" in text and r["source"] in text
        assert r["reward"] is None if r["model"] == "0.6B" else f"{r['reward']:.4f}" in text
    measured = measured_heads(read_rates(record), "bfloat16")
    assert measured and all(f"{head.tflops:.0f} TF/s: {head.source}" in text for head in measured)
    for constant in (*CONSTANTS.values(), MODELS["0.6b"]):
        assert constant.source and constant.source in text
    assert "NOT MEASURED" in next(h.source for h in PUBLISHED_HEADS if h.name == "ours")
