"""What is said at the end of a run: its warnings, and commands that work."""

import json
import shlex
from pathlib import Path

import pytest

from trainer import cli
from trainer.config import Config
from trainer.launcher.what_next import commands, odd, what_next
from trainer.run_folder import record_end


def test_each_warning_of_a_run_is_said_once(tmp_path: Path) -> None:
    rows = [
        {"step": 1},
        {"step": 4, "warning/kl": "far"},
        {"step": 5, "warning/ess": "few", "warning/kl": "x"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert odd(tmp_path) == ["step 4: far (2 times)", "step 5: few"]
    text = what_next(Config(run_dir=str(tmp_path)))
    assert text.startswith("odd in this run\n  step 4: far (2 times)\n  step 5: few\n\nwhat next\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert what_next(Config(run_dir=str(tmp_path))).startswith("No sign of trouble in this run.\n")


LIMITS = {
    "steps": ("--pipeline.steps 40", "steps", 80),
    "compute": ("--pipeline.steps 40 --pipeline.max_compute 1.5", "max_compute", 3.0),
    "": ("--pipeline.steps 40", "steps", 40),  # Ctrl-C
}


@pytest.mark.parametrize("by", LIMITS)
def test_the_command_to_go_on_doubles_what_ended_the_run(by: str, tmp_path: Path) -> None:
    flags, key, twice = LIMITS[by]
    folder = tmp_path / "a run"
    folder.mkdir()
    config = cli.parse(["--run-dir", str(folder), *flags.split()]).config
    (folder / "config.yaml").write_text(cli.to_yaml(config))
    if by:
        record_end(folder, by, config.pipeline.max_compute)
    (name, command), *_ = commands(config).items()
    assert name == ("train twice as long" if by else "go on")
    python, *words = shlex.split(command)
    assert [python, *words[:2]] == ["python", "-m", "trainer.main"]
    resumed = cli.parse(words[2:])
    assert resumed.resume and resumed.config.run_dir == str(folder)
    assert getattr(resumed.config.pipeline, key) == twice


def test_commands_name_the_newest_checkpoint_that_is_there(tmp_path: Path) -> None:
    config = cli.parse(["--recipe", "sft", "--task", "gsm8k", "--run-dir", str(tmp_path)]).config
    assert [*commands(config)] == ["go on", "compare with another"]
    for step in (25, 40):
        save = tmp_path / "checkpoints" / f"step-{step:06d}"
        save.mkdir(parents=True)
        (save / "controller.json").write_text("{}")
    said = commands(config)
    assert f"--branch-from {tmp_path}@40 --recipe scalerl" in said["RL from here"]
    assert said["more answers a question"].startswith(f"python -m trainer.evaluate {tmp_path}@40 ")
    record_end(tmp_path, "forecast", 0.0)
    plain = cli.parse(["--run-dir", str(tmp_path)]).config
    assert "train twice as long" not in commands(plain) and "ask the model" in commands(plain)
