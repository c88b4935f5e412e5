"""Promises of a run's own account: rates are found in each kind of file, and the factor is that by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_folder import EVALUATED, LAW, write_run

from trainer.accounting.kernel_rates import measured_heads, read_rates
from trainer.accounting.run_account import RunTimes, run_times
from trainer.config import ConfigError
from trainer.scaling.__main__ import main
from trainer.scaling.commands.predict import DEVICE_HOURS

H, V = 576, 49152
NAIVE_S, OURS_S = 2.0, 0.5  # of a pass at N = 512


def compared(folder: Path, dtype: str = "float32") -> Path:
    """A record as `python -m bench kernels.compare` writes it."""
    seconds = {"3 bare GEMMs": 0.4, "naive FP32": NAIVE_S, "ours (cpu)": OURS_S, "ours (torch)": 0.8}
    options = {"rows": 512, "hidden": H, "vocab": V, "dtype": dtype}
    lines: list[dict[str, Any]] = [{"options": options, "machine": {"cpu": "A CPU"}, "commit": "0123456"}]
    for factor in (0.9, 1.0, 3.0):  # three rounds, whose median counts
        lines += [{"case": "", "provider": name, "ms": 1000 * s * factor} for name, s in seconds.items()]
    lines.append({"case": "x: errors", "error": "y"})
    path = folder / "rates.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rates_are_six_nhv_over_the_time_of_the_fastest_case_in_the_type_asked_for(tmp_path: Path) -> None:
    rates = read_rates(compared(tmp_path))
    heads = {head.name: head for head in measured_heads(rates, "float32")}
    assert heads["ours"].tflops == pytest.approx(6 * 512 * H * V / OURS_S / 1e12)
    assert heads["naive FP32"].tflops == pytest.approx(heads["ours"].tflops * OURS_S / NAIVE_S)
    assert heads["ours"].source == (
        f"MEASURED on A CPU, commit 0123456: ours (cpu) at N,H,V = [512, {H}, {V}]"
    )
    assert set(heads) == {"ours", "naive FP32"}
    with pytest.raises(ConfigError, match="no timed case in float16; expected"):
        measured_heads(rates, "float16")
    (tmp_path / "other.json").write_text('{"cases": []}\n')
    with pytest.raises(ConfigError, match=r"other.json: expected the --out of"):
        read_rates(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("learner", "engine", "in_turns", "ratio", "factor"),
    [
        (90.0, 60.0, False, 4.0, 1.6),  # 20 s of the loss become 80: 60 more of 100
        (60.0, 90.0, False, 4.0, 1.3),  # the learner's 120 exceed the engine's 90 by 30
        (60.0, 90.0, False, 0.5, 1.0),  # a faster loss: the learner waits for longer
        (90.0, 75.0, False, 0.0, 0.85),  # without the loss the engine is the slower one
        (50.0, 50.0, True, 4.0, 1.6),  # in turns every second counts
        (50.0, 50.0, True, 0.5, 0.9),
    ],
)
def test_the_factor_by_hand(
    learner: float, engine: float, in_turns: bool, ratio: float, factor: float
) -> None:
    times = RunTimes(wall=100.0, learner=learner, engine=engine, loss_head=20.0, in_turns=in_turns)
    assert times.factor(ratio) == pytest.approx(factor) and times.factor(1.0) == 1.0


def run_folder(folder: Path) -> Path:
    """A run of 0.24 core-hours on two devices (432 s of training), 108 s of it in the loss of the head."""
    run = write_run(folder)
    books = json.loads((run / "ledger.json").read_text())
    books["devices_total"] = 2.0
    learner = {"start-up": 10.0, "idle": 32.0, "forward_backward": 272.0, "loss_head": 108.0, "pack": 20.0}
    engine = {"start-up": 10.0, "idle": 100.0, "generate": 332.0, "evaluate": 18.0}
    for role, states in (("learner", learner), ("engine", engine)):
        books["roles"][role] |= {"states": states, "seconds": states}
    (run / "ledger.json").write_text(json.dumps(books))
    config = {"pipeline": {"scheme": "pipeline_rl"}, "model": {"dtype": "float32"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def test_times_are_those_of_the_ledger(tmp_path: Path) -> None:
    times = run_times(run_folder(tmp_path / "run"))
    assert times == RunTimes(wall=432.0, learner=400.0, engine=332.0, loss_head=108.0, in_turns=False)
    assert run_times(tmp_path) is None and run_times(write_run(tmp_path / "older")) is None


def test_a_run_is_predicted_with_another_kernel_by_its_own_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rates, out = run_folder(tmp_path / "run"), compared(tmp_path), tmp_path / "out.json"
    asked = ["predict", str(run), "--at", "0.2", "--kernel", "naive", "--measured-with", "ours"]
    assert main([*asked, "--kernel-rates", str(rates), "--json", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    factor = 1 + 3 * 108 / 432  # the loss takes four times as long
    assert "MEASURED on A CPU" in text and f"the run takes {factor:.3f} times the compute" in text
    (found,) = json.loads(out.read_text()).values()
    assert found["kernel"]["factor"] == pytest.approx(factor)
    assert found["at"][0]["reward"]["value"] == pytest.approx(float(LAW.reward(0.2 / factor)), abs=0.01)
    assert EVALUATED[-1] == 0.24 and "core-hours" in DEVICE_HOURS


def test_a_run_whose_ledger_does_not_book_the_loss_apart_is_said_to_take_the_papers_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rates = write_run(tmp_path / "older"), compared(tmp_path, "bfloat16")
    asked = ["predict", str(run), "--at", "0.2", "--unit", "GPU-hours", "--kernel", "naive"]
    assert main([*asked, "--measured-with", "ours", "--kernel-rates", str(rates)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "a step of 8B dense takes" in text and "Its ledger does not book the loss of the head apart." in text
    )


def test_without_rates_of_both_kernels_a_run_has_no_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rates = run_folder(tmp_path / "run"), compared(tmp_path)
    asked = ["predict", str(run), "--at", "0.2", "--kernel", "peer", "--measured-with", "ours"]
    assert main([*asked, "--kernel-rates", str(rates)]) == 2
    assert "it has no best peer in float32; both kernels must" in capsys.readouterr().err
    assert main(asked) == 2
    assert "compute is in core-hours" in capsys.readouterr().err
    naive = ["predict", str(run), "--at", "0.2", "--kernel", "naive", "--measured-with", "ours"]
    assert main([*naive, "--kernel-rates", str(rates), "--model", "4b"]) == 2
    assert "accounted by its own ledger" in capsys.readouterr().err
