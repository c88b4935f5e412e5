"""docs/curve.md: its example and its commands run, and print what is under them in kind."""

import contextlib
import io
import shlex
from pathlib import Path

import pytest
from guide import BLOCK, DOCUMENT, EXAMPLE

from trainer.scaling.__main__ import COMMANDS, main


@pytest.mark.slow
def test_every_command_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = DOCUMENT.read_text()
    exec(EXAMPLE.findall(text)[0], {})
    examples = {block.group(1): block.group(0) for block in BLOCK.finditer(text)}
    assert {shlex.split(command)[3] for command in examples} == set(COMMANDS)
    for command, block in examples.items():
        python, m, module, *argv = shlex.split(command)
        assert (python, m, module) == ("python", "-m", "trainer.scaling")
        if argv[0] == "plan":
            argv += ["--runs", "5", "--budgets", "2", "--evaluations", "5"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(argv) == 0, command
        printed = out.getvalue()
        assert printed.split()[0] in block, command  # the same file, table or sentence
        assert "ot identified" not in block or "ot identified" in printed, command


def test_the_page_from_python_runs() -> None:
    (code,) = [
        c
        for c in DOCUMENT.read_text().split("```python\n")[1:]
        if c.startswith("from trainer.scaling import compare, curve, fit, predict")
    ]
    names: dict[str, object] = {}
    exec(code.split("```")[0], names)
    assert names["found"].identified in (True, False)  # type: ignore[attr-defined]
