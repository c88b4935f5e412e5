"""Promises of the doctor: what is missing or wrong is named with its remedy; scripts read the exit code."""

import importlib.metadata
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer import doctor


def test_it_says_yes_where_the_default_recipe_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = doctor.Finding("anything", "ok", "there")
    absent = doctor.Finding("GPU", "missing", "", "runs on the CPU", needed=False)
    monkeypatch.setattr(doctor, "examine", lambda: [good, absent])
    assert doctor.main() == 0
    monkeypatch.setattr(
        doctor, "examine", lambda: [good, doctor.Finding("torch", "missing", "", "make setup")]
    )
    assert doctor.main() == 1
    assert "make setup" in capsys.readouterr().out


def test_this_machine_is_examined_whole() -> None:
    found = {f.what: f for f in doctor.examine()}
    assert found["torch"].status == "ok" and found["Python"].status == "ok"
    assert {"CPU", "memory", "/dev/shm", "vllm", "default model", "C++ compiler"} <= found.keys()
    assert all(f.advice for f in found.values() if f.status == "wrong")


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", "wrong"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "wrong")]
)
def test_a_version_outside_the_pins_is_wrong(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert doctor._package("torch", *doctor.PACKAGES["torch"], needed=True).status == status


def test_small_shared_memory_is_only_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(free=(folder != doctor.SHARED) * 2**40)
    )
    *disks, shared = doctor._disks()
    assert (
        shared.what == "/dev/shm" and shared.status == "wrong" and "through the run folder" in shared.advice
    )
    assert doctor.runs_default([*disks, shared])


def test_the_other_kernels_distribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._name_clash().status == "ok"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1")
    clash = doctor._name_clash()
    assert clash.status == "wrong" and clash.needed and "pip uninstall kernels" in clash.advice


def test_its_bounds_are_those_that_pip_enforces() -> None:
    setup = (Path(doctor.__file__).parents[1] / "setup.py").read_text()
    for name, (least, below) in doctor.PACKAGES.items():
        assert f'"{name}>={least},<{below}"' in setup or f'"{name}=={least}"' in setup, name


def test_instruction_sets_are_told_by_their_usual_names() -> None:
    assert doctor.instruction_sets({"avx2", "avx512f", "amx_bf16"}) == ["AVX2", "AVX-512", "AMX bf16"]
