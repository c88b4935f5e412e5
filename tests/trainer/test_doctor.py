"""Promises of the doctor: what is missing or wrong is named with its remedy; scripts read the exit code."""

import importlib.metadata
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from trainer import doctor


def test_it_says_yes_where_the_default_recipe_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = doctor.Finding("anything", True, "there")
    absent = doctor.Finding("GPU", False, "", "runs on the CPU", required=False)
    for other, code in ((absent, 0), (doctor.Finding("torch", False, "", "make setup"), 1)):
        monkeypatch.setattr(doctor, "examine", lambda other=other: [good, other])
        assert doctor.main([]) == code
    out = capsys.readouterr().out
    assert "make setup" in out and "cannot run yet: torch" in out


def test_this_machine_is_examined_whole() -> None:
    report = {f.name: f for f in doctor.examine()}
    assert report["torch"].status == "ok" and report["Python"].status == "ok"
    assert {"CPU", "memory", "/dev/shm", "vllm", "default model", "C++ compiler"} <= report.keys()
    assert all(f.advice for f in report.values() if f.status == "wrong")


def test_a_system_that_does_not_tell_its_free_memory_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}  # macOS lacks SC_AVPHYS_PAGES
    monkeypatch.setattr(os, "sysconf_names", names)
    monkeypatch.setattr(os, "sysconf", names.__getitem__)
    assert next(f for f in doctor.examine() if f.name == "memory").detail == "16.0 GiB"


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "wrong"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.1", "ok"), ("2.15.0", "wrong")],
)
def test_a_version_outside_the_pins_is_wrong(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    finding = next(f for f in doctor._packages() if f.name == "torch")
    assert finding.status == status and "pip install 'torch" in finding.advice


def test_every_package_that_pip_installs_is_examined() -> None:
    """The bounds are read where pip reads them, so they cannot differ from setup.py's."""
    texts = importlib.metadata.requires("sigmoid-rl") or []
    required = {
        r.name
        for r in map(Requirement, texts)
        if r.name != "sigmoid-rl"
        and (r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in doctor.TRAIN))
    }
    findings = list(doctor._packages())
    assert {f.name for f in findings if f.required} == required
    assert {"vllm", "flash-attn"} <= {f.name for f in findings if not f.required}


def test_without_an_installation_the_advice_is_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    (finding,) = doctor._packages()
    assert finding.status == "missing" and finding.advice.endswith("make setup") and finding.required


def test_a_gpu_that_torch_cannot_use_is_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for listed, status, detail in ((("0", "1"), "wrong", "2 listed by the driver"), ((), "missing", "")):
        monkeypatch.setattr(doctor, "visible_gpus", lambda listed=listed: listed)
        (gpu,) = doctor._gpus()
        assert gpu.status == status and gpu.detail.startswith(detail) and not gpu.required


@pytest.mark.parametrize("columns", [60, 80])
def test_the_report_breaks_no_word(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("SIGMOID_RL_CACHE", "/tmp")
    monkeypatch.chdir("/")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    findings = list(doctor.examine())  # once: memory and disk space change meanwhile
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    doctor.main([])
    out = capsys.readouterr().out
    words = " ".join(f"{f.name} {f.status} {f.detail}: {f.advice}" for f in findings).split()
    *report, conclusion = out.splitlines()
    assert {word.strip(":") for word in " ".join(report).split()} <= {word.strip(":") for word in words}
    assert max(map(len, report)) <= columns and "The default recipe can" in conclusion
    assert "torch computes it then, more slowly" in " ".join(out.split())  # without a compiler


def test_small_shared_memory_is_only_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = lambda folder: SimpleNamespace(free=(folder != doctor.SHARED) * 2**40)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    *disks, shared = doctor._disks()
    assert (shared.name, shared.status) == ("/dev/shm", "wrong")
    assert "through the run folder" in shared.advice
    assert not shared.required and all(f.good for f in disks)
