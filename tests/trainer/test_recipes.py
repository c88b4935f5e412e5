"""Promises of recipes and tasks: any recipe on any task, who wins where both set a key, and true files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import cli
from trainer.config import Config, DataConfig
from trainer.config.layers import RECIPES, read_layers
from trainer.launcher.notices import notices
from trainer.main import main

RECIPE_FILES = sorted(RECIPES.glob("*.yaml"))
TASK_FILES = sorted((RECIPES / "tasks").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def said(*argv: str) -> list[str]:
    return list(notices(cli.parse(argv)))


def test_the_later_layer_wins_from_defaults_over_bases_recipe_and_task_to_the_command_line(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        first="{learner: {lr: 1, warmup_steps: 1, eps: 1, weight_decay: 1}, task: a.yaml}",
        second="{base: first.yaml, learner: {lr: 2, warmup_steps: 2, eps: 2}, pipeline: {steps: 2}}",
        a="{learner: {lr: 9}}",  # the base's own task gives way to --task
        below="{learner: {lr: 3, warmup_steps: 3}, data: {size: 3}, pipeline: {steps: 3}}",
        b="{base: below.yaml, learner: {lr: 4}, pipeline: {steps: 4}}",
    )
    recipe, task = str(tmp_path / "second.yaml"), str(tmp_path / "b.yaml")
    launch = cli.parse(["--recipe", recipe, "--task", task, "--pipeline.steps", "5"])
    learner = launch.config.learner
    assert (launch.config.pipeline.steps, learner.lr, learner.warmup_steps) == (5, 4, 3)
    assert (learner.eps, learner.weight_decay, launch.config.data.size) == (2, 1, 3)
    assert learner.grad_clip == Config().learner.grad_clip
    assert launch.origins == {
        "recipe first": ["learner.weight_decay"], "recipe second": ["learner.eps"],
        "task below": ["learner.warmup_steps", "data.size"], "task b": ["learner.lr"],
        "the command line": ["pipeline.steps"],
    }  # fmt: skip
    assert launch.config.run_dir == "runs/second-b-0"
    assert cli.parse(["--recipe", recipe]).config.learner.lr == 9


def test_a_recipe_file_of_ones_own_comes_after_a_shipped_task_and_a_line_names_what_differs(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        mine="{base: grpo, learner: {lr: 1.0e-4}, pipeline: {prompts_per_step: 16}, model: {path: my-model}}",
        task="{base: study, learner: {lr: 2.0e-4}}",
        same="{base: grpo, learner: {lr: 6.0e-4}}",
        data="{base: grpo, data: {size: 5}}",
    )
    mine, task, same, data = (str(tmp_path / f"{n}.yaml") for n in ("mine", "task", "same", "data"))
    launch = cli.parse(["--recipe", mine, "--task", "study"])
    config = launch.config
    assert (config.learner.lr, config.pipeline.prompts_per_step, config.model.path) == (1e-4, 16, "my-model")
    assert config.pipeline.steps == 400  # the shipped task's
    assert launch.notices == (
        "mine.yaml comes after task addition: model.path my-model (not tiny), learner.lr 0.0001 "
        "(not 0.0006), pipeline.prompts_per_step 16 (not 256)",
    )
    launch = cli.parse(["--recipe", mine, "--task", task])
    assert (launch.config.learner.lr, launch.config.pipeline.prompts_per_step) == (2e-4, 16)
    assert launch.notices[-1] == "task.yaml comes after recipe mine: learner.lr 0.0002 (not 0.0001)"
    assert not cli.parse(["--recipe", same, "--task", "study"]).notices
    launch = cli.parse(["--recipe", data, "--task", "study"])
    assert launch.config.data.size == 20000
    assert launch.notices == (
        "data.yaml sets data.size, which task study replaces: a task has data of its own",
    )


def test_shipped_files_are_shipped_through_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path.cwd())
    program = "from trainer import cli; print(cli.parse(['--recipe', 'grpo', '--task', 'study']).notices)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "link")}
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, cwd=tmp_path, env=environment, text=True) == "()\n"


def test_a_task_replaces_the_recipes_data_altogether(tmp_path: Path) -> None:
    write(tmp_path, whole="{data: {source: x.jsonl, chat: true}, engine: {stop: [x]}}", t="{data: {size: 7}}")
    argv = ["--recipe", str(tmp_path / "whole.yaml"), "--task", str(tmp_path / "t.yaml")]
    config = cli.parse(argv).config
    assert config.data == DataConfig(size=7)
    assert config.engine.stop == ("x",)


MISFITS = [  # a recipe, a task, and what is said
    ("base: b.yaml", "", r"expected a base that ends, but each is based on the next: a -> b -> a"),
    ("base: nope", "", r"--recipe nope: no such recipe; give a .yaml file or one of: .*scalerl"),
    ("task: nope", "", r"--task nope: no such task; give a .yaml file or one of: .*arithmetic"),
    ("{task: arithmetic, data: {size: 3}}", "", r"a.yaml sets data.size: that is for the task to set"),
    ("seed: 1", "{objective: {kl: {estimator: k1}}}", r"sets objective.kl.estimator: .* for the recipe"),
    ("seed: 1", "pipeline: {scheme: pipeline_rl}", r"sets pipeline.scheme: .* for the recipe to set"),
    ("seed: 1", "engine: {interruption: {enabled: true}}", r"sets engine.interruption.enabled"),
    ("seed: 1", "learner: {lrr: 1}", r"t.yaml: unknown key 'learner.lrr' .did you mean 'learner.lr'"),
    ("learner: [1", "", r"a.yaml: not valid YAML"),
    ("recommended: {learner.lrr: [1, 2]}", "", r"recommended: unknown key 'learner.lrr'"),
]


@pytest.mark.parametrize(("recipe", "task", "problem"), MISFITS)
def test_files_that_do_not_fit_together_are_one_clear_line(
    recipe: str, task: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, a=recipe, b="base: a.yaml", t=task)
    argv = ["--recipe", str(tmp_path / "a.yaml"), *(["--task", str(tmp_path / "t.yaml")] if task else [])]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(problem, err), err


def test_a_task_without_a_recipe_is_trained_with_scalerl() -> None:
    launch = cli.parse(["--task", "arithmetic", "--seed", "3"])
    assert launch.config == cli.parse(["--task", "arithmetic", "--recipe", "scalerl", "--seed", "3"]).config
    assert launch.config.run_dir == "runs/scalerl-arithmetic-3"
    assert launch.config.engine.interruption.enabled and launch.config.engine.longest_completion() <= 13


def test_what_cannot_have_an_effect_or_leaves_a_recommendation_is_said(tmp_path: Path) -> None:
    write(tmp_path, r="recommended: {learner.lr: [1e-6, 5e-6], objective.clip_low: [0.2, 0.2]}")
    flags = ("--recipe", str(tmp_path / "r.yaml"))
    assert said(*flags, "--learner.lr", "5e-6") == []
    assert said(*flags, "--learner.lr", "6e-6") == ["learner.lr is 6e-06; recipe r recommends 1e-06 to 5e-06"]
    head = ("--model.fp32_head", "neither", "--model.dtype")
    assert said(*head, "bfloat16") == []
    assert said(*head, "float32") == ["model.fp32_head neither changes nothing: model.dtype is float32"]
    penalty = "--verifier.length_penalty.cache_tokens=100", "--verifier.length_penalty.max_tokens=600"
    assert said(*penalty, "--engine.max_new_tokens", "501") == []
    assert said(*penalty, "--engine.max_new_tokens", "500") == [
        "the length penalty begins at 500 tokens, and no completion is longer than 500"
    ]


PARTNERS = {  # a setting -> the other that it needs
    "pipeline.minibatches=4": "pipeline.scheme=ppo_off_policy",
    "pipeline.npr_history=2": "pipeline.no_positive_resampling=true",
    "curriculum.by=pass_rate": "curriculum.kind=linear",
    "curriculum.length_start=.5": "curriculum.kind=exponential",
    "verifier.length_penalty.max_tokens=9": "verifier.length_penalty.cache_tokens=2",
    "learner.final_lr_share=.1": "learner.schedule=cosine",
    "objective.mask_low=.1": "objective.loss=icepop",
    "objective.resample_limit=2": "objective.zero_variance=resample",
    "objective.global_std=2": "objective.advantage_norm=global",
    "objective.critic.lr=.1": "objective.critic.body=own",
    "objective.kl.place=reward": "objective.kl.coefficient=.1",
}


@pytest.mark.parametrize("setting", PARTNERS)
def test_a_setting_without_its_partner_is_said_to_have_no_effect(setting: str) -> None:
    argv, key = ("--data.source=x.jsonl", f"--{setting}"), setting.partition("=")[0]
    partner, _, value = PARTNERS[setting].partition("=")
    (line,) = said(*argv, *(["--pipeline.no_positive_resampling=false"] if "npr" in key else []))
    assert line.startswith(f"{key} ") and "has no effect: it needs " in line
    needs = line.partition("it needs ")[2].split(" or ")
    assert {partner, f"{partner} {value}"} & set(needs)
    assert not [line for line in said(*argv, f"--{PARTNERS[setting]}") if key in line]


EXCLUDED = {
    "--pipeline.max_lag=2 --pipeline.scheme=ppo_off_policy": "max_lag 2 has no effect: it needs pipeline.s",
    "--objective.max_ratio=5 --objective.loss=dapo": "max_ratio 5.0 has no effect: it needs objective.loss c",
    "--objective.std_over=all --objective.advantage_norm=group": "std_over all has no effect: it needs",
    "--curriculum.start=.5 --curriculum.kind=linear --curriculum.length_start=.5": "it needs curriculum.by",
    "--engine.max_new_tokens=12 --engine.interruption.enabled=true": "tokens 12 has no effect: it needs",
    "--learner.warmup_steps=60": "warmup_steps is 60: the learning rate rises over all 60 steps",
    "--objective.anchor=recomputed": "each ratio is 1 without ppo_off_policy of several steps",
    "--objective.kl.coefficient=.1 --objective.kl.estimator=k1": "k1 has no effect in the loss",
}


@pytest.mark.parametrize("argv", EXCLUDED)
def test_settings_that_exclude_each_other_are_said(argv: str) -> None:
    (line,) = said("--data.source=x.jsonl", *argv.split())
    assert EXCLUDED[argv] in line
    assert "k1" not in argv or not said("--data.source=x.jsonl", *argv.split(), "--objective.kl.top_k=5")


def test_only_changed_settings_of_the_users_own_files_are_said_to_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, mine="{base: demo, objective: {global_std: 2, resample_limit: 10, critic: {body: none}}}")
    (line,) = said("--recipe", str(tmp_path / "mine.yaml"))
    assert line == "objective.global_std 2.0 has no effect: it needs objective.advantage_norm global"
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", "config.yaml").write_text(cli.to_yaml(cli.parse(["--recipe", "mine.yaml"]).config))
    assert said("--resume", "--run-dir", "run") == []


def test_a_size_preset_recommends_to_a_recipe_what_the_recipe_can_have() -> None:

    def notices_of(recipe: str, *more: str) -> list[str]:
        lines = said("--recipe", recipe, "--task", "size-7b-70b", *more)
        return [line for line in lines if "recommends" in line]

    for recipe in ("scalerl", "grpo", "article"):  # the first two have one epoch, no KL, no entropy bonus
        assert notices_of(recipe) == []
    assert notices_of("scalerl", "--learner.lr", "4e-6") == [
        "learner.lr is 4e-06; task size-7b-70b recommends 1e-06 to 3e-06"
    ]
    assert notices_of("grpo", "--pipeline.epochs=5", "--objective.kl.coefficient=.001") == [
        "pipeline.epochs is 5; task size-7b-70b recommends 2 to 4",
        "objective.kl.coefficient is 0.001; task size-7b-70b recommends 0.01 to 0.05",
    ]
    assert notices_of("article", "--objective.kl.coefficient=0", "--pipeline.epochs=1") == [
        "objective.kl.coefficient is 0.0; recipe article recommends 0.01 to 0.1",
        "pipeline.epochs is 1; recipe article recommends 2 to 8",
    ]


def test_a_recipes_bound_beside_another_loss_is_told() -> None:
    tis = ["--recipe", "scalerl", "--objective.loss", "tis"]
    bound = "objective.max_ratio 5.0 is a file's; of tis it is 2.0, as --objective.max_ratio null makes it"
    assert bound in said(*tis)
    assert cli.parse([*tis, "--objective.max_ratio", "null"]).config.objective.max_ratio == 2
    for more in ("null", "5"):
        assert not any("is a file's" in line for line in said(*tis, "--objective.max_ratio", more))


def test_gpus_that_stay_idle_and_a_vllm_without_one_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("trainer.launcher.notices.without_cuda", lambda: "")
    monkeypatch.setattr("trainer.launcher.notices.importlib.util.find_spec", lambda name: None)
    (line,) = said("--task", "arithmetic")
    assert line.startswith("vLLM is not installed: the torch engine generates")
    (line,) = said("--recipe", "tiny")
    assert line.startswith("model.path tiny is too small for a GPU") and "stays on the CPU" in line
    (line,) = said("--recipe", "tiny", "--learner.ranks", "1")
    assert line.startswith("vLLM is not installed: the torch engine generates")
    assert said("--recipe", "scalerl") == []
    monkeypatch.setattr("trainer.launcher.notices.without_cuda", lambda: "2.13.0+cpu")
    (line,) = said("--recipe", "scalerl")
    assert line.startswith("torch 2.13.0+cpu is built without CUDA: 2 GPUs stay idle")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said("--task", "arithmetic") == []
    assert said("--recipe", "scalerl") == ["no GPU on this machine: vLLM and the learner run on the CPU"]


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda p: p.stem)
def test_every_recipe_names_its_source_fits_its_own_task_and_resolves_on_every_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_text()
    assert text.startswith("# ") and re.search(r"arXiv \d{4}\.\d{5}", text), "no source"
    gpus = "0" if "kind: vllm" in cli.to_yaml(cli.parse(["--recipe", path.stem]).config) else ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("trainer.launcher.notices.without_cuda", lambda: "")
    assert said("--recipe", path.stem) == []
    for task in TASK_FILES:
        config = cli.parse(["--recipe", path.stem, "--task", task.stem]).config
        assert config.run_dir == f"runs/{path.stem}-{task.stem}-0"


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda p: p.stem)
def test_every_task_says_where_recipes_that_interrupt_do_it(path: Path) -> None:
    (layer,) = [layer for layer in read_layers("task", path.stem) if layer.path == path.resolve()]
    keys = {key for layer in read_layers("task", path.stem) for key in layer.values}
    lengths = {f"engine.interruption.{key}" for key in ("lo", "hi", "answer_tokens")}
    assert keys >= lengths or "model.path" not in keys, "a size preset alone is no task"
    assert layer.path.read_text().startswith("# ")


@pytest.mark.parametrize("path", [*RECIPE_FILES, *TASK_FILES], ids=lambda p: p.stem)
def test_no_file_leaves_what_it_recommends(path: Path) -> None:
    kind = "task" if path in TASK_FILES else "recipe"
    for layer in read_layers(kind, path.stem):
        for key, (least, greatest) in layer.recommended.items():
            assert key not in layer.values or least <= float(layer.values[key]) <= greatest, key
