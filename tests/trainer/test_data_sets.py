"""Data sets of the hub: a task file reads rows in its format, and its verifier judges as people do.

The rows are invented: ten of each set, in data_sets/NAME.jsonl."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from trainer import cli
from trainer.config import Config, ConfigError
from trainer.controller.data import Dataset
from trainer.controller.examine import NoTokenizer
from trainer.controller.mixture import load_tasks
from trainer.types import Prompt
from trainer.verifiers.pool import open_scorer

ROWS = Path(__file__).parent / "data_sets"
PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
NAMES = sorted(path.stem for path in ROWS.glob("*.jsonl"))
FILES = {"train": "train.jsonl", "test": "test.jsonl"}
JUDGED = yaml.safe_load((ROWS / "judged.yaml").read_text())


def loaded(name: str, rows: Path | str, **settings: Any) -> tuple[Config, Dataset]:
    """The prompts that a task file makes of a source's rows."""
    config = cli.parse(["--task", name]).config
    data: dict[str, Any] = {"source": str(rows), "held_out_source": "", "held_out": 3} | settings
    config = replace(config, data=replace(config.data, **data))
    return config, load_tasks(config, NoTokenizer())


def outcomes(config: Config, prompt: Prompt, completions: list[str]) -> list[str]:
    async def judge() -> list[str]:
        scorer = open_scorer(config.verifier, print, {})
        verdicts = [await scorer.score(prompt, text) for text in completions]
        scorer.close()
        return [verdict.outcome for verdict in verdicts]

    return asyncio.run(judge())


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_data_set_are_read_and_judged_right(name: str) -> None:
    config, data = loaded(name, ROWS / f"{name}.jsonl")
    assert len(data.prompts) == 10 and not data.skipped
    (prompt,) = [prompt for prompt in data.prompts if JUDGED[name]["prompt"] in prompt.text]
    right, wrong = (
        [text.replace("@", str(prompt.answer)) for text in JUDGED[name][key]] for key in ("right", "wrong")
    )
    assert outcomes(config, prompt, right) == ["correct"] * 2
    assert len(wrong) == 2 and "correct" not in outcomes(config, prompt, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_data_set_is_the_same_as_parquet(name: str, tmp_path: Path) -> None:
    items = [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(items), tmp_path / "a.parquet")
    pairs = [
        {(p.text, p.answer) for p in loaded(name, path)[1].prompts}
        for path in (tmp_path / "a.parquet", ROWS / f"{name}.jsonl")
    ]
    assert pairs[0] == pairs[1]


def test_each_data_set_has_a_task_that_names_it() -> None:
    assert len(NAMES) >= 15 and set(JUDGED) == set(NAMES)
    sources = {name: cli.parse(["--task", name]).config.data.source for name in NAMES}
    assert all(source.startswith("datasets:") for source in sources.values())
    table = PAGE.read_text().partition("## Data sets")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `([\w-]+)` \| ([\w/.-]+) \|", table, re.M))
    assert listed == {name: source.split(":")[1] for name, source in sources.items()}


def test_the_datasets_package_reads_a_folder_and_its_splits(tmp_path: Path) -> None:
    lines = (ROWS / "arc.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "test.jsonl").write_text("".join(lines[:4]))
    hub, cache = f"datasets:{tmp_path}", {"cache_dir": str(tmp_path / "cache"), "data_files": FILES}
    one = loaded("arc", hub, options=cache)[1]
    assert {(p.text, p.answer) for p in one.prompts} == {
        (p.text, p.answer) for p in loaded("arc", ROWS / "arc.jsonl")[1].prompts
    }
    test = loaded("arc", f"{hub}:test", options=cache)[1]
    assert len(test.prompts) == 4
    streamed = cache | {"streaming": True}
    assert len(loaded("arc", hub, options=streamed, size=2)[1].train) <= 2
    with pytest.raises(ConfigError, match=r"is streamed, and may never end; .* set data.size"):
        loaded("arc", hub, options=streamed)
