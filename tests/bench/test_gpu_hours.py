"""bench.gpu_hours: the account by hand, sources beside constants, the GPU suite's rates taken over."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_hours, records
from bench.gpu_hours import account
from bench.sources import CURVES
from trainer.accounting.kernel_cost import (
    CONSTANTS,
    MODELS,
    PUBLISHED_HEADS,
    Head,
    Setting,
    Shape,
)
from trainer.accounting.kernel_rates import measured_heads
from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import Sigmoid

# 10 layers of 1,000,000 parameters; head 6 · 100 · 1,000 = 600,000 FLOP per token
SHAPE = Shape("toy", 100, 10, 5, 5, 10, 3_266, 1_000, "by hand")


def test_the_account_by_hand() -> None:
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
    law = Sigmoid(0.2, 0.8, 1.0, 1000.0)
    a, b = account(SHAPE, [slow, fast], setting, law, "slow", 1000.0)
    assert a["head_share"] == pytest.approx(0.75 / 2.7516)
    assert a["trainer_gpu_hours_per_1000"] == pytest.approx(2751.6)
    assert a["run_gpu_hours_per_1000"] == pytest.approx(4 * 2751.6)  # three generators for one trainer
    assert b["run_gpu_hours_per_1000"] == pytest.approx(4 * 2751.6 - 675)
    factor = (4 * 2751.6 - 675) / (4 * 2751.6)
    assert a["cost_factor"] == 1.0 and b["cost_factor"] == pytest.approx(factor)
    assert a["reward"] == pytest.approx(0.5)  # at C_mid
    assert b["reward"] == pytest.approx(0.2 + 0.6 / (1 + factor))


def test_models_have_the_parameters_they_are_named_for() -> None:
    billions = {name: shape.body_parameters / 1e9 for name, shape in MODELS.items()}
    assert billions == pytest.approx({"0.6b": 0.44, "4b": 3.6, "8b": 6.95, "scout": 15.1}, rel=0.01)
    scout = MODELS["scout"]
    assert (scout.body_parameters + 2 * scout.hidden * scout.vocab) / 1e9 == pytest.approx(17, rel=0.02)


def test_every_constant_has_a_source() -> None:
    for constant in (*CONSTANTS.values(), *CURVES.values(), *MODELS.values(), *PUBLISHED_HEADS):
        assert constant.source
    assert "NOT MEASURED" in next(h.source for h in PUBLISHED_HEADS if h.name == "ours")


def suite_record() -> dict[str, Any]:
    """As bench.kernels.compare writes it, with a millisecond for each 6NHV at 1,000 TF/s."""
    rates = {"ours (triton, two-pass)": 650.0, "ours (triton, single-pass)": 690.0, "ours, exact": 900.0}
    rates |= {"Cut-Cross-Entropy": 800.0, "Cut-Cross-Entropy, unfiltered": 500.0}
    flops, shape = 6 * 16384 * 4096 * 151936, {"N": 16384, "H": 4096, "V": 151936}
    timed = [{"name": name, "ms": {"median": flops / rate / 1e9}} for name, rate in rates.items()]
    cases = [*timed, {"name": "Liger CISPO", "error": "x"}]
    machine = {"card": "NVIDIA H200"}
    return {"commit": "abc", "machine": machine, "dtype": "bfloat16", "shape": shape, "cases": cases}


def test_measured_rates_are_the_fastest_training_case() -> None:
    heads = {head.name: head for head in measured_heads(suite_record(), "bfloat16")}
    assert heads["ours"].tflops == pytest.approx(690) and heads["best peer"].tflops == pytest.approx(500)
    assert "naive FP32" not in heads
    with pytest.raises(ConfigError, match="no timed case in float32"):
        measured_heads(suite_record(), "float32")
    source = "MEASURED on NVIDIA H200, commit abc: ours (triton, single-pass)"
    assert heads["ours"].source.startswith(source)


def test_the_command_writes_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = tmp_path / "kernels.json"
    kernels.write_text(json.dumps(suite_record()))
    out, plot = tmp_path / "hours.json", tmp_path / "hours.svg"
    gpu_hours.main(["--models=8b,0.6b", f"--kernels={kernels}", f"--out={out}", f"--plot={plot}"])
    result = json.loads(out.read_text())
    assert [(r["model"], r["head"]) for r in result["records"]] == [
        (model, head) for model in ("8B dense", "0.6B") for head in ("naive FP32", "best peer", "ours")
    ]
    text = capsys.readouterr().out
    for r in result["records"]:
        assert f"{r['run_gpu_hours_per_1000']:,.0f}" in text and r["source"] in text
        assert r["reward"] is None if r["model"] == "0.6B" else f"{r['reward']:.4f}" in text
    for constant in result["constants"].values():
        assert constant["source"] in text
    ElementTree.parse(plot)


def test_a_faster_head_is_never_worse() -> None:
    setting = Setting(**{name: c.value for name, c in CONSTANTS.items()})
    heads = [Head("naive FP32", 50, ""), Head("a", 500, ""), Head("b", 700, "")]
    law = Sigmoid(0.3, 0.61, 1.92, 2542)
    for shape in MODELS.values():
        found = account(shape, heads, setting, law, "naive FP32", 4000)
        assert [r["reward"] for r in found] == sorted(r["reward"] for r in found)
        assert [r["head_share"] for r in found] == sorted((r["head_share"] for r in found), reverse=True)


def test_looking_writes_nothing_and_record_writes_the_tracked_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    gpu_hours.main(["--models=8b"])
    assert not list(tmp_path.iterdir())
    gpu_hours.main(["--models=8b", "--record"])
    assert {path.name for path in tmp_path.iterdir()} == {"gpu-hours.json", "gpu-hours.png"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--models=9b"], "expected some of"),
        (["--rate=ours"], "HEAD=TF/s"),
        (["--rate=ours=0"], "above 0"),
        (["--law=.6,1"], "A,B,C_MID"),
        (["--curve-head=nobody"], "expected one of"),
        (["--length=10"], "above --prompt"),
    ],
)
def test_bad_options_say_what_was_expected(tmp_path: Path, options: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        gpu_hours.main([*options, f"--out={tmp_path / 'x.json'}"])
