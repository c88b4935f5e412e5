"""Promises of the command line: every key overridable, explained and checked; errors are one clear line."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from trainer import cli
from trainer.config import RECIPES, Config, ConfigError
from trainer.main import main


def test_any_key_is_overridable_and_typed() -> None:
    config = cli.parse(
        [
            *(
                "--pipeline.steps",
                "3",
                "--learner.lr=2e-6",
                "--objective.drop_truncated",
                "false",
                "--seed",
                "7",
            ),
            *("--engine.stop", '["\\n", "."]', "--data.options", "{a: 1}", "--engine.interruption.lo", "5"),
        ]
    ).config
    assert (config.pipeline.steps, config.learner.lr, config.seed) == (3, 2e-6, 7)
    assert config.objective.drop_truncated is False
    assert config.engine.stop == ("\n", ".") and config.data.options == {"a": 1}
    assert config.engine.interruption.lo == 5
    assert config.run_dir == "runs/demo-7"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--pipelin.steps", "3"], "unknown option --pipelin.steps .did you mean 'pipeline.steps'"),
        (["--lr", "3"], "did you mean 'learner.lr'"),
        (["--pipeline.steps", "many"], "pipeline.steps: expected int, given 'many'"),
        (["--pipeline.steps", "1.5"], "pipeline.steps: expected int, given 1.5"),
        (["--engine.kind", "sglang"], "engine.kind: expected torch, given 'sglang'"),
        (["--objective.drop_truncated", "maybe"], "expected true | false, given 'maybe'"),
        (["--learner.betas", "[0.9]"], "expected list of 2 float"),
        (["--recipe", "nope"], "no such recipe; give a .yaml file or one of: .*demo"),
        (["--pipeline.completions_per_prompt", "1"], "expected 2 or more"),
        (["--engine.temperature", "0"], "engine.temperature must be above 0"),
        (["--pipeline.steps"], "expected one argument"),
    ],
)
def test_a_wrong_setting_is_one_clear_line_and_exit_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=says.replace("|", r"\|")):
        cli.parse(argv)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_a_recipe_with_an_unknown_key_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("learner: {learning_rate: 1.0}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: unknown key 'learner.learning_rate' .*did you mean"):
        cli.parse(["--recipe", str(tmp_path / "mine.yaml")])
    (tmp_path / "bad.yaml").write_text("learner: [1\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        cli.parse(["--recipe", str(tmp_path / "bad.yaml")])


def test_the_resolved_config_reproduces_itself(tmp_path: Path) -> None:
    config = cli.parse(["--learner.lr", "3e-6", "--engine.stop", "x"]).config
    path = tmp_path / "config.yaml"
    path.write_text(cli.to_yaml(config))
    assert cli.parse(["--recipe", str(path)]).config == config


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_is_valid(recipe: str) -> None:
    cli.parse(["--recipe", recipe])


def test_help_explains_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.parse(["--help"])
    assert e.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key, _ in cli._fields(Config):
        assert f"--{key}" in text
    assert text.count("default:") >= len(list(cli._fields(Config)))


def test_every_config_key_is_read_somewhere_in_the_trainer() -> None:
    """No dead options: a key that no module reads is a lie to the user."""
    sources = "".join(
        p.read_text()
        for p in Path(cli.__file__).parent.rglob("*.py")
        if p.name not in ("config.py", "cli.py")
    )
    dead = [key for key, _ in cli._fields(Config) if f".{key.rpartition('.')[2]}" not in sources]
    assert dead == []


def test_recipes_hold_only_what_they_change() -> None:
    for path in RECIPES.glob("*.yaml"):
        assert set(yaml.safe_load(path.read_text())) <= {f.name for f in dataclasses.fields(Config)}
