"""Promises about PyPI's other `kernels`, which transformers probes for."""

from __future__ import annotations

import importlib.metadata

import pytest

import kernels


def test_transformers_does_not_take_our_kernels_for_the_other() -> None:
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()


def test_the_other_installed_is_a_clear_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.10.1")
    with pytest.warns(UserWarning, match=r"`kernels` 0.10.1 is installed.*pip uninstall kernels"):
        kernels._warn_of_namesake()
