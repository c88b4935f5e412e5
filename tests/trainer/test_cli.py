"""Promises of the command line: every key overridable, explained and checked; errors are one clear line."""

import ast
import dataclasses
import math
import re
import shlex
from pathlib import Path
from typing import get_type_hints

import pytest
from mypy.build import build
from mypy.modulefinder import BuildSource
from mypy.nodes import MemberExpr
from mypy.options import Options
from mypy.types import Instance, get_proper_type

from kernels.objectives import OBJECTIVES
from trainer import cli, run_folder
from trainer.config import Config, ConfigError, ScorerConfig, TaskConfig
from trainer.main import main

ROOT = Path(__file__).parents[2]


def test_any_key_is_overridable_and_typed() -> None:
    line = """--pipeline.steps 3 --learner.lr=2e-6 --objective.drop_truncated false --seed 7
        --engine.stop '["\\n", "."]' --data.options '{a: 1}' --engine.interruption.lo 5"""
    config = cli.parse(shlex.split(line)).config
    assert (config.pipeline.steps, config.learner.lr, config.seed) == (3, 2e-6, 7)
    assert config.objective.drop_truncated is False
    assert config.engine.stop == ("\n", ".") and config.data.options == {"a": 1}
    assert config.engine.interruption.lo == 5
    assert config.run_dir == "runs/demo-7"


WRONG = {  # command lines, and what the error says
    "--pipelin.steps 3": "unknown option --pipelin.steps .did you mean 'pipeline.steps'",
    "--lr 3": "did you mean 'learner.lr'",
    "pipeline.steps=3": "pipeline.steps has no dashes; expected --pipeline.steps VALUE",
    "--pipeline.steps many": "command line: pipeline.steps: expected int, given 'many'",
    "--pipeline.steps 1.5": "pipeline.steps: expected int, given 1.5",
    "--engine.kind sglang": "engine.kind: expected auto | torch | vllm, given 'sglang'",
    "--objective.drop_truncated maybe": "expected true | false, given 'maybe'",
    "--learner.betas '[0.9]'": "expected list of 2 float",
    "--recipe nope": "no such recipe; give a .yaml file or one of: .*demo",
    "--pipeline.completions_per_prompt 1": "expected 2 or more: the advantage is relative to",
    "--engine.temperature 0": "engine.temperature is 0.0; expected above 0: RL needs samples",
    "--pipeline.steps": "expected one argument",
    "--logging.keep_at 'every 0'": "keep_at: expected a list of device-hours, .*; given 'every 0'",
    "--logging.keep_at 'every 1x from 2'": "with a factor above 1, such as 'every 2x from 0.5'",
    "--pipeline.epochs 2": "pipeline.epochs is 2; expected 1, or pipeline.scheme ppo",
    "--curriculum.kind linear --curriculum.length_start 1": "kind is linear, but nothing grows: set curr",
    "--curriculum.kind linear --curriculum.length_start 999": "is 999.0; expected above 0 and at most 1",
    "--curriculum.kind=linear --curriculum.length_start=.5 --engine.interruption.enabled=true": (
        "curriculum.length_start: completions are as long as engine.interruption's budgets"
    ),
    "--data.held_out 0": "data.held_out is 0; expected 1 or more: without held-out prompts",
    "--learner.grad_clip -1": "learner.grad_clip is -1.0; expected 0 or more",
    "--pipeline.npr_threshold 2": "npr_threshold is 2.0; expected above 0 and at most 1",
    "--learner.lr .nan": "learner.lr is nan; expected above 0",
    "--engine.interruption.hi 5": "expected lo <= hi, given lo 8, hi 5",
    "--engine.interruption.answer_tokens 0": "answer_tokens is 0; expected 1 or more",
    "--verifier.kind=judge --verifier.judge.url=http://h --pipeline.deadline_s=9": "than pipeline.deadline",
    "--objective.loss cipso": "objective: loss 'cipso': expected one of cispo, tis, .*module:fun",
    "--objective.clip_high 0.3": "clip_low and clip_high are of grpo, .* given with loss cispo",
    "--objective.loss icepop --objective.clip_low .1": "given with loss icepop and anchor g",
    "--objective.loss dapo --objective.clip_low 1.5": "clip_low: expected float, 0 or more and at most 1 or",
    "--objective.loss gspo --objective.clip_high -1": "clip_high: expected float, 0 or more or null",
    "--objective.mismatch mask": "mismatch mask needs anchor recomputed.*given generator and cisp",
    "--objective.loss icepop --objective.mask_low 9": "mask_low < mask_high, given 9.0 and",
    "--objective.loss gspo --objective.anchor recomputed --objective.mismatch mask": (
        "neither icepop .* nor one over sequences such as gspo; given recomputed and gspo"
    ),
    "--objective.kl.coefficient=1 --objective.kl.to=generator --objective.kl.place=reward": "needs kl.to ini",
    "--objective.loss gspo --objective.critic.body own": "one advantage a completion",
    "--verifier.extra exact": r"verifier.extra\[0\]: expected {kind, weight}, given 'exact'",
    "--verifier.extra '[{weight: 1}]'": r"verifier.extra\[0\].kind is missing; expected text",
    "--verifier.extra '[{kind: exact}, {kind: a:b, wait: 1}]'": r"unknown key 'verifier.extra\[1\].wait'",
    "--verifier.weight '{0: 1, x: 2}'": "weight: expected float or mapping of int to float, given {0",
    "--mixture '{a: {shar: 1}}'": "unknown key 'mixture.a.shar'",
    "--mixture '{a: {data: {held_out: 0}}}'": "mixture.a.data.held_out is 0; expected 1 or more",
    "--mixture '{a: {data: {sourc: x}}}'": "unknown key 'mixture.a.data.sourc' .did you mean 'data.",
    "--mixture '{a: {share: 0}}'": "mixture.a.share is 0.0; expected above 0",
    "--mixture '{a: {data: x.jsonl}}'": "mixture.a.data: expected {source, options, .*}, given 'x.jsonl'",
    "--mixture '{a: 1}'": "mixture.a: expected {share, data, verifier, environment}, given 1",
    "--mixture '{a/b: {}}'": "mixture: 'a/b'; expected a name, of letters",
    "--mixture '{a: {}}' --data.size 9 --verifier.kind exact": "move data.size, verifier.k",
    "--mixture '{a: {}}' --evaluation.sets '{b/c: x.jsonl}'": "'b/c'; expected TASK/NAME with a task of a",
    "--mixture '{a: {}}' --evaluation.sets '{a: x.jsonl}'": "'a'; expected TASK/NAME with a task of a",
    "--mixture '{a: {}}' --evaluation.sets '{a: {}}'": "evaluation.sets: 'a' is the name of a task",
    "--evaluation.sets '{a: {data: {colum: x}}}'": "unknown key 'evaluation.sets.a.data.colum'",
    "--evaluation.sets '{a: {data: {size: many}}}'": "evaluation.sets.a.data.size: expected int",
    "--evaluation.sets '{a: 7}'": "a: expected text or {data, verifier, environment, samples}, given 7",
    "--evaluation.sets '{a: aime42}'": "evaluation.sets: aime42: no such task; give a .yaml file or one of: ",
    "--evaluation.sets '{a: math-code}'": "evaluation.sets: the task math-code is a mixture; expected one",
    "--evaluation.sets '{a: {verifier: {kind: wishes}}}'": "evaluation.sets.a: verifier.kind 'wishes'",
    "--evaluation.sets '{a/b: x.jsonl}'": "evaluation.sets: 'a/b'; expected a name, of letters",
    "--evaluation.pass_at '[2, 8]' --evaluation.samples 7": "pass_at: 8; .* at most evaluation.samples, .* 7",
    "--evaluation.maj_at '[0]'": r"evaluation.maj_at\[0\] is 0; expected 1 or more",
    "--verifier.kind nonsense": "verifier.kind 'nonsense': expected choice, .*, or module:f",
    "--verifier.weight '{}'": "verifier.weight is empty; expected a number, or {step",
    "--verifier.extra '[{kind: exact, weight: {}}]'": "verifier.weight is empty",
    "--verifier.extra '[{kind: number}]'": "verifier.extra: number is given twice",
    "--mixture '{a: {verifier: {kind: x}}}'": "mixture.a: verifier.kind 'x': expected choice",
    "--verifier.kind judge": "expected either verifier.judge.path or verifier.judge.url",
    "--verifier.kind=judge --verifier.judge.path=a --verifier.judge.url=http://b": (
        "expected either verifier.judge.path or verifier.judge.url"
    ),
    "--evaluation.best_at '[2]'": "evaluation.best_at needs a judge: give verifier.extra",
    "'--evaluation.maj_at=[2]' --verifier.kind=code": "maj_at needs answers to compare: a verifier.k",
    "--objective.kl.coefficient inf": "kl.coefficient is inf; expected 0 or more, finite",
    "--objective.max_ratio nan": "max_ratio: expected float, above 0 or null, given",
    "--verifier.judge.threshold .nan": "judge.threshold: expected float, given nan",
    "--objective.loss=dapo --objective.clip_high=.nan": "clip_high: .* or null, given nan",
    "--verifier.weight '{0: .inf}'": "weight: expected float or mapping of int to float, given {0: inf}",
    "--learner.betas '[0.9, .nan]'": r"betas\[1\]: expected float, given nan",
    "--verifier.weight high": "weight: expected float or mapping of int to float, given 'high'",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_setting_is_one_clear_line_and_exit_code_2(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert re.search(WRONG[line].replace("|", r"\|"), err), err


@pytest.mark.parametrize(
    ("keep_at", "points"),
    [
        ("[2, .5, 1]", [0.5, 1, 2, math.inf]),
        ("every 0.5", [0.5, 1, 1.5, 2]),
        ("every 2x from .5", [0.5, 1, 2, 4]),
        ("[]", [math.inf]),
    ],
)
def test_compute_at_which_checkpoints_are_kept_is_a_list_or_a_grid(keep_at: str, points: list[float]) -> None:
    follows = cli.parse(["--logging.keep_at", keep_at]).config.logging.next_kept
    assert [follows(point) for point in (0.0, *points[:-1])] == points and follows(0.49) == points[0]


def test_a_bound_may_be_infinite() -> None:
    objective = cli.parse(["--objective.max_ratio", "inf", "--objective.mask_high", ".inf"]).config.objective
    assert objective.max_ratio == objective.mask_high == float("inf")


def test_a_runs_config_has_the_losss_own_bounds_as_numbers() -> None:
    text = cli.to_yaml(cli.parse(["--objective.loss", "tis", "--objective.max_ratio", "null"]).config)
    assert re.findall(r"max_ratio: .*|mask_.*", text) == ["max_ratio: 2.0", "mask_low: 0.5", "mask_high: 5.0"]


def commands_in(readme: str) -> list[list[str]]:
    """The arguments of every `python -m trainer.main` in the code blocks, continued lines joined."""
    commands = re.findall(r"^python -m trainer\.main (.*)", readme.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(words, comments=True) for words in commands]


def test_the_readmes_commands_with_own_data_start_from_neutral_settings() -> None:
    commands = [
        argv
        for page in ("README.md", "docs/tasks.md")
        for argv in commands_in((ROOT / page).read_text())
        if "--data.source" in argv and not {"--task", "choice", "code"} & set(argv)
    ]
    assert any("gsm8k/train.jsonl" in argv for argv in commands)
    for argv in commands:
        launch = cli.parse(argv)
        config = launch.config
        if "--data.template" not in argv:
            assert config.data.template == "{question}"
        assert "5 - 12" not in config.data.template
        assert (config.engine.stop, config.verifier.kind) == ((), "math")
        assert config.engine.max_new_tokens >= 256 and not launch.notices
        assert "gsm8k/train.jsonl" not in argv or config.run_dir == "runs/gsm8k-train-0"
        scalerl = cli.parse(["--recipe", "scalerl"]).config.objective
        assert config.objective == scalerl and config.pipeline.max_lag == 8
        assert config.model.dtype == "auto" and not config.engine.interruption.enabled


@pytest.mark.parametrize("argv", [[], ["--data.size", "500", "--data.held_out", "8"], ["--model.path", "m"]])
def test_without_a_recipe_and_data_of_ones_own_the_demo_runs(argv: list[str]) -> None:
    launch = cli.parse(argv)
    assert launch == cli.parse(["--recipe", "demo", *argv]) and not launch.notices
    engine, data = launch.config.engine, launch.config.data
    assert (engine.stop, engine.max_new_tokens, engine.slots) == (("\n",), 12, 192)
    assert "Calculate 5 - 12" in data.template and launch.config.verifier.kind == "number"


def test_own_data_on_top_of_a_recipe_names_the_settings_that_still_apply() -> None:
    (notice,) = cli.parse(["--recipe", "demo", "--data.source", "x.jsonl", "--engine.stop", "[]"]).notices
    assert "replaces the data that task arithmetic was made for (reasoning_gym:basic_arithmetic)" in notice
    assert "data.options, data.template, verifier.kind, engine.max_new_tokens still apply" in notice
    assert "\n" not in notice
    assert not cli.parse(["--recipe", "demo", "--data.source", "reasoning_gym:basic_arithmetic"]).notices


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("train.jsonl", "train"),
        ("/data/gsm8k/train.parquet", "gsm8k-train"),
        ("../my.data.jsonl", "my.data"),
        ("datasets:openai/gsm8k", "openai-gsm8k"),
        ("", "data"),
    ],
)
def test_a_run_on_own_data_is_named_after_them(source: str, name: str) -> None:
    assert cli.parse(["--data.source", source, "--seed", "3"]).config.run_dir == f"runs/{name}-3"


def reproduced(config: Config, folder: Path) -> Config:
    """The config that a run's config.yaml is read as."""
    (folder / "config.yaml").write_text(cli.to_yaml(config))
    return cli.parse(["--recipe", str(folder / "config.yaml")]).config


def test_a_mixture_starts_from_neutral_settings_and_reproduces_itself(tmp_path: Path) -> None:
    mixture = "{math: {share: 3, data: {source: m.jsonl}}, code: {data: {source: c.jsonl, size: 7}}}"
    config = cli.parse(["--mixture", mixture, "--evaluation.sets", "{math/far: f.jsonl}"]).config
    assert config.run_dir == "runs/math-code-0" and config.engine.stop == ()
    assert {name: task.share for name, task in config.tasks.items()} == {"math": 3, "code": 1}
    assert config.tasks["code"].data.size == 7
    assert reproduced(config, tmp_path) == config
    two = "{a: {}, b: {verifier: {length_penalty: {cache_tokens: 5}}}}"
    of_recipe = ("--verifier.length_penalty.cache_tokens", "9")
    penalised = cli.parse(["--mixture", two, *of_recipe]).config.tasks
    assert [t.verifier.length_penalty.cache_tokens for t in penalised.values()] == [9, 5]
    example, _ = re.findall(r"```yaml\n(.+?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
    (tmp_path / "example.yaml").write_text(example)
    assert cli.parse(["--recipe", str(tmp_path / "example.yaml")]).config.tasks["sums"].data.held_out == 200
    single = cli.parse(["--data.source", "m.jsonl"]).config
    assert single.tasks == {"": TaskConfig(data=single.data, verifier=single.verifier)}


def test_a_held_out_set_is_a_task_or_a_mapping_or_a_source_and_reproduces_itself(tmp_path: Path) -> None:
    _, example = re.findall(r"```yaml\n(.+?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
    (tmp_path / "example.yaml").write_text(example)
    data = ["--data.source", "m.jsonl", "--data.template", "{question}?", "--data.held_out", "7"]
    config = cli.parse(
        ["--recipe", str(tmp_path / "example.yaml"), *data, "--verifier.kind", "number"]
    ).config
    assert reproduced(config, tmp_path) == config
    sets = config.sets
    assert {name: one.samples for name, one in sets.items()} == {"aime24": 16, "quiz": 16, "hard": 4}
    kinds = {name: (one.verifier.kind, one.data.held_out) for name, one in sets.items()}
    assert kinds == {"aime24": ("math", 0), "quiz": ("choice", 0), "hard": ("number", 7)}
    assert (sets["aime24"].data.prompt_column, sets["aime24"].data.chat) == ("problem", True)
    assert (sets["quiz"].data.answer_column, sets["quiz"].data.prompt_column) == ("right", "question")
    assert (sets["hard"].data.source, sets["hard"].data.template) == ("hard.jsonl", "{question}?")
    for name in ("aime25", "livecodebench", "math500"):
        assert (
            cli.parse(["--evaluation.sets", f"{{x: {name}}}"]).config.sets["x"].data.options["split"]
            == "test"
        )


def test_the_resolved_config_reproduces_itself(tmp_path: Path) -> None:
    scorers = ["--verifier.extra", "[{kind: a:b, weight: {0: 1, 50: .5}}]", "--verifier.weight", "2"]
    config = cli.parse(["--learner.lr", "3e-6", "--engine.stop", "x", *scorers]).config
    assert config.verifier.extra == (ScorerConfig(kind="a:b", weight={0: 1.0, 50: 0.5}),)
    assert config.verifier.weight == 2.0
    assert reproduced(config, tmp_path) == config


@pytest.mark.parametrize(
    ("named", "folder"),
    [
        ("--run-dir runs/demo-7", "runs/demo-7"),
        ("--seed 7", "runs/demo-7"),
        ("--recipe demo", "runs/demo-0"),
        ("--task arithmetic", "runs/scalerl-arithmetic-0"),
    ],
)
def test_a_resume_goes_on_with_its_own_config_whatever_names_it(
    named: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(parents=True)
    Path(folder, "config.yaml").write_text(cli.to_yaml(cli.parse(["--learner.lr", "3e-6"]).config))
    config = cli.parse(["--resume", *named.split(), "--pipeline.steps", "9"]).config
    assert (config.learner.lr, config.pipeline.steps, config.run_dir) == (3e-6, 9, folder)
    assert cli.parse(named.split()).config.learner.lr != 3e-6  # without --resume it is another run


def test_a_folder_is_in_use_only_where_there_is_something_to_lose(tmp_path: Path) -> None:
    run_dir, journal = tmp_path / "run", tmp_path / "run" / "journal" / "000000.jsonl"

    def refuse(problem: str, resume: bool = False, folder: Path = run_dir) -> None:
        with pytest.raises(ConfigError, match=problem):
            run_folder.claim(str(folder), resume)

    run_folder.claim(str(run_dir), False).close()  # a start that failed, say of a wrong model
    (run_dir / "metrics.jsonl").touch()
    with run_folder.claim(str(run_dir), False):
        refuse("by another process")
    assert not (run_dir / "metrics.jsonl").exists()
    journal.parent.mkdir()
    journal.write_text("{}\n")
    refuse("in use already; continue that run with --resume")
    (run_dir / "config.yaml").touch()
    (run_dir / "metrics.jsonl").write_text("{}\n")
    for origin, problem in (
        ({"run": "runs/other"}, "was to branch from runs/other, whose checkpoint it lacks"),
        ({"replay": "runs/other"}, "is a replay of runs/other"),
    ):
        run_folder.record_origin(run_dir, origin)
        refuse(problem, resume=True)
        (run_dir / run_folder.ORIGIN).unlink()
    assert (run_dir / "metrics.jsonl").exists()
    run_folder.claim(str(run_dir), True).close()  # before its first checkpoint a run starts over
    assert not (run_dir / "metrics.jsonl").exists() and not list(run_dir.glob("journal/*"))
    assert {path.name for path in (run_dir / "before-2").iterdir()} == {"journal", "metrics.jsonl"}
    (run_dir / "checkpoints" / "step-000001").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-000001" / "controller.json").touch()
    refuse("in use already")
    (tmp_path / "letter.txt").touch()  # somebody's own folder
    refuse("in use already", folder=tmp_path)


def test_help_explains_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.parse(["--help"])
    assert e.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in cli.fields():
        assert f"--{key}" in text
    assert text.count("default:") >= len(cli.fields())
    assert "Seed of sampling, prompt order and initialisation. [int, 0 or more; default: 0]" in text


@pytest.mark.slow  # mypy reads all modules
def test_every_config_key_is_read_somewhere_in_the_trainer() -> None:
    """No dead options: a key that no module reads is a lie to the user. The section that an attribute is read
    of is known from mypy's types, so that `kl.coefficient` is no reading of `critic.coefficient`."""
    read = attributes_read() | {("ObjectiveConfig", k) for one in OBJECTIVES.values() for k in one.settings}
    assert not [key for key, (section, name) in owners(Config).items() if (section, name) not in read]


def attributes_read() -> set[tuple[str, str]]:
    """The (class, name) of every attribute that the trainer reads, but for the checks of the config."""
    settings = Options()
    settings.export_types, settings.incremental, settings.check_untyped_defs = True, False, True
    settings.follow_imports, settings.ignore_missing_imports = "skip", True
    paths = sorted(Path(cli.__file__).parent.rglob("*.py"))
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths]
    types = build([BuildSource(str(p), n) for p, n in zip(paths, names, strict=True)], settings).types
    of_type: dict[tuple[int, int, str], set[str]] = {}  # classes by place and name of the attribute
    for node in types:
        base = get_proper_type(types.get(node.expr)) if isinstance(node, MemberExpr) else None
        if isinstance(base, Instance):
            of_type.setdefault((node.line, node.column, node.name), set()).add(base.type.name)
    read = set()
    for path in paths:
        trees: list[ast.AST] = [ast.parse(path.read_text())]
        if path.parent.name == "config" or path.name == "cli.py":  # only their properties read to some end
            functions = [n for n in ast.walk(trees[0]) if isinstance(n, ast.FunctionDef)]
            trees = [f for f in functions if any(ast.unparse(d) == "property" for d in f.decorator_list)]
        for n in (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute)):
            read |= {(name, n.attr) for name in of_type.get((n.lineno, n.col_offset, n.attr), ())}
    return read


def owners(cls: type, prefix: str = "") -> dict[str, tuple[str, str]]:
    """The class of the section, and the name in it, by key."""
    keys = {}
    for name, hint in get_type_hints(cls).items():
        section = dataclasses.is_dataclass(hint)
        keys |= owners(hint, f"{prefix}{name}.") if section else {f"{prefix}{name}": (cls.__name__, name)}
    return keys
