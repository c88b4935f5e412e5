"""Promises of a run on the data's completions: its loss is transformers' own, and errors name the row."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import make_model
from training import config as learner_config
from training import error, gradients_of_step, learner
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import cli
from trainer.config import ConfigError, DataConfig, EngineConfig, ObjectiveConfig
from trainer.controller.batch import build_batch
from trainer.controller.data import Dataset, Reader, load_prompts
from trainer.controller.process import check_lengths
from trainer.controller.sampler import IssuedPrompt
from trainer.controller.supervised import supervised_group

SFT = ObjectiveConfig(loss="sft", aggregation="token", advantage_norm="none", zero_variance="keep")
ROWS = [
    {"question": "1+1+2=", "solution": "2+2=4", "answer": "4"},
    {"question": "3+5=", "solution": ["8", " 8"], "answer": "8"},
    {"question": "6+1=", "solution": 7, "answer": "7"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model")))


def load(model_dir: str, folder: Path, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> Dataset:
    for name, contents in {"train": rows, "test": [{"question": "5+5=", "answer": "0"}]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in contents))
    files = {"source": str(folder / "train.jsonl"), "held_out_source": str(folder / "test.jsonl")}
    data = DataConfig(**{**files, "completion_column": "solution", **settings})
    return load_prompts(Reader(data, AutoTokenizer.from_pretrained(model_dir), supervised=True))


def test_completions_are_the_rows_texts_with_the_end_token_and_need_no_answer(
    model_dir: str, tmp_path: Path
) -> None:
    rows = [{k: v for k, v in row.items() if k != "answer"} for row in ROWS]  # no row of theirs is scored
    data = load(model_dir, tmp_path, rows)
    assert [p.completions for p in data.train] == [((4, 12, 4, 13, 6, 0),), ((10, 0), (15, 10, 0)), ((9, 0),)]
    assert [p.completions for p in data.held_out] == [()]
    data = load(model_dir, tmp_path, completion_column="", held_out_source="", held_out=1)
    assert {p.completions for p in (*data.train, *data.held_out)} == {((6, 0),), ((10, 0),), ((9, 0),)}


def test_all_completions_of_a_prompt_in_several_rows_are_learned(model_dir: str, tmp_path: Path) -> None:
    rows = [ROWS[0], ROWS[2], ROWS[0], ROWS[0] | {"solution": ROWS[2]["solution"]}]
    data = load(model_dir, tmp_path, rows)
    assert [p.completions for p in data.train] == [((4, 12, 4, 13, 6, 0), (9, 0)), ((9, 0),)]


@pytest.mark.parametrize("value", ["", " ", None, [], ["1", ""], True, {"a": 1}])
def test_a_row_without_a_completion_is_a_bad_row(value: Any, model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train.jsonl:2.*'solution' is .*; expected the text of a completion"
    ):
        load(model_dir, tmp_path, [ROWS[0], {"question": "1", "solution": value}])
    with pytest.raises(ConfigError, match=r"no column 'text'.*set data.completion_column"):
        load(model_dir, tmp_path, completion_column="text")


def test_a_completion_beyond_the_models_positions_is_refused(model_dir: str, tmp_path: Path) -> None:
    train = load(model_dir, tmp_path).train
    check_lengths(EngineConfig(max_new_tokens=5), train, 0, 12)  # 6 tokens of prompt and 6 of completion
    with pytest.raises(
        ConfigError, match=r"completion up to 6; the model has 11 .* length of the data's compl"
    ):
        check_lengths(EngineConfig(max_new_tokens=5), train, 0, 11)


def test_loss_and_gradients_are_those_of_transformers_own_labels(model_dir: str, tmp_path: Path) -> None:
    prompts = load(model_dir, tmp_path).train
    ctx: Any = SimpleNamespace(decode=lambda ids: [str(i) for i in ids])
    groups = [supervised_group(ctx, IssuedPrompt(i, 0, p, 0)) for i, p in enumerate(prompts)]
    batch = build_batch(groups, 1, SFT, 0, [], (), 8, None)
    assert batch.stats["train/effective_prompts"] == len(prompts)  # without any advantage
    c = learner_config()
    object.__setattr__(c, "objective", SFT)
    metrics, kept = gradients_of_step(learner(model_dir, c), batch)

    rows = [([*p.token_ids], [*ids]) for p in prompts for ids in p.completions]
    longest = max(len(q) + len(a) for q, a in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for i, (q, a) in enumerate(rows):
        ids[i, : len(q) + len(a)] = torch.tensor(q + a)
        labels[i, len(q) : len(q) + len(a)] = torch.tensor(a)
    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    loss = lm(input_ids=ids, labels=labels).loss
    loss.backward()
    assert metrics["learner/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    expected = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    assert error(kept["policy"], expected) < 1e-5


MISFITS = {
    "--objective.zero_variance=drop": "expected objective.zero_variance keep, given drop",
    "--objective.critic.body=own": "expected objective.critic.body none, given own",
    "--objective.kl.coefficient=.1": "expected objective.kl.coefficient 0, given 0.1",
    "--objective.anchor=recomputed": "expected objective.anchor generator, given recomputed",
    "--objective.sequence_mask=mean": "expected objective.sequence_mask none, given mean",
    "--pipeline.no_positive_resampling=true": "expected pipeline.no_positive_resampling false",
}


@pytest.mark.parametrize("flag", MISFITS)
def test_settings_that_need_samples_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=MISFITS[flag]):
        cli.parse(["--recipe", "sft", flag])
