"""Promises of what trainers print: TRL's dicts among progress bars, verl's first validation, notebooks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.logs import pairs, reading_of, readings_of, start_of

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
    log.write_text(
        f"(pid=1) Initial validation metrics: {{'val/test_score/gsm8k': np.float64(0.125)}}\n{steps}"
    )
    reading = reading_of(log)
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
    ],
)
def test_a_line_has_the_step_it_names_and_is_an_evaluation_where_it_says_so(
    line: str, row: dict[str, str]
) -> None:
    text = "{'lr': 1e-06}\n" + "".join(line.format(i, i) + "\n" for i in range(13, 20))
    expected = [{"step": i, **{k: v.format(i) for k, v in row.items()}} for i in range(13, 20)]
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
