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
    assert "\n  the held-out reward has fallen since step 30" in what_next(Config(run_dir=str(tmp_path)), 30)


def test_a_run_too_short_for_a_warning_says_that_it_has_learned_nothing(tmp_path: Path) -> None:
    def lines(*effective: float, right: float = 0.0) -> list[str]:
        rows = [{"step": 0}] + [
            {"step": i, "train/effective_prompts": value, "verify/unparsable": 0.75, "train/all_right": right}
            for i, value in enumerate(effective, 1)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return odd(tmp_path)

    assert lines(0, 0)[0].startswith("in none of the 2 steps had a prompt two different rewards, so nothing")
    assert "of 75% of the completions the verifier could read no answer" in lines(0, 0)[0]
    assert lines() == lines(0, 1) == []
    assert lines(0, 0, right=1.0)[0].endswith("every answer is right: the task is solved for this model")


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


def save(run: Path, *steps: int) -> None:
    for folder in (run / "checkpoints" / f"step-{step:06d}" for step in steps):
        folder.mkdir(parents=True)
        (folder / "controller.json").write_text("{}")


def test_a_run_that_has_fallen_goes_on_more_slowly_from_before(tmp_path: Path) -> None:
    run = str(tmp_path / "a run")
    config = cli.parse(["--recipe", "tiny", "--learner.lr", "3e-4", "--run-dir", run]).config
    save(Path(run), 25, 40)
    Path(run, "config.yaml").write_text(cli.to_yaml(config))
    for best, branch in ((30, f"{run}@25"), (25, f"{run}@25"), (20, "")):
        (name, command), *_ = commands(config, best).items()
        launch = cli.parse(shlex.split(command)[3:])
        assert name == "train more slowly" and launch.branch == branch
        assert (launch.config.learner.lr, launch.config.run_dir) == (1e-4, f"{run}-slower")


@pytest.mark.parametrize("recipe", ["tiny", "demo", "grpo"])
def test_another_recipe_runs_on_the_same_data_and_model(recipe: str, tmp_path: Path) -> None:
    config = cli.parse(["--recipe", recipe, "--run-dir", str(tmp_path)]).config
    *_, (_, train), (_, compare) = commands(config).items()
    another = cli.parse(shlex.split(train)[3:]).config
    assert (another.data, another.model.path) == (config.data, config.model.path)
    assert another.objective.loss != config.objective.loss
    assert shlex.split(compare)[-2:] == [str(tmp_path), another.run_dir]


def test_another_recipe_reads_data_of_the_users_in_the_same_way(tmp_path: Path) -> None:
    flags = {
        "--model.path": "./my-model",
        "--data.source": "my quiz.csv",
        "--data.choices_column": '["a", "b"]',
        "--data.template": "{question}\n{choices}",
        "--data.max_bad_rows": "0.1",
        "--verifier.kind": "choice",
        "--pipeline.steps": "7",
        "--pipeline.max_compute": "0.5",
        "--model.lora.rank": "8",
        "--run-dir": str(tmp_path),
    }
    config = cli.parse([word for pair in flags.items() for word in pair]).config
    another = cli.parse(shlex.split(commands(config)["train another recipe"])[3:]).config
    assert (another.data, another.verifier) == (config.data, config.verifier)
    assert another.model.lora == config.model.lora
    assert (another.pipeline.steps, another.pipeline.max_compute) == (7, 0.5)
    assert another.objective.loss == "grpo"
    episodes = ["--environment.kind", "calculator", "--environment.max_turns", "3"]
    source = ["--model.path", "x", "--data.source", "a.csv", "--run-dir", str(tmp_path)]
    config = cli.parse(source + episodes).config
    another = cli.parse(shlex.split(commands(config)["train another recipe"])[3:]).config
    assert another.environment == config.environment != Config().environment
    mine = cli.parse(["--recipe", "tiny", "--verifier.kind", "exact", "--run-dir", str(tmp_path)]).config
    assert (
        "--task addition --model.path tiny --verifier.kind exact " in commands(mine)["train another recipe"]
    )


def test_commands_name_the_newest_checkpoint_that_is_there(tmp_path: Path) -> None:
    config = cli.parse(["--recipe", "sft", "--task", "gsm8k", "--run-dir", str(tmp_path)]).config
    assert [*commands(config)][:2] == ["go on", "look at its rollouts"]
    save(tmp_path, 25, 40)
    for best, step in (
        (None, 40),
        (40, 40),
        (30, 25),
        (20, 25),
    ):  # a run that has fallen: from before, if saved
        rl = commands(config, best)["RL from here"]
        assert f"--branch-from {tmp_path}@{step} --recipe scalerl --task gsm8k" in rl
    said = commands(config, best=30)
    assert said["more answers a question"].startswith(f"python -m trainer.evaluate {tmp_path}@40 ")
    record_end(tmp_path, "forecast", 0.0)
    plain = cli.parse(["--run-dir", str(tmp_path)]).config
    assert "train twice as long" not in commands(plain) and "ask the model" in commands(plain)
