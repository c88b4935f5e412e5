"""Promises of what trainers print: TRL's dicts among progress bars, verl's first validation, notebooks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.logs import pairs, reading_of, readings_of, says, start_of

from trainer.config import ConfigError
from trainer.scaling.reading.console import console

# As `transformers.Trainer` calls its own callback: 12 steps, a log every 2, an evaluation every 4.
PRINTS = """
from types import SimpleNamespace
from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback
list(tqdm(range(3), desc="Loading checkpoint shards"))
state = SimpleNamespace(is_world_process_zero=True, max_steps=12, global_step=0)
bar = ProgressCallback()
bar.on_train_begin(None, state, None)
for step in range(1, 13):
    state.global_step = step
    bar.on_step_end(None, state, None)
    if step % 2 == 0:
        logs = {"loss": float("nan"), "reward": .9, "total_flos": 1, "epoch": step / 12}
        bar.on_log(None, state, None, logs)
    if step % 4 == 0:
        for _ in range(5):
            bar.on_prediction_step(None, state, None, eval_dataloader=[0] * 5)
        bar.on_log(None, state, None, {"eval_loss": 0.0, "eval_reward": step / 100, "epoch": step / 12})
        bar.on_evaluate(None, state, None)
bar.on_log(None, state, None, {"train_runtime": 99.0, "epoch": 1.0})
bar.on_train_end(None, state, None)
"""


@pytest.mark.slow
def test_transformers_dicts_among_progress_bars_are_read_with_their_steps(tmp_path: Path) -> None:
    """Printed by the callback of the installed transformers."""
    log = tmp_path / "train.log"
    with log.open("w") as file:
        subprocess.run([sys.executable, "-c", PRINTS], stdout=file, stderr=file, check=True)
    reading = reading_of(log)
    assert pairs(reading.curve) == [(4, 0.04), (8, 0.08), (12, 0.12)]
    assert reading.reward_column == "eval_reward" and reading.curve.unit == "steps"
    assert len(reading_of(log, "--reward-column", "reward").curve.points) in (3, 6)


def test_older_dicts_are_read_and_without_bars_nothing_is_made_up(tmp_path: Path) -> None:
    line = "{{'loss': 0.0, 'grad_norm': nan, 'eval_reward': {}, 'epoch': {}}}\n"
    bars = [f" {i}%|#   | {i}/9 [00:01<00:02,  1.2s/it]\r" for i in range(10)]
    log = tmp_path / "a.txt"
    log.write_text(
        "INFO {'lr': 1}\n" + "".join(bars[i] + line.format(i / 10, i) + bars[i] for i in (3, 6, 9))
    )
    assert pairs(reading_of(log).curve) == [(3, 0.3), (6, 0.6), (9, 0.9)]
    log.write_text("".join(line.format(i / 10, i) for i in (3, 6, 9)))
    with pytest.raises(ConfigError, match=r"no column is recognized as compute; set --compute-column"):
        reading_of(log)
    assert pairs(reading_of(log, "--compute-column", "epoch").curve) == [(3, 0.3), (6, 0.6), (9, 0.9)]


@pytest.mark.parametrize("early", [2, 5, 9])
def test_dicts_that_a_program_wrote_late_get_steps_by_their_number(early: int, tmp_path: Path) -> None:
    """A program's output in a file comes in blocks, and the bars, which are errors, at once."""
    bars = [f" {i}%|#   | {i}/13 [00:01<00:02,  1.2s/it]\r" for i in range(14)]
    others = [f"{i}% {i}/99 [00:01]\r" for i in (*range(40), *range(40))]
    dicts = [f"{{'loss': {i}, 'reward': {i / 10}, 'epoch': 0.0}}\n" for i in range(1, 7)]
    dicts.insert(3, "{'eval_loss': 1, 'eval_reward': 0.5}\n")
    log = tmp_path / "a.log"
    log.write_text("".join([*bars[:early], *dicts[:3], *others, *bars[early:], *dicts[3:]]))
    reading = reading_of(log, "--reward-column", "reward")
    assert pairs(reading.curve) == [(2 * i, i / 10) for i in range(1, 7)]
    assert reading.compute == "'step (counted)'"
    assert pairs(reading_of(log, "--reward-column", "eval_reward").curve) == [(6, 0.5)]


LINES = {  # of prime-rl, MiniMind, an own loop, slime
    "Reward": "16:43:07 SUCCESS Step {0} | Time: 7.4s | Reward: 0.{0} | Seq. Length: 104.9 tokens/sample",
    "reward": "Epoch:[1/1]({0}/9751), Reward: 0.{0}, KL_ref: -0.0010, Learning Rate: 0.000003",
    "acc": "[qwen_8B] {0}/100 | loss=-0.2703 | acc={0}.0%",
    "raw_reward": "(Ray pid=1) [2026-07-20 17:53:24] data.py:193 - rollout {0}: {{'rollout/rewards': 1e-9, "
    "'rollout/raw_reward': 0.{0}}}",
}


@pytest.mark.parametrize("reward", LINES)
def test_lines_with_a_step_and_named_values_are_read_those_of_evaluations_apart(
    reward: str, tmp_path: Path
) -> None:
    lines = [
        f"{LINES[reward].format(i)}\n[Eval] step {i}/99: accuracy: 0.5 (8 of 16)\n" for i in range(10, 17)
    ]
    log = tmp_path / "a.log"
    log.write_text("Loading 2/2: 100%\nStep 3 of the guide: install, run\n" + "".join(lines))
    assert pairs(reading_of(log, "--reward-column", reward).curve) == [(i, i / 100) for i in range(10, 17)]
    assert reading_of(log).reward_column == "eval/accuracy"


@pytest.mark.parametrize("name", ["a.log", "a.txt"])
def test_tables_whose_cells_look_like_dicts_are_no_console(name: str, tmp_path: Path) -> None:
    rows = [{"step": i, "eval/reward": i / 10, "config": "{'lr': 0.1}"} for i in range(7)]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(reading_of(tmp_path / name).curve.points) == 6
    (tmp_path / name).write_text(
        "step,accuracy,sample\n" + "".join(f"{i},.{i},{{'a': {i}}}\n" for i in range(7))
    )
    assert len(reading_of(tmp_path / name).curve.points) == 6


def test_verls_validation_before_step_1_is_R0(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    steps = "".join(f"step:{i} - val/test_score/gsm8k:{0.2 + i / 100} - actor/lr:1e-6\n" for i in range(1, 7))
    first = "val/test_score/gsm8k{}np.float64(0.125)"
    printed = "Initial validation metrics: {'" + first.format("': ") + "}"  # and again as a step
    log.write_text(f"(pid=1) {printed}\n(pid=1) step:0 - {first.format(':')}\n{steps}")
    reading = reading_of(log)
    assert not says(reading, "step")
    assert start_of(reading.curve) == 0.125 and pairs(reading.curve)[0] == (1, pytest.approx(0.21))


def notebook(path: Path, *tables: list[float]) -> Path:
    """Cells with the tables that transformers shows in a notebook, between others."""
    outputs = []
    for rewards in tables:
        lines = "".join(
            f"<tr>\n<td>{i}</td><td>0.0</td><td><b>{r}</b></td></tr>" for i, r in enumerate(rewards, 1)
        )
        head = "<tr><th>Step</th><th>Training Loss</th><th>reward</th></tr>"
        html = f"<p>2/2</p><table border=1><thead>{head}</thead><tbody>{lines}</tbody></table>"
        if rewards[0] > 0.6:  # HTML may leave ends out, and names of tags are in either case
            html = re.sub("<[a-z/]+", lambda tag: tag[0].upper(), re.sub("</t[dr]>", "", html))
        outputs.append({"data": {"text/html": [html[:40], html[40:]], "text/plain": ["<IPython>"]}})
    odd = "<td>1</td><tr></tr><table></table><table><td>1</td></table>"
    other = {"data": {"text/html": f"{odd}<table><tr><th>name</th></tr><tr><td>x</td></tr></table>"}}
    cells = [{"cell_type": "markdown"}, *({"outputs": [other, {"name": "stdout"}, one]} for one in outputs)]
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_a_notebooks_tables_are_read_and_several_are_runs(tmp_path: Path) -> None:
    rising = [i / 10 for i in range(1, 8)]
    path = notebook(tmp_path / "a.ipynb", rising)
    with pytest.raises(ConfigError, match=r"of the training batches, set --reward-column to one of rew"):
        reading_of(path)
    assert pairs(reading_of(path, "--reward-column", "reward").curve) == list(enumerate(rising, 1))
    path = notebook(path, rising, [0.5] * 2, rising[::-1])
    first, last = readings_of(path, "--reward-column", "reward")
    assert (first.curve.name, last.curve.name) == (f"{path}: table 1", f"{path}: table 3")
    assert pairs(last.curve)[0] == (1, 0.7)
    with pytest.raises(ConfigError, match="is empty, or holds no metrics"):
        reading_of(notebook(tmp_path / "b.ipynb"))
    (tmp_path / "c.ipynb").write_text("[1]")
    with pytest.raises(ConfigError, match="it is no notebook"):
        reading_of(tmp_path / "c.ipynb")


def test_without_tables_a_notebooks_cells_are_consoles_and_those_with_rewards_are_read(
    tmp_path: Path,
) -> None:
    """A cell teaches a format, another one is trained by reward. Colab shows bars without their marks."""
    first = "{'loss': 40, 'epoch': 1}\n"
    rewards = [(i, i / 10) for i in range(1, 8)]
    second = "".join(
        f"{i}% {i}/7 [0:01<0:02]\n{{'loss': 1, 'reward': {r}}}\n{i}% {i}/7 [\n" for i, r in rewards
    )
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"outputs": [{"text": [text]}]} for text in (first, second)]}))
    with pytest.raises(ConfigError, match=r"set --reward-column to one of reward$"):
        reading_of(path)
    assert pairs(reading_of(path, "--reward-column", "reward").curve) == rewards
    path.write_text(json.dumps({"cells": [{"outputs": [{"text": [first, first]}]}]}))
    with pytest.raises(ConfigError, match=r"set --reward-column to one of epoch, loss$"):
        reading_of(path)


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("Epoch 1/3 | Step {}/300 | reward: 0.{}.", {"reward": "0.{}"}),
        ("[rank 0/8] step {}: reward=0.{}", {"reward": "0.{}"}),
        ("Loading shards 2/2\nStep {} | Reward: 0.{}", {"Reward": "0.{}"}),
        ("INFO 11/28 16:41:07 [my-test-run] step={} | reward: 0.{}", {"reward": "0.{}"}),
        ("eval {} | accuracy: 0.{}", {"eval/accuracy": "0.{}"}),
        ("[Eval] step {} | eval/acc: 0.{}", {"eval/acc": "0.{}"}),
        ("step {} | eval | reward 0.{}", {"eval/reward": "0.{}"}),
        ("step {} [val] reward=0.{}", {"eval/reward": "0.{}"}),
        ("step {} | val acc: 0.5 | reward: 0.{}", {"val acc": "0.5", "reward": "0.{}"}),
        ("step {} | value_loss: 0.5 | test-time | reward: 0.{}", {"value_loss": "0.5", "reward": "0.{}"}),
        ("SUCCESS Evaluated math-500 (Step {}) | 2.3s | Reward 0.{}", {"eval/math-500/Reward": "0.{}"}),
        (
            "Step {} |   7.4s | Reward 0.{} | Trainable 9/9 (78%) | MFU 3.0%",
            {"Reward": "0.{}", "MFU": "3.0%"},
        ),
        ("train: {{'global_step': {}, 'reward': 0.{}}}", {"reward": "0.{}"}),
        ("loss is fine, train_step {} loss: 0.5 reward: 0.{}", {"loss": "0.5", "reward": "0.{}"}),
        ("Step {} | loss:1E-05 rewards:tensor(0.{}) ", {"loss": "1E-05", "rewards": "0.{}"}),
        (
            "step 1,0{} | tokens: 1,234,567,acc: NaN,reward: .{}",
            {"tokens": "1,234,567", "acc": "NaN", "reward": ".{}"},
        ),
        ("Epoch [1/3], Step [{}/100], Loss: 0.1, Reward: 0.{}", {"Loss": "0.1", "Reward": "0.{}"}),
        ("policy_step {} - reward 0.{} - loss 1e-3", {"reward": "0.{}", "loss": "1e-3"}),
        ("step {} eval: reward 0.{}±0.02, loss 0.5", {"eval/reward": "0.{}", "eval/loss": "0.5"}),
        (
            "step:{} - a/b:1 - val-core/x: hard, new/acc/mean@1:.{}",
            {"a/b": "1", "val-core/x: hard, new/acc/mean@1": ".{}"},
        ),
        ("Micro Step 1/8 | Loss 0.1\n2026 perf {}: {{'perf/step_time': 0.{}}}", {"perf/step_time": "0.{}"}),
    ],
)
def test_a_line_has_the_step_it_names_and_is_an_evaluation_where_it_says_so(
    line: str, row: dict[str, str]
) -> None:
    text = "{'lr': 1e-06}\n" + "".join(line.format(i, i) + "\n" for i in range(13, 20))
    first = 1000 * line.startswith("step 1,0")
    expected = [{"step": first + i, **{k: v.format(i) for k, v in row.items()}} for i in range(13, 20)]
    assert console(text) == expected


def test_bars_of_other_things_and_a_resumed_run_leave_dicts_their_steps() -> None:
    """The dicts of a run that was killed at 13 and went on from 9; the others come after all bars."""
    bar, maps = "{0}%|#  | {0}/{1} [0:01<0:02]\r".format, "Map:  9%|#| 1000/30000 [0:01<0:02, 1 ex/s]\r"

    def written(steps: range) -> str:
        return "".join(
            bar(i, 30) + (f"\n{{'loss': {i}.{len(steps)}}}\n" + bar(i, 30) if i % 5 == 0 else "")
            for i in steps
        )

    resumed = console(maps + written(range(1, 14)) + written(range(9, 31)))
    assert [row["step"] for row in resumed] == [5, 10, 10, 15, 20, 25, 30]
    late = "\n" + "".join(f"{{'loss': {i}.5}}\n" for i in range(1, 4))
    tests = "".join(bar(i, 500) for i in range(501))
    counted = console(maps + "".join(bar(i, 30) for i in range(31)) + tests + late)
    assert [row["step (counted)"] for row in counted] == [10, 20, 30]
    assert [row["step"] for row in console(maps + late)] == [None, None, None]


NEMO = """
📊 Validation Results:
    • Accuracy: {accuracy}
    • Average response length: 1,512.5 tokens

  ⏱️  Validation Timing:
    • Total validation time: 12.30s
"""
NEMO_STEP = """
{rule} Step {step}/3 {rule}
▶ Generating responses for batch of size 512...
(Worker pid=123, ip=10.0.0.2) INFO 08-22 10:00:00 [loggers.py:122] throughput: 0.0 tokens/s
{validation}
📊 Training Results:
  • Loss: 0.0100
  • Generation KL Error: nan
  • Avg Reward: {reward}

⏱️  Timing:
  • Total step time: 36.00s
  • generation: 20.00s (55.6%)
"""


def nemo(epochs: int) -> str:
    """The console of NeMo-RL, whose steps begin again with each epoch, validated every second step."""
    text = [
        "  • Config: 5\n▶ Starting validation at step 0...\n│ Step 1: 3 + 4 = 7 │",
        NEMO.format(accuracy=0.1),
    ]
    for i in range(1, 3 * epochs + 1):
        if i % 3 == 1:
            text.append(f"\n{'=' * 25} Epoch {1 + i // 3}/{epochs} {'=' * 25}\n")
        sample = f"▶ Starting validation at step {i}...\n│ Step 1: let x = 3 │\n│ Step 2: so x = 4 │\n"
        held_out = "" if i % 2 else sample + NEMO.format(accuracy=i / 20)
        step = {"rule": "=" * 25, "step": 1 + (i - 1) % 3, "reward": i / 40, "validation": held_out}
        text.append(NEMO_STEP.format(**step))
    return "".join(text)


def test_nemos_lines_belong_to_the_step_above_those_below_validation_to_an_evaluation(tmp_path: Path) -> None:
    log = tmp_path / "nemo.log"
    log.write_text(nemo(4))
    reading = reading_of(log)
    assert pairs(reading.curve) == [(i, i / 20) for i in range(2, 13, 2)]
    assert start_of(reading.curve) == 0.1 and reading.reward_column == "eval/Accuracy"
    assert not says(reading, "made twice")
    trained = reading_of(log, "--reward-column", "Avg Reward", "--devices", 100)
    assert pairs(trained.curve) == [(i, i / 40) for i in range(1, 13)]  # 36 s a step
    first = console(nemo(1))[1]
    assert first == {
        "step": 1, "Loss": "0.0100", "Generation KL Error": "nan", "Avg Reward": "0.025",
        "Total step time": "36.00", "generation": "20.00",
    }  # fmt: skip


def test_openrlhfs_lines_are_read_and_its_bars_are_not(tmp_path: Path) -> None:
    """A bar counts the batches of one step, and holds values of its own."""
    bars = "".join(
        f"\r\x1b[36m(Actor pid=7)\x1b[0m Train epoch [1/1]: {k}%|█ | {k}/8 [00:01<00:07, 1s/it, reward=0.9]"
        for k in range(9)
    )
    said = "(PPOTrainer pid=42, ip=10.1.2.3) INFO 08-13 10:00:00 ppo_trainer.py:547]"
    lines = []
    for i in range(1, 11):
        lines.append(f"{bars}\n{said} ✨ Global step {i}: {{'policy_loss': 1e-05, 'reward': {i / 20}}}\n")
        metrics = f"{{'eval_gsm8k_pass1': {i / 11}, 'eval_gsm8k_pass4': 0.9}}"
        done = (f"✨ Evaluation completed in 0:01:02, global_step {i}, eval_metrics:", f"Eval at step {i}:")[
            i % 2
        ]
        lines.append(f"{said} ⏰ Evaluation start time: 2026-08-13 10:00:00\n{said} {done} {metrics}\n")
    log = tmp_path / "openrlhf.log"
    log.write_text("".join(lines))
    reading = reading_of(log)
    assert reading.reward_column == "eval_gsm8k_pass1"
    assert pairs(reading.curve) == [(i, i / 11) for i in range(1, 11)]
    trained = reading_of(log, "--reward-column", "reward")
    assert pairs(trained.curve) == [(i, i / 20) for i in range(1, 11)]
    assert not trained.curve.points[0].pass_rate_se and not says(trained, "step")


def test_where_only_a_bar_holds_values_the_last_of_each_count_are_read() -> None:
    bar = "\rtraining: {0}%|█ | {0}/20 [00:01<00:07, 1.2it/s, reward={1}]".format
    rows = console("step 3 of the guide\n" + "".join(bar(i, i / 50) + bar(i + 1, i / 50) for i in range(20)))
    assert rows == [{"step": i, "reward": str(min(i, 19) / 50)} for i in range(21)]
    lines = "".join(f"step {i} | helpfulness: 0.{i}\n" + bar(i, 0.5) + "\n" for i in range(10, 20))
    assert console(lines) == [{"step": i, "helpfulness": f"0.{i}"} for i in range(10, 20)]


def test_steps_that_begin_again_with_each_epoch_go_on_those_of_a_resumed_run_do_not(tmp_path: Path) -> None:
    """As of MiniMind, which was killed in its second epoch, and went on from the last checkpoint."""
    line = "Epoch:[{}/2]({}/50), Reward: 0.{:03}, Learning Rate: 0.000003\n"
    steps = [*range(10, 91, 10), *range(70, 101, 10)]
    log = tmp_path / "minimind.log"
    log.write_text("".join(line.format(1 + (i - 1) // 50, 1 + (i - 1) % 50, i) for i in steps))
    reading = reading_of(log, "--reward-column", "reward")
    assert pairs(reading.curve) == [(i, i / 1000) for i in range(10, 101, 10)]
    assert says(reading, "Steps 70 to 90 were made twice")
    log.write_text("".join(line.format(1 + (i - 1) // 50, 1 + (i - 1) % 50, i) for i in range(60, 161, 10)))
    assert pairs(reading_of(log, "--reward-column", "reward").curve)[::5] == [
        (10, 0.06),
        (60, 0.11),
        (110, 0.16),
    ]
    for epoch in (
        "Epoch {} | Step {}/30 | reward: {}\n",
        "epoch {} step {} reward: {}\n",
        "\rEpoch {}/2:  3%|█ | {}/30 [00:01<00:07, 1.2it/s, reward={}]",
    ):
        text = "".join(epoch.format(i // 31, 1 + (i - 1) % 30, i / 100) for i in range(10, 61, 10))
        assert console(text) == [{"step": i, "reward": f"{i / 100}"} for i in range(10, 61, 10)]
    whole = "Epoch {}/2\nEpoch {}/2 | Step {}/100 | reward: 0.{:03}\n"  # of all epochs
    text = "".join(whole.format(1 + i // 51, 1 + i // 51, i, i) for i in range(10, 101, 10))
    assert [row["step"] for row in console(text)] == list(range(10, 101, 10))


def test_a_completions_numbered_steps_are_no_rows() -> None:
    said = "Step 1: let x = 3\nStep 2: then y = 4\nStep 3: so z = 7\n"
    rows = console("".join(f"{said}step {i} | helpfulness: 0.{i}\n" for i in range(4, 10)))
    assert rows[3:] == [{"step": i, "helpfulness": f"0.{i}"} for i in range(4, 10)]


@pytest.mark.parametrize(("cut", "last"), [("0.3", 7), ("0.", 7), ("", 7), ("0.35 ", 8), ("35.2%\n", 8)])
def test_a_last_number_that_may_be_cut_is_left_out(cut: str, last: int) -> None:
    rows = console(
        "".join(f"step {i} | loss: 1 | reward: 0.31\n" for i in range(8)) + f"step 8 | reward: {cut}"
    )
    assert max(row["step"] for row in rows if "reward" in row) == last


def test_a_console_log_is_read_whatever_bytes_are_in_it_and_in_linear_time(tmp_path: Path) -> None:
    """Two processes may write between the bytes of a letter; a run that goes on is cut in one."""
    text = "".join(f"✨ step {i} | acc: 0.{i}\n{'iter' * 9999}\n" for i in range(10, 20)).encode()
    log = tmp_path / "a.log"
    log.write_bytes(text.replace(b"\x9c\xa8", b"\x9c(pid=1)", 3) + "█".encode()[:2])
    assert pairs(reading_of(log).curve) == [(i, i / 100) for i in range(10, 20)]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ["np.", "1/2 ", "a@b ", "'a': ", "| a b "])
def test_a_line_of_100_kb_takes_no_minutes(text: str) -> None:
    line = f"step {{}} reward=0.5 {text * (100_000 // len(text))} step\n"
    assert len(console("".join(map(line.format, range(3))))) >= 2
