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


def test_rows_of_each_data_set_are_read_also_from_parquet_and_judged_right(tmp_path: Path) -> None:
    async def judge() -> None:
        scorers: dict[str, Any] = {}  # equal verifiers start once
        for name in NAMES:
            config, data = loaded(name, ROWS / f"{name}.jsonl")
            assert len(data.prompts) == 10 and not data.skipped, name
            items = [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(items), tmp_path / "a.parquet")
            read = [x.prompts for x in (data, loaded(name, tmp_path / "a.parquet")[1])]
            assert len({frozenset((p.text, p.answer) for p in prompts) for prompts in read}) == 1, name
            (prompt,) = [prompt for prompt in data.prompts if JUDGED[name]["prompt"] in prompt.text]
            key = repr(config.verifier)
            scorers[key] = scorer = scorers.get(key) or open_scorer(config.verifier, print, {})
            texts = [x.replace("@", str(prompt.answer)) for k in ("right", "wrong") for x in JUDGED[name][k]]
            outcomes = [(await scorer.score(prompt, text)).outcome for text in texts]
            assert outcomes[:2] == ["correct"] * 2 and "correct" not in outcomes[2:] and len(texts) == 4, name
        for scorer in scorers.values():
            scorer.close()

    asyncio.run(judge())


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
