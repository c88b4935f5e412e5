"""Promises of `sigmoid-rl`: every command of the project by one name, installed with the package."""

import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from trainer.__main__ import COMMANDS, CURVE, main


def test_it_is_installed_with_the_package() -> None:
    (script,) = entry_points(group="console_scripts", name="sigmoid-rl")
    assert script.load() is main


def test_it_says_which_release_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sigmoid-rl {version('sigmoid-rl')}\n"


def test_nobody_is_told_to_install_it_from_pypi_where_it_is_not() -> None:
    root = Path(__file__).parents[2]
    texts = [root / "README.md", *(p for d in ("docs", "trainer", "kernels") for p in (root / d).rglob("*"))]
    pages = [p for p in texts if p.suffix in (".py", ".md") and "pip install" in p.read_text()]
    assert len(pages) > 9  # "pip install '.[train]'", in the checkout
    assert not [p for p in pages if re.search(r"pip install ['\"`]?sigmoid-rl", p.read_text())]


@pytest.mark.parametrize("name", [*COMMANDS, *import_module(CURVE).COMMANDS])
def test_each_command_explains_itself_with_two_examples(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sigmoid-rl", name, "--help"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        assert main() == 0
    except SystemExit as e:
        assert not e.code
    text = capsys.readouterr().out
    assert (
        text.startswith("usage: ") and len(re.findall(r"(?m)^ +(?:sigmoid-rl|python -m trainer)", text)) >= 2
    )


def test_help_and_completion_name_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and main([]) == 0
    text = capsys.readouterr().out
    assert main(["--completion"]) == 0
    words = capsys.readouterr().out.partition("'")[2].partition("'")[0].split()
    for shell in ("zsh", "fish"):
        assert main(["--completion", shell]) == 0 and " ".join(words) in capsys.readouterr().out
    assert main(["--completion", "csh"]) == 2 and "--completion" in capsys.readouterr().err
    assert {*COMMANDS, "fit", "compare", "predict", "plan", "report", "across"} <= set(words)
    assert all(f"\n  {word} " in text for word in words)


@pytest.mark.parametrize(("words", "offered"), [("view --p", ["--poll.s", "--port"]), ("view runs/", [])])
def test_bash_completes_the_options_of_a_command(
    words: str, offered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--completion", "bash"]) == 0
    script = f"""sigmoid-rl() {{ echo "$1 [--port N] [--export FILE] --poll.s --no-port"; }}
    {capsys.readouterr().out}
    COMP_WORDS=(sigmoid-rl {words}) COMP_CWORD=2
    _sigmoid_rl sigmoid-rl "${{COMP_WORDS[2]}}"; echo "${{COMPREPLY[@]}}" """
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout.split() == offered


@pytest.mark.parametrize("words", [
    "doctor", "train --recipe tiny --dry-run", "sweep grpo --task addition --budget 1 --out no --dry-run",
])  # fmt: skip
def test_a_reader_who_has_seen_enough_ends_it_quietly(words: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does
    line = [sys.executable, "-m", "trainer", *words.split()]
    done = subprocess.run(line, stdout=write_end, stderr=subprocess.PIPE, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize("name", ["merge", "view"])
def test_a_missing_argument_is_one_clear_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sigmoid-rl", name])
    assert main() == 2
    assert re.fullmatch("error: the following arguments are required: .*\n", capsys.readouterr().err)


def test_what_is_no_command_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'trian'; did you mean train?\n"
    assert main(["fit", str(tmp_path / "no.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN  # Python's own, in a process that is not its
