"""The promise of docs/kernels.md: its code runs, top to bottom, as a reader would paste it."""

import re
import warnings
from pathlib import Path

import pytest

import kernels
from kernels import objectives

PAGE = (Path(kernels.__file__).parents[1] / "docs" / "kernels.md").read_text()


def test_every_snippet_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))  # the page adds one
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a machine without the native build says so once
        for snippet in snippets:
            exec(snippet, namespace)
    said = re.search(r"print\(error\)  # (.*)", PAGE)
    assert said and said[1] in capsys.readouterr().out


def test_every_public_name_is_on_the_page() -> None:
    missing = {name for name in kernels.__all__ if name not in PAGE}
    assert missing <= {"Aggregation", "Objective", "PolicyLossOutput", "SequenceObjective"}  # types of hints


def test_every_statistic_is_on_the_page() -> None:
    from kernels.op import STATS

    assert all(f"`{name}`" in PAGE for name in STATS)
