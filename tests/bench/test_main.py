"""Promises of `python -m bench`: it lists every benchmark, and each name is a module with a main."""

from __future__ import annotations

from importlib import import_module

import pytest

from bench.__main__ import BENCHMARKS, main, module


def test_every_benchmark_is_listed_and_has_a_main(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for name in BENCHMARKS:
        assert f"  {name} " in text and callable(import_module(module(name)).main)


def test_an_unknown_name_is_an_error_that_lists_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "expected one of: kernels.compare, " in capsys.readouterr().err
