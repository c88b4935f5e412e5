"""Promises of the inputs, one per trainer: its log is read as it is written, whatever happened to the run."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.logs import pairs, reading_of, readings_of, says, start_of, write_events, write_jsonl

from trainer.config import ConfigError
from trainer.scaling.comparability import check_seeds, warnings

AIME = "val-core/HuggingFaceH4/aime_2024/acc/mean@32"
MATH = "val-core/HuggingFaceH4/MATH-500/acc/mean@4"


def trl_history(evaluate: bool = True) -> list[dict[str, Any]]:
    """A finished GRPO run: 30 steps logged every 5, evaluated every 10, and transformers' last row."""
    rows: list[dict[str, Any]] = []
    for step in range(0, 31, 5):
        if step:
            rows.append({"step": step, "loss": 0.1, "reward": 0.2, "step_time": 36.0, "grad_norm": math.nan})
        if evaluate and step % 10 == 0:
            reward = {"eval_reward": 0.3 + step / 100, "eval_rewards/accuracy_reward/mean": 0.2 + step / 100}
            rows.append({"step": step, "eval_loss": 0.1, "eval_rewards/format/mean": 0.5, **reward})
    return [*rows, {"step": 30, "total_flos": 1e18, "train_runtime": 999.0, "train_loss": 0.1}]


def write_trl(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows, "total_flos": 1e18}))
    return folder / "trainer_state.json"


def test_a_finished_trl_run_is_read_in_steps_as_its_flops_are_known_only_at_the_end(tmp_path: Path) -> None:
    state = write_trl(tmp_path / "out" / "checkpoint-30", trl_history())
    write_trl(tmp_path / "out" / "checkpoint-5", trl_history()[:2])
    for path in (state, state.parent, tmp_path / "out"):  # the file, its folder, and that of all checkpoints
        reading = reading_of(path)
        assert (pairs(reading.curve), reading.curve.unit) == ([(10, 0.4), (20, 0.5), (30, 0.6)], "steps")
        assert start_of(reading.curve) == 0.3
        assert says(reading, "'total_flos'", "not used as compute")
    assert says(reading_of(tmp_path / "out"), "Read from", "checkpoint-30")
    by_time = reading_of(state, "--devices", 10)
    assert pairs(by_time.curve) == [(1.0, 0.4), (2.0, 0.5), (3.0, 0.6)]  # 10 steps of 36 s on 10 GPUs


def test_trl_with_two_reward_functions_names_the_rewards_it_did_not_take(tmp_path: Path) -> None:
    state = write_trl(tmp_path / "checkpoint-30", trl_history())
    both = "eval_rewards/format/mean and eval_rewards/accuracy_reward/mean"
    weighted = f"R is 'eval_reward', the weighted sum of {both}, which may exceed 1; name"
    assert says(reading_of(state), weighted)
    beyond = write_trl(tmp_path / "sum", [{**row, "eval_reward": 1.4} for row in trl_history()[:4]])
    with pytest.raises(ConfigError, match=r"is 1\.4; expected 0 to 1; it is a sum: set"):
        reading_of(beyond)
    chosen = reading_of(state, "--reward-column", "accuracy")
    assert pairs(chosen.curve)[0] == (10, 0.3) and not says(chosen, "other held-out")


def test_trls_trainer_state_and_tensorboard_are_seeds_of_one_recipe_by_their_time(tmp_path: Path) -> None:
    state = write_trl(tmp_path / "checkpoint-30", trl_history())
    tags = {"train/step_time": 36.0, "eval/rewards/accuracy_reward/mean": 0.375}
    events = write_events(tmp_path / "runs", [(step, 1e9 + 999 * step, tags) for step in range(10, 31, 10)])
    groups = readings_of(state, events, "--reward-column", "accuracy", "--devices", 10)
    assert groups[1].compute == "the sum of 'train/step_time' × 10 devices"
    assert [[p.compute for p in r.curve.points] for r in groups] == [[1, 2, 3], [1, 2, 3]]
    check_seeds({"grpo": groups})
    assert not any("different columns" in text for text in warnings({"a": groups[:1], "b": groups[1:]}))


def test_the_training_reward_of_trl_is_not_taken_for_a_held_out_one(tmp_path: Path) -> None:
    state = write_trl(tmp_path / "checkpoint-30", trl_history(evaluate=False))
    with pytest.raises(ConfigError, match=r"of the training batches, set --reward-column to one of reward$"):
        reading_of(state)
    assert len(reading_of(state, "--reward-column", "reward").curve.points) == 6
    evaluated = reading_of(write_trl(tmp_path / "once", trl_history()[2:4]))
    assert says(evaluated, "Training rewards, left out: reward (--reward-column).")


def test_in_a_resumed_tensorboard_run_the_later_steps_count_and_the_pause_does_not(tmp_path: Path) -> None:
    start = 1_760_000_000.0

    def rows(first: int, last: int, start_s: float, gain: float) -> list[tuple[int, float, dict[str, float]]]:
        logged: list[tuple[int, float, dict[str, float]]] = []
        for step in range(first, last + 1):
            evaluated = {"eval/reward": gain + step / 256} if step % 8 == 0 else {}
            logged.append((step, start_s + 60 * (step - first), {"train/loss": 1.0, **evaluated}))
        return logged

    end = {"train/total_flos": 0.0}
    # start, host, process, and the writers it has made
    write_events(tmp_path, rows(0, 20, start, 0.125), "1760000000.host.7.9.0")
    twice = [(40, start + 31_501, {"eval/reward": 0.25 + 38 / 256} | end)]  # the last evaluation, again
    write_events(tmp_path, [*rows(15, 40, start + 30_000, 0.25), *twice], "1760000000.host.7.10.0")
    reading = reading_of(tmp_path, "--devices", 60)  # a step is one GPU-hour
    assert [p.compute for p in reading.curve.points] == pytest.approx([8, 16, 24, 32, 40], abs=0.05)
    assert pairs(reading.curve)[1][1] == 0.25 + 16 / 256  # not 0.125 + 16 / 256
    assert reading.curve.points[-1].pass_rate == 0.25 + 39 / 256
    assert says(reading, "Steps with several", "mean: 1")
    assert says(reading, "Steps 15 to 20 were made twice", "6 earlier ones are left out")
    assert says(reading, "Pauses", "left out of the time: 8.1 h, before step 15")
    assert [p.compute for p in reading_of(tmp_path).curve.points] == [8, 16, 24, 32, 40]


def verl_rows(first: int, last: int, gain: float = 0.0) -> list[dict[str, Any]]:
    """Rows of verl's FileLogger: validation before step 1 and every 2 steps."""
    rows: list[dict[str, Any]] = []
    for step in range(first, last + 1):
        data = {"timing_s/step": 360.0, "training/global_step": step, "actor/loss": 0.1} if step else {}
        score = {AIME: gain + step / 16, MATH: 0.5, AIME.replace("mean", "best") + "/mean": 0.9}
        rows.append({"step": step, "data": data | (score if step % 2 == 0 else {})})
    return rows


def test_verls_file_log_is_read_and_the_time_of_its_steps_added_up(tmp_path: Path) -> None:
    rows = [row for row in verl_rows(0, 8) if row["step"] != 5]  # it is taken to have taken as long as step 6
    path = write_jsonl(tmp_path / "verl.jsonl", rows)
    reading = reading_of(path, "--reward-column", "aime", "--devices", 20)
    assert pairs(reading.curve) == [(4, 2 / 16), (8, 4 / 16), (12, 6 / 16), (16, 8 / 16)]
    assert start_of(reading.curve) == 0 and reading.curve.unit == "GPU-hours"
    assert reading.compute == "the sum of 'timing_s/step' × 20 devices"
    by_step = reading_of(path, "--reward-column", "aime", "--gpu-hours-per-step", 0.5)
    assert [p.compute for p in by_step.curve.points] == [1, 2, 3, 4]


def test_verls_file_log_of_a_resumed_run_counts_the_later_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "verl.jsonl", verl_rows(0, 5) + verl_rows(3, 8, gain=0.125))
    reading = reading_of(path, "--reward-column", "aime", "--devices", 10)
    assert [p.compute for p in reading.curve.points] == pytest.approx([2, 4, 6, 8])  # a step is one GPU-hour
    assert [p.pass_rate for p in reading.curve.points] == [2 / 16, 4 / 16 + 0.125, 6 / 16 + 0.125, 0.625]
    assert says(reading, "Steps 3 to 5 were made twice", "3 earlier ones are left out")
    assert not reading_of(write_jsonl(path, verl_rows(0, 8)), "--reward-column", "aime").notes


def test_verl_in_wandb_has_its_evaluation_before_step_1_at_step_0(tmp_path: Path) -> None:
    steps = [{"_step": step, "_runtime": 60.0 + 360 * step} for step in range(7)]
    rows = [step | row["data"] for step, row in zip(steps, verl_rows(0, 6), strict=True)]
    reading = reading_of(write_jsonl(tmp_path / "h.jsonl", rows), "--reward-column", "aime")
    assert pairs(reading.curve) == [(2, 2 / 16), (4, 4 / 16), (6, 6 / 16)] and start_of(reading.curve) == 0
    assert says(reading, "Where 'training/global_step' is missing, '_step' is used")
    for row in rows:
        row["_step"] *= 3  # now it counts something else
    reading = reading_of(write_jsonl(tmp_path / "h.jsonl", rows), "--reward-column", "aime")
    assert pairs(reading.curve) == [(2, 2 / 16), (4, 4 / 16), (6, 6 / 16)] and start_of(reading.curve) == 0
    assert says(reading, "The first reward", "before step 1")


def test_where_verl_has_several_datasets_a_part_of_the_name_chooses_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "verl.jsonl", verl_rows(0, 8))
    says = f"--reward-column to one of {MATH}, {AIME} .for one input alone: RUN@reward=NAME.$"
    with pytest.raises(ConfigError, match=says):
        reading_of(path)
    assert reading_of(path, "--reward-column", "aime").reward_column == AIME
    assert reading_of(path, "--reward-column", "MATH-500").reward_column == MATH
    with pytest.raises(ConfigError, match=f"several columns contain 'core'.* one of {MATH}, {AIME}"):
        reading_of(path, "--reward-column", "core")
    with pytest.raises(ConfigError, match=f"no column 'gsm8k'; set --reward-column to one of {MATH}"):
        reading_of(path, "--reward-column", "gsm8k")  # held-out rewards first


RAY, COLOURED = "(TaskRunner pid=4072) ", "\x1b[36m(TaskRunner pid=4072, ip=1.2.3.4)\x1b[0m "


@pytest.mark.parametrize("prefix", ["", RAY, COLOURED])
@pytest.mark.parametrize("form", ["{:.3f}", "{!r}", "np.float64({!r})"])
def test_verls_console_log_is_read_among_other_output(prefix: str, form: str, tmp_path: Path) -> None:
    end = "\x1b[0m" if "\x1b" in prefix else ""
    lines = ["[2026-01-01] INFO: step: 3 - starting", "{'actor': {'lr': 1e-06}}"]
    for row in verl_rows(0, 4):
        metrics = [f"{name}:{form.format(value)}" for name, value in reversed(row["data"].items())]
        lines.append(prefix + " - ".join([f"step:{row['step']}", *metrics]) + end)
        lines.append("Training Progress:  10%|#    | 1/4")
    path = tmp_path / "verl.log"
    path.write_text("\n".join(lines))
    reading = reading_of(path, "--reward-column", "aime", "--devices", 10)
    assert [p.compute for p in reading.curve.points] == pytest.approx([2, 4])
    assert [p.pass_rate for p in reading.curve.points] == [2 / 16, 4 / 16] and start_of(reading.curve) == 0


def test_evaluations_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"step": s, "eval/acc": s / 8, "other": math.nan} for s in range(5)]
    rows[2]["eval/acc"], rows[3]["eval/acc"] = math.nan, math.inf
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows))
    assert pairs(reading.curve) == [(1, 1 / 8), (4, 4 / 8)]
    assert says(reading, "without a finite reward, which are left out: 2")
    rows[1]["eval/acc"] = None  # not evaluated: nothing to count
    assert says(reading_of(write_jsonl(tmp_path / "a.jsonl", rows)), "left out: 2")
    (tmp_path / "a.csv").write_text("step,eval/acc,x\n0,.1,NaN\n1,NaN,\n2,.2,inf\n,,\n3,.3,NaN\n")
    reading = reading_of(tmp_path / "a.csv")
    assert pairs(reading.curve) == [(2, 0.2), (3, 0.3)] and says(reading, "left out: 1")


def test_two_evaluations_at_one_step_are_averaged_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,acc,acc_se\n0,.1,.02\n0,.3,.02\n5,.4,.03\n5,.5,.04\n9,.6,.02\n9,.6,.02\n")
    reading = reading_of(path)
    assert pairs(reading.curve) == [(5, 0.45), (9, 0.6)] and start_of(reading.curve) == pytest.approx(0.2)
    assert reading.curve.points[0].pass_rate_se == pytest.approx(0.025)  # √(.03² + .04²) / 2
    assert says(reading, "Steps with several evaluations, of which R is the mean: 2")
    path.write_text("gpu_hours,acc\n1,.2\n1,.3\n2,.4\n")
    assert says(reading_of(path), "Computes with several evaluations", "mean: 1")


def test_a_value_that_is_logged_late_is_no_resumption(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": s, "time/step": 360.0, "loss": 1.0} for s in range(1, 13)]
    rows.insert(7, {"step": 4, "eval/reward": 0.25})  # asynchronous evaluations
    rows.insert(11, {"step": 8, "eval/reward": 0.5})
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows), "--devices", 10)
    assert pairs(reading.curve) == [(4, 0.25), (8, 0.5)] and not reading.notes


def test_rows_of_training_and_of_evaluation_may_come_apart(tmp_path: Path) -> None:
    rows = [{"step": s, "time/step": 360.0, "loss": 1.0, "tokens": s} for s in range(1, 9)]
    rows += [{"step": s, "eval/reward": s / 16, "eval/length": 9.0, "tokens": s} for s in range(1, 9)]
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows), "--devices", 10)
    assert pairs(reading.curve) == [(pytest.approx(s), s / 16) for s in range(1, 9)] and not reading.notes


@pytest.mark.parametrize("away", [0.0, 90.0, 90_000.0])
def test_after_a_resumption_only_the_steps_that_count_take_time(away: float, tmp_path: Path) -> None:
    rows = [{"step": s, "timestamp": 1.76e9 + 60 * s, "eval/acc": s / 64} for s in range(21)]
    later = 1.76e9 + 60 * 20 + away
    rows += [{"step": s, "timestamp": later + 60 * (s - 15), "eval/acc": s / 64} for s in range(16, 31)]
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows), "--devices", 60)
    assert [p.compute for p in reading.curve.points] == pytest.approx(range(1, 31))
    assert says(reading, "Pauses", "25.1 h, before step 16") == (away > 1e3)


def test_a_run_begun_again_says_that_it_may_be_two(tmp_path: Path) -> None:
    rows = [{"step": s, "eval/acc": a + s / 16} for a in (0.0, 0.5) for s in range(5)]
    reading = reading_of(write_jsonl(tmp_path / "a.jsonl", rows))
    assert pairs(reading.curve) == [(s, 0.5 + s / 16) for s in range(1, 5)]
    assert says(reading, "Steps 0 to 4 were made twice", "several runs", "column 'run'")


def test_an_evaluation_that_our_trainer_logs_late_is_no_resumption(tmp_path: Path) -> None:
    """The lines of metrics.jsonl as TensorBoard has them: step 2 was evaluated after step 4 was made."""

    def line(step: int, values: dict[str, float]) -> tuple[int, float, dict[str, float]]:
        return step, 1e9 + step, {**values, "compute/total": float(step), "idle/engine": 0.1}

    trained = [line(step, {"train/loss": 1.0}) for step in (1, 2, 3, 4)]
    evaluated = [line(step, {"eval/pass_rate": step / 8, "eval/pass_rate_se": 0.1}) for step in (2, 4)]
    write_events(tmp_path, [*trained, *evaluated])
    reading = reading_of(tmp_path)
    assert [(p.compute, p.pass_rate) for p in reading.curve.points] == [(2, 0.25), (4, 0.5)]
    assert not says(reading, "made twice", "")
