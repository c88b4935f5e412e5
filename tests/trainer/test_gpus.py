"""Every GPU that the driver lists is found, with its memory: from outputs of nvidia-smi, or without it."""

import os
import subprocess
from subprocess import CalledProcessError, CompletedProcess, TimeoutExpired
from typing import Any

import pytest

from trainer import gpus
from trainer.gpus import cpu_cores, listed_gpus, smallest_gpu_memory, usable_gpus, visible_gpus, without_cuda
from trainer.launcher import placement
from trainer.main import main

MIB = 2**20
Patch = pytest.MonkeyPatch
H100, H200 = "NVIDIA H100 80GB HBM3, 81559", "NVIDIA H200, 143771"
FOUR = (  # a display's GPU first
    "0, GPU-aa01, NVIDIA T1000, 8192\n1, GPU-bb02, NVIDIA H100 80GB HBM3, 81559\n"
    "2, GPU-bb13, NVIDIA A100-PCIE-40GB, 40960\n10, GPU-cc04, NVIDIA H200, 143771"
)
SLICED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5e)
  MIG 3g.40gb     Device  0: (UUID: MIG-1a)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-1b)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-6f)
"""


def eight(card: str) -> str:
    return "".join(f"{i}, GPU-{i}{i}, {card}\n" for i in range(8))


def driver(
    monkeypatch: pytest.MonkeyPatch, query: str | Exception, listing: str = "", library: str | None = None
) -> None:
    """A machine whose nvidia-smi prints this, and whose libcuda, if it has one, lists that."""

    def run(command: list[str], **more: Any) -> CompletedProcess[str]:
        if command[0] != "nvidia-smi":
            return CompletedProcess(command, 1 if library is None else 0, library or "")
        if isinstance(query, Exception):
            raise query
        return CompletedProcess(command, 0, listing if command[1] == "-L" else query)

    monkeypatch.setattr(gpus.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus._library.cache_clear()


@pytest.fixture(autouse=True)
def _forget_the_library() -> Any:
    yield
    gpus._library.cache_clear()


@pytest.mark.parametrize(
    ("query", "names", "memory"),
    [
        (eight(H100), "01234567", 81559),
        (f"0, GPU-a, {H200}\n1, GPU-b, {H100}\n", "01", 81559),
        ("0, GPU-a, NVIDIA GB10, [N/A]\n", "0", None),
        ("No devices were found\n", "", None),
        ("", "", None),
    ],
)
def test_what_nvidia_smi_lists_is_visible(
    query: str, names: str, memory: int | None, monkeypatch: Patch
) -> None:
    driver(monkeypatch, query)
    assert visible_gpus() == tuple(names) and smallest_gpu_memory() == (memory and memory * MIB)


def test_the_slices_of_a_gpu_are_devices_and_the_whole_of_it_is_none(monkeypatch: Patch) -> None:
    driver(monkeypatch, f"0, GPU-5e, {H100}\n1, GPU-6f, {H100}\n", SLICED)
    assert visible_gpus() == ("MIG-1a", "MIG-1b", "1")
    assert smallest_gpu_memory() == 10e9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a")
    assert smallest_gpu_memory() == 40e9


@pytest.mark.parametrize(
    "missing", [FileNotFoundError("nvidia-smi"), CalledProcessError(9, "x"), TimeoutExpired("x", 30), ""]
)
def test_a_driver_without_nvidia_smi_is_found(missing: str | Exception, monkeypatch: Patch) -> None:
    driver(monkeypatch, missing, library="0, , NVIDIA H100 80GB HBM3, 81008\n1, , NVIDIA H200, 143000\n")
    assert visible_gpus() == ("0", "1") and smallest_gpu_memory() == 81008 * MIB
    assert [gpu.card for gpu in listed_gpus()] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    driver(monkeypatch, missing)
    assert visible_gpus() == () and smallest_gpu_memory() is None


def test_the_library_is_asked_in_a_process_that_ends_well_with_and_without_one() -> None:
    process = subprocess.run(["python", "-c", gpus.FROM_LIBRARY], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0 or "libcuda.so.1" in process.stderr


VISIBLE = {  # CUDA_VISIBLE_DEVICES -> MiB of the smallest
    "1": 81559, "1, 2": 40960, "10": 143771, "GPU-cc04": 143771, "GPU-bb": 40960, "GPU-bb0,10": 81559,
    "": None, "-1": None, "MIG-aa01": None,
}  # fmt: skip


@pytest.mark.parametrize("visible", VISIBLE)
def test_hidden_gpus_are_not_given_to_anyone(visible: str, monkeypatch: Patch) -> None:
    driver(monkeypatch, FOUR)
    assert visible_gpus() == ("0", "1", "2", "10") and smallest_gpu_memory() == 8192 * MIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == (tuple(visible.replace(" ", "").split(",")) if visible not in ("", "-1") else ())
    assert smallest_gpu_memory() == (VISIBLE[visible] and VISIBLE[visible] * MIB)


def test_cuda_numbers_gpus_as_nvidia_smi_does_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    gpus.number_as_listed()
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    gpus.number_as_listed()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_build_of_torch_without_cuda_leaves_gpus_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, named in (("2.13.0+cpu", "2.13.0+cpu"), ("2.13.0", ""), ("2.11.0+cu130", "")):
        driver(monkeypatch, eight(H100))
        monkeypatch.setattr(gpus.importlib.metadata, "version", lambda name, v=version: v)
        assert without_cuda() == named
        assert usable_gpus() == (() if named else tuple("01234567"))
        driver(monkeypatch, "")  # no driver: the variable says for which machine is planned
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert without_cuda() == "" and usable_gpus() == ("0", "1")


@pytest.mark.parametrize(
    ("count", "arguments", "printed"),
    [
        (1, "demo", ["devices: GPUs: learner 0; engines 0, beside the learner;", "its old place"]),
        (1, "tiny", ["CPU cores, shared in time by 1 learner rank and 1 engine", "packed"]),
        (1, "tiny --learner.ranks 1", ["learner 0; engines 0, beside the learner;"]),
        (1, "demo --engine.tensor_parallel 0", ["learner 0; engines 1 on the CPU;", "packed"]),
        (2, "demo", ["devices: GPUs: learner 0; engines 1;"]),
    ],
)
def test_without_vllm_a_dry_run_plans_for_the_torch_engine(
    count: int, arguments: str, printed: list[str], monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver(monkeypatch, "".join(eight(H100).splitlines(keepends=True)[:count]))
    monkeypatch.setattr(gpus.importlib.metadata, "version", lambda name: "2.11.0+cu130")
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None if name == "vllm" else name)
    assert main(["--recipe", *arguments.split(), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in printed), out


def test_where_the_system_pins_no_process_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_cores() == sorted(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert cpu_cores() == [0, 1, 2]
