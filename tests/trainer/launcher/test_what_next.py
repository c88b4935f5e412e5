"""What is said at the end of a run: its warnings, and commands that work."""

import json
import shlex
from pathlib import Path

import pytest

from trainer import cli
from trainer.config import Config
from trainer.launcher.what_next import commands, odd, what_next


def test_each_warning_of_a_run_is_said_once(tmp_path: Path) -> None:
    rows = [
        {"step": 1},
        {"step": 4, "warning/kl": "far"},
        {"step": 5, "warning/ess": "few", "warning/kl": "x"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert odd(tmp_path) == ["step 4: far (2 times)", "step 5: few"]
    text = what_next(Config(run_dir=str(tmp_path)), 5)
    assert text.startswith("odd in this run\n  step 4: far (2 times)\n  step 5: few\n\nwhat next\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert what_next(Config(run_dir=str(tmp_path)), 5).startswith("No sign of trouble in this run.\n")


@pytest.mark.parametrize(
    ("flags", "key", "twice"), [("", "steps", 80), ("--pipeline.max_compute 1.5", "max_compute", 3.0)]
)
def test_the_command_to_go_on_doubles_what_ended_the_run(
    flags: str, key: str, twice: float, tmp_path: Path
) -> None:
    run = str(tmp_path)
    config = cli.parse(["--run-dir", run, "--pipeline.steps", "40", *flags.split()]).config
    (tmp_path / "config.yaml").write_text(cli.to_yaml(config))
    python, *words = shlex.split(commands(config, 40)["train twice as long"])
    assert [python, *words[:2]] == ["python", "-m", "trainer.main"]
    resumed = cli.parse(words[2:])
    assert resumed.resume and resumed.config.run_dir == run
    assert getattr(resumed.config.pipeline, key) == twice


def test_what_supervised_training_is_for_is_said(tmp_path: Path) -> None:
    config = cli.parse(["--recipe", "sft", "--task", "gsm8k", "--run-dir", str(tmp_path)]).config
    (first, *_) = commands(config, 40).values()
    assert f"--branch-from {tmp_path}@40 --recipe scalerl" in first
