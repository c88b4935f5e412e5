"""Promises of mixtures: shares, own epochs, exact resume, disjoint prompts, a score for each held-out set."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, context, group, having, rollout
from test_data import ByteTokenizer, write

from trainer.config import (
    Config,
    ConfigError,
    DataConfig,
    JudgeConfig,
    ScorerConfig,
    SetConfig,
    SetDataConfig,
    TaskConfig,
    VerifierConfig,
)
from trainer.controller.data import Dataset
from trainer.controller.evaluate import by_prompt, evaluate
from trainer.controller.examine import examine
from trainer.controller.mixture import Mixture, load_tasks, sampler_of, task_metrics
from trainer.controller.rewards import Scored
from trainer.types import Prompt
from trainer.verifiers.verifier import check_verifiers


def prompts(task: str, n: int, start: int = 0) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"{task}{i}", f"{task} {i}", (1, 2), "7", {}, task) for i in range(start, start + n))


def mixed(seed: int = 0, **shares: float) -> Config:
    return Config(seed=seed, mixture={name: TaskConfig(share=share) for name, share in shares.items()})


def sampler(config: Config, notes: list[str] | None = None, size: int = 10) -> Mixture:
    train = [prompt for name in config.mixture for prompt in prompts(name, size)]
    made = sampler_of(config, train, (notes if notes is not None else []).append)
    assert isinstance(made, Mixture)
    return made


def draws(mixture: Mixture, count: int) -> list[tuple[int, int, str]]:
    """Group id, epoch and prompt id of the next prompts."""
    issued = [mixture.next(0) for _ in range(count)]
    return [(i.group_id, i.epoch, i.prompt.prompt_id) for i in issued if i is not None]


def test_shares_are_held_within_sampling_error_and_groups_are_numbered_without_gaps() -> None:
    n, drawn = 600, draws(sampler(mixed(math=6, code=3, logic=1)), 600)
    assert [group_id for group_id, _, _ in drawn] == list(range(n))
    counts = Counter(prompt.rstrip("0123456789") for _, _, prompt in drawn)
    for task, p in (("math", 0.6), ("code", 0.3), ("logic", 0.1)):
        assert abs(counts[task] - n * p) <= 3.3 * math.sqrt(n * p * (1 - p))  # binomial: 1 in 1000 outside
    other = draws(sampler(mixed(seed=1, math=6, code=3, logic=1)), n)
    assert [prompt[0] for *_, prompt in drawn] != [prompt[0] for *_, prompt in other]


def test_each_task_has_its_own_epochs() -> None:
    drawn = draws(sampler(mixed(a=0.8, b=0.2), size=7), 100)
    for task in "ab":
        mine = [(epoch, prompt) for _, epoch, prompt in drawn if prompt[0] == task]
        assert [epoch for epoch, _ in mine] == [i // 7 for i in range(len(mine))]
        assert {prompt for _, prompt in mine[:7]} == {f"{task}{i}" for i in range(7)}


def test_a_task_that_is_solved_gives_its_share_to_the_others_in_proportion_with_one_note() -> None:
    notes: list[str] = []
    mixture = sampler(mixed(a=0.5, b=0.4, c=0.1), notes)
    for prompt in prompts("a", 10):
        mixture.record(group(prompt, 8, 8))
    assert mixture.solved_share == pytest.approx(0.5)
    counts = Counter(prompt[0] for *_, prompt in draws(mixture, 500))
    assert counts["a"] == 0 and abs(counts["b"] - 400) <= 3.3 * math.sqrt(500 * 0.8 * 0.2)
    (note,) = notes
    assert note.startswith("the other tasks take the share of a: all 10 training prompts have been solved")
    for prompt in (*prompts("b", 10), *prompts("c", 10)):
        mixture.record(group(prompt, 8, 8))
    assert mixture.next(0) is None and "c: all 10 training prompts" in mixture.exhausted


def test_a_restored_mixture_continues_like_an_unbroken_one() -> None:
    config = mixed(a=2, b=1)
    unbroken, broken, resumed = sampler(config), sampler(config), sampler(config)
    expected = draws(unbroken, 300)
    assert draws(broken, 137) == expected[:137]
    resumed.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    assert draws(resumed, 163) == expected[137:]
    with pytest.raises(ConfigError, match="the checkpoint's tasks are a, b, the config's a, c; resume with"):
        sampler(mixed(a=2, c=1)).load_state_dict(broken.state_dict())
    with pytest.raises(ConfigError, match="tasks are not a mixture, the config's a, c"):
        sampler(mixed(a=2, c=1)).load_state_dict({"group_id": 4})


def test_task_metrics_are_the_share_of_the_groups_and_the_pass_rate() -> None:
    (a, b), (c,) = prompts("a", 2), prompts("b", 1)
    groups = [group(a, 1, 4), group(b, 3, 4), group(c, 4, 4), group(a, 2, 4)]
    aside = [group(a, 4, 4), group(b, 4, 4)]  # (1/4 + 3/4 + 2/4 + 1 + 1) / 5 = .7 of task a are right
    assert task_metrics(groups, aside, "abc") == {
        "train/a/share": 0.75, "train/a/pass_rate": 0.7,
        "train/b/share": 0.25, "train/b/pass_rate": 1.0,
        "train/c/share": 0.0,
    }  # fmt: skip


class Scripted:
    """A task's scorer: a prompt's completion is correct if it has at most as many tokens as stand here."""

    def __init__(self, task: str, most: Mapping[str, int]) -> None:
        self.task, self.most = task, most

    async def score(self, prompt: Prompt, text: str, tokens: int, step: int | None) -> Scored:
        assert step is None and prompt.task == self.task
        right = tokens <= self.most[prompt.prompt_id]
        likes_long = {self.task: 1.0, "judge": 0.1 * tokens}
        return Scored(right + 0.1 * tokens, "correct" if right else "wrong", likes_long)


def scores(config: Config, dataset: Dataset, samples: int, most: Mapping[str, int]) -> dict[str, float]:
    """The evaluation where the i-th completion of a prompt has i tokens, from 1."""
    config = having(config, evaluation={"samples": samples})
    engine: Any = FakeEngine(lambda request, index: index + 1)
    ctx = replace(context(config, engine), rewards={name: Scripted(name, most) for name in config.scored})
    return asyncio.run(evaluate(ctx, dataset, 3))


def test_each_task_and_each_further_set_has_its_own_score_and_the_main_one_is_weighted() -> None:
    """With k = 2 samples. a: rates 1 and 1/2, so .75; its SE² = (0 + ½·½·2/1)/2 / 2² = .0625. b: rate 1/2,
    SE² = (½·½·2/1)/2 = .25. Shares 3:1: .75·.75 + .25·.5 = .6875; SE² = .75²·.0625 + .25²·.25 = .05078125.
    a/far: no completion is right: 0, and the least SE: half an outcome of two."""
    held_out = (*prompts("a", 2), *prompts("b", 1))
    far = replace(prompts("far", 1)[0], task="a/far")
    most = {"a0": 2, "a1": 1, "b0": 1, "far0": 0}
    config = having(mixed(a=3, b=1), evaluation={"sets": {"a/far": "far.jsonl"}})
    numbers = scores(config, Dataset((), held_out, {"a/far": (far,)}), 2, most)
    assert numbers["pass_rate"] == 0.6875 and numbers["pass_rate_se"] == pytest.approx(0.05078125**0.5)
    assert (numbers["prompts"], numbers["samples"], numbers["mean_tokens"]) == (3, 2, 1.5)
    assert (numbers["a/pass_rate"], numbers["a/pass_rate_se"]) == (0.75, 0.25)
    assert (numbers["b/pass_rate"], numbers["b/pass_rate_se"]) == (0.5, 0.5)
    assert [numbers[f"a/far/{name}"] for name in ("pass_rate", "pass_rate_se", "prompts")] == [0, 0.25, 1]


def test_the_mean_reward_and_each_part_of_it_have_curves_with_errors() -> None:
    """a0: rewards 1.1 and 1.2; a1: 1.1 and .2. Mean .9; s² = .005 and .405: SE² = (.41 / 2) / 2² = .05125.
    The judge's: .1 and .2 of both prompts: .15; s² = .005 twice: SE² = .005 / 4, less than half an outcome of
    4. b0: 1.1 and .2: .65; SE² = .405 / 2. By shares 3:1 the rewards' mean is .675 + .1625."""
    held_out = (*prompts("a", 2), *prompts("b", 1))
    numbers = scores(mixed(a=3, b=1), Dataset((), held_out), 2, {"a0": 2, "a1": 1, "b0": 1})
    expected = {
        "a/mean_reward": 0.9, "a/mean_reward_se": 0.05125**0.5, "a/reward/judge": 0.15,
        "a/reward/judge_se": 0.125, "b/mean_reward_se": 0.2025**0.5, "mean_reward": 0.8375,
        "mean_reward_se": ((0.75**2) * 0.05125 + (0.25**2) * 0.2025) ** 0.5,
    }  # fmt: skip
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)


def test_without_a_mixture_the_main_score_is_that_of_the_held_out_prompts_alone() -> None:
    held_out, far = tuple(replace(p, task="") for p in prompts("held", 2)), prompts("far", 2)
    most = {"held0": 2, "held1": 1, "far0": 0, "far1": 1}
    config = having(Config(), evaluation={"sets": {"far": "far.jsonl"}})
    numbers = scores(config, Dataset((), held_out, {"far": far}), 2, most)
    assert (numbers["pass_rate"], numbers["far/pass_rate"], numbers["prompts"]) == (0.75, 0.25, 2)
    assert {key.split("/")[0] for key in numbers if "/pass" in key} == {"far"}


def test_a_set_of_another_kind_has_samples_and_a_verifier_of_its_own() -> None:
    """Of 4 completions of `far0` one is right, of 2 of `held0` one. At 4 there is only the set of 4."""
    held_out, far = (replace(prompts("held", 1)[0], task=""),), prompts("far", 1)
    sets = {"far": SetConfig(verifier=VerifierConfig(kind="number"), samples=4)}
    config = having(Config(verifier=VerifierConfig(kind="module:function")), evaluation={"sets": sets})
    config = having(config, evaluation={"pass_at": (2, 4), "maj_at": (4,)})
    check_verifiers(config)
    numbers = scores(config, Dataset((), held_out, {"far": far}), 2, {"held0": 1, "far0": 1})
    assert (numbers["samples"], numbers["pass_rate"], numbers["pass@2"]) == (2, 0.5, 1.0)
    assert (numbers["far/samples"], numbers["far/pass_rate"], numbers["far/pass@4"]) == (4, 0.25, 1.0)
    assert {name for name in numbers if "@4" in name} == {"far/pass@4", "far/maj@4"}


def test_a_set_shares_the_scorers_of_a_task_with_the_same_verifier() -> None:
    math, judge = VerifierConfig(), VerifierConfig(kind="judge")
    sets = {"a/x": "x.jsonl", "aime": SetConfig(verifier=math), "far": SetConfig(verifier=judge)}
    tasks = {"a": TaskConfig(verifier=math), "b": TaskConfig(verifier=math)}
    config = having(Config(mixture=tasks), evaluation={"sets": sets})
    assert config.scorers == {"a": "a", "b": "b", "a/x": "a", "aime": "a", "far": "far"}


def test_pass_at_k_and_maj_at_k_come_from_the_same_samples_and_the_main_one_is_weighted() -> None:
    """The i-th completion of 4 reads `10 11 … 9 + i`; one is right if it has at most so many tokens. As exact
    text all differ, so a vote of 4 is a tie of 4: the mean. As numbers only the first can be read: `10`.
    a: 1 of 4 right: pass@2 = 1/2, maj@4 = 1/4. b: 2 of 4: pass@2 = 5/6; the only vote is right: maj@4 = 1."""
    config = having(mixed(a=3, b=1), evaluation={"pass_at": (1, 2), "maj_at": (4,)})
    config = with_kind(with_kind(config, "a", "exact"), "b", "number")
    data = Dataset((), (*prompts("a", 1), *prompts("b", 1)))
    numbers = scores(config, data, 4, {"a0": 1, "b0": 2})
    assert {k: v for k, v in numbers.items() if "@" in k} == pytest.approx({
        "a/pass@1": 1 / 4, "a/pass@2": 1 / 2, "a/maj@4": 1 / 4,
        "b/pass@1": 1 / 2, "b/pass@2": 5 / 6, "b/maj@4": 1.0,
        "pass@1": 5 / 16, "pass@2": 7 / 12, "maj@4": 7 / 16,
    })  # fmt: skip
    numbers = scores(with_kind(config, "b", "module:function"), data, 4, {"a0": 1, "b0": 2})
    assert {k for k in numbers if "maj@" in k} == {"a/maj@4"}  # b has no answers to compare


def test_the_worth_of_1_2_4_completions_of_each_prompt_is_recorded() -> None:
    """Of 4 completions p0 has 1 right, p1 has 3. All read `10`, so a vote elects all: maj@k is the mean."""
    task = TaskConfig(verifier=VerifierConfig(kind="number"))
    groups = [[rollout(1 if i < right else -1, text="10") for i in range(4)] for right in (1, 3)]
    assert by_prompt(task, prompts("p", 2), groups) == {
        "pass": {1: [0.25, 0.75], 2: [0.5, 1.0], 4: [1.0, 1.0]},
        "maj": {1: [0.25, 0.75], 2: [0.25, 0.75], 4: [0.25, 0.75]},
    }  # fmt: skip


def test_best_at_k_asks_the_judge_where_there_is_one() -> None:
    """Of completions with 1, 2, 3 and 4 tokens, all but the last are right, and the judge likes long ones.
    The best of all 4 is wrong; of 6 pairs, the 3 without the last have a right best; of singles, 3 of 4."""
    judge = JudgeConfig(path="a")
    judged = VerifierConfig(kind="number", extra=(ScorerConfig(kind="judge", weight=0.0),), judge=judge)
    config = having(mixed(a=1, b=1), evaluation={"best_at": (1, 2, 4)})
    with pytest.raises(ConfigError, match=r"best_at needs a judge: give verifier.extra"):
        check_verifiers(config)
    config = replace(config, mixture=config.mixture | {"a": TaskConfig(verifier=judged)})
    check_verifiers(config)
    data = Dataset((), (*prompts("a", 1), *prompts("b", 1)))
    numbers = scores(config, data, 4, {"a0": 3, "b0": 3})
    best = {k: v for k, v in numbers.items() if "@" in k}
    assert best == {"a/best@1": 0.75, "a/best@2": 0.5, "a/best@4": 0}


def with_kind(config: Config, task: str, kind: str) -> Config:
    verifier = VerifierConfig(kind=kind)
    return replace(config, mixture=config.mixture | {task: replace(config.mixture[task], verifier=verifier)})


def test_a_vote_where_no_verifier_has_answers_is_refused() -> None:
    config = having(Config(), evaluation={"maj_at": (2,)})
    check_verifiers(config)
    with pytest.raises(ConfigError, match=r"maj_at needs answers to compare: a verifier.kind of .*math"):
        check_verifiers(replace(config, verifier=VerifierConfig(kind="a:b")))


def written(folder: Path, name: str, *questions: str, answer: str = "7") -> str:
    return write(folder / f"{name}.jsonl", [{"question": text, "answer": answer} for text in questions])


def test_the_prompts_of_all_tasks_and_sets_are_loaded_with_their_task_and_kept_apart(tmp_path: Path) -> None:
    a, b = (written(tmp_path, name, *(f"{name}{i}" for i in range(6))) for name in "ab")
    far, leak = written(tmp_path, "far", "z1", "z2"), written(tmp_path, "leak", *(f"b{i}" for i in range(6)))

    def loaded(other: str, **sets: str) -> Dataset:
        tasks = {n: TaskConfig(data=DataConfig(source=s, held_out=2)) for n, s in (("a", a), ("b", other))}
        named = {name.replace("_", "/"): source for name, source in sets.items()}
        config = having(Config(mixture=tasks), evaluation={"sets": named})
        return load_tasks(config, ByteTokenizer())

    data = loaded(b, b_far=far)
    assert [(p.task, p.text[0]) for p in data.train] == [("a", "a")] * 4 + [("b", "b")] * 4
    assert [p.task for p in data.held_out] == ["a", "a", "b", "b"]
    assert sorted((p.task, p.text) for p in data.sets["b/far"]) == [("b/far", "z1"), ("b/far", "z2")]
    with pytest.raises(ConfigError, match="the tasks a and b both have the prompt 'a3'; expected different"):
        loaded(written(tmp_path, "equal", "c1", "c2", "c3", "a3"))
    with pytest.raises(ConfigError, match=r"4 of 8 training prompts are also in evaluation.sets.a/x .*leak"):
        loaded(b, a_x=leak)
    with pytest.raises(ConfigError, match=r"mixture.b: data file nowhere.jsonl does not exist"):
        loaded("nowhere.jsonl")


def test_a_set_of_another_kind_is_read_with_its_own_columns_and_whole(tmp_path: Path) -> None:
    mine = DataConfig(source=written(tmp_path, "mine", *(f"q{i}" for i in range(6))), held_out=2)
    rows = [{"Problem": f"p{i}", "Answer": 100 + i} for i in range(120)]
    far = SetDataConfig(
        source=write(tmp_path / "far.jsonl", rows), template="{question}!", prompt_column="Problem",
        answer_column="Answer",
    )  # fmt: skip
    config = Config(data=mine, verifier=VerifierConfig(kind="exact"))

    def loaded(data: SetDataConfig, kind: str = "number") -> tuple[Prompt, ...]:
        one = SetConfig(data=data, verifier=VerifierConfig(kind=kind))
        return load_tasks(having(config, evaluation={"sets": {"far": one}}), ByteTokenizer()).sets["far"]

    assert sorted(p.text for p in loaded(far)) == sorted(f"p{i}!" for i in range(120))
    assert loaded(replace(far, held_out=7)) == loaded(far)[:7]  # those of the smallest hashes
    assert loaded(replace(far, source="none.jsonl", held_out_source=far.source)) == loaded(far)
    with pytest.raises(
        ConfigError, match=r"verifier.kind choice, but the answer to 'p\d+!' is '1\d+', without"
    ):
        loaded(far, "choice")
    with pytest.raises(ConfigError, match=r"4 of 4 training prompts are also in evaluation.sets.far .*mine"):
        loaded(SetDataConfig(source=mine.source))


def test_a_dry_run_reads_a_source_by_itself_as_the_run_does(tmp_path: Path) -> None:
    """The held-out prompts are the hub's: episodes, and completions that are learned, need no answer."""
    source = write(tmp_path / "a.jsonl", [{"question": "q", "completion": "c"}])
    data = DataConfig(source=source, held_out_source="datasets:a/b", completion_column="completion")
    for settings in ({"environment": {"kind": "module:Class"}}, {"objective": {"loss": "sft"}}):
        lines, _ = examine(having(Config(data=data), **settings))
        assert lines[0] == f"data: 1 different prompt in {source}"


def test_the_answers_of_each_task_are_checked_against_its_own_verifier(tmp_path: Path) -> None:
    sources = written(tmp_path, "a", "a1", "a2", answer="seven"), written(tmp_path, "b", "b1", "b2")
    tasks = (TaskConfig(data=DataConfig(source=source, held_out=1)) for source in sources)
    config = with_kind(Config(mixture=dict(zip("ab", tasks, strict=True))), "b", "number")
    load_tasks(with_kind(config, "a", "exact"), ByteTokenizer())
    with pytest.raises(ConfigError, match=r"verifier.kind number, but .* is 'seven'"):
        load_tasks(with_kind(config, "a", "number"), ByteTokenizer())
