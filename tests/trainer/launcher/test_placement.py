"""Promises of the device split: derived where nothing is said, obeyed where it is, refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.config import (
    Config,
    ConfigError,
    EngineConfig,
    JudgeConfig,
    LearnerConfig,
    ModelConfig,
    VerifierConfig,
)
from trainer.launcher import placement
from trainer.launcher.placement import (
    Devices,
    Split,
    assign,
    for_roles,
    slow_dtype,
    weight_push,
    with_engine,
    without_judges,
)

GPUS = tuple("01234567")


def split(gpus: int = 8, ranks: int = 0, torchrun: tuple[int, int] = (0, 0), **engine: Any) -> Devices:
    config = replace(settings(**engine), learner=LearnerConfig(ranks=ranks))
    return assign(config, GPUS[:gpus], 4, torchrun)


def settings(kind: str = "vllm", gpus: int = 8, ranks: int = 0, **engine: Any) -> Config:
    """The settings of `split`, whose number of GPUs is not one."""
    return Config(engine=EngineConfig(kind=kind, **engine))  # type: ignore[arg-type]  # of its Literal


def test_eight_gpus_are_split_two_to_six_and_no_gpu_is_given_twice() -> None:
    devices = split()
    assert devices.learner == (("0",), ("1",))
    assert devices.engines == tuple((gpu,) for gpu in "234567")
    assert devices.by_role() == {"learner": 2.0, "engine": 1.0} | {f"engine-{i}": 1.0 for i in range(1, 6)}
    assert devices.unit == "GPU-hours"


@pytest.mark.parametrize(
    ("given", "learner", "engines"),
    [
        ({"ranks": 4}, 4, [1, 1, 1, 1]),
        ({"ranks": 3, "tensor_parallel": 2}, 3, [2, 2]),
        ({"ranks": 1, "count": 2}, 1, [1, 1]),
        ({"gpus": 2}, 1, [1]),
        ({"gpus": 4, "tensor_parallel": 4, "colocate": True}, 4, [4]),
        ({"urls": ("http://a:1", "http://b:1")}, 8, []),
    ],
)
def test_what_is_given_is_obeyed_and_the_rest_is_derived(
    given: dict[str, Any], learner: int, engines: list[int]
) -> None:
    devices = split(**given)
    assert len(devices.learner) == learner
    assert [len(gpus) for gpus in devices.engines] == engines
    if not given.get("colocate"):
        used = [gpu for role in (*devices.learner, *devices.engines) for gpu in role]
        assert len(used) == len(set(used)) <= 8


@pytest.mark.parametrize(
    ("given", "learner", "engines"),
    [
        ({"colocate": True, "gpus": 2}, 1.0, [0.5, 0.5]),
        ({"colocate": True, "ranks": 8, "count": 1, "tensor_parallel": 4}, 6.0, [2.0]),
        ({"colocate": True, "ranks": 2}, 1.0, [0.5, 0.5, 1, 1, 1, 1, 1, 1]),
        ({"colocate": True, "ranks": 3, "tensor_parallel": 4}, 1.5, [2.5, 4.0]),
        ({"colocate": True, "gpus": 2, "torchrun": (2, 4)}, 3.0, [0.5, 0.5]),  # 2 ranks elsewhere
        ({"urls": ("http://a:1", "http://b:1"), "tensor_parallel": 4}, 8.0, [4.0, 4.0]),
        ({"urls": ("http://a:1",), "gpus": 2, "torchrun": (2, 4)}, 4.0, [1.0]),
    ],
)
def test_every_gpu_is_booked_whole_and_halved_only_where_both_sides_hold_it(
    given: dict[str, Any], learner: float, engines: list[float]
) -> None:
    held = split(**given).by_role()
    assert held.pop("learner") == learner and list(held.values()) == engines


def test_remote_engines_count_with_all_their_gpus() -> None:
    assert split(urls=("http://a:1", "http://b:1")).split() == Split(8, 2)
    assert split(urls=("http://a:1", "http://b:1"), tensor_parallel=4).split() == Split(8, 8)


def test_a_run_on_a_cpu_books_every_core_once_however_many_processes_share_it() -> None:
    devices = split(gpus=0, ranks=2, count=3)
    assert devices.unit == "core-hours" and sum(devices.by_role().values()) == pytest.approx(4.0)
    assert (devices.threads(0, 2), devices.threads(0, 3), devices.threads(3, 2)) == (2, 1, 3)


@pytest.mark.parametrize(
    ("given", "held", "said"),
    [
        ({"gpus": 1}, (0.5, 0.5), "GPUs: learner 0; engines 0, beside the learner"),
        ({"gpus": 3, "count": 1}, (1, 1), "GPUs: learner 0; engines 1"),
        ({"gpus": 1, "tensor_parallel": 0}, (1, 0), "GPUs: learner 0; engines 1 on the CPU"),
        (
            {"tensor_parallel": 0, "count": 3, "ranks": 2},
            (2, 0, 0, 0),
            "GPUs: learner 0, 1; engines 3 on the CPU",
        ),
    ],
)
def test_the_torch_engine_is_on_the_learners_gpu_on_others_or_on_the_cpu(
    given: dict[str, Any], held: tuple[float, ...], said: str
) -> None:
    devices = split(kind="torch", **given)
    assert tuple(devices.by_role().values()) == held and devices.describe() == said
    assert devices.unit == "GPU-hours" and not split(kind="torch", gpus=0).gpus


@pytest.mark.parametrize(
    ("flags", "dtype", "devices", "roles"),
    [
        ("avx2 fma", "bfloat16", split(gpus=0), "the learner and the engine"),
        ("avx2 fma", "bfloat16", split(kind="torch", gpus=1, tensor_parallel=0), "the engine"),
        ("avx2 fma", "bfloat16", split(gpus=2), ""),
        ("avx2 fma", "float32", split(gpus=0), ""),
        ("avx512f avx512_bf16", "bfloat16", split(gpus=0), ""),
        ("avx512f amx_bf16", "bfloat16", split(gpus=0), ""),
    ],
)
def test_bfloat16_on_a_cpu_without_its_instructions_is_one_line(
    flags: str, dtype: Any, devices: Devices, roles: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbogomips\t: 1\n")
    monkeypatch.setattr(placement, "CPU_INFO", tmp_path / "cpuinfo")
    text = slow_dtype(Config(model=ModelConfig(dtype=dtype)), devices)
    assert text.startswith(f"model.dtype bfloat16: {roles} would run on this CPU") if roles else not text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": 9}, "9 learner ranks and 1 engines of 1 GPUs each need 10 GPUs, this machine has 8"),
        ({"ranks": 7, "tensor_parallel": 2}, "need 9 GPUs"),
        ({"gpus": 1}, "engine.colocate"),
        (
            {"gpus": 2, "tensor_parallel": 4, "colocate": True},
            "1 engines of 4 GPUs each need 4 GPUs, this machine",
        ),
        ({"gpus": 0, "ranks": 5}, "5 learner ranks and 1 engines on 4 CPU cores"),
        ({"gpus": 0, "colocate": True}, "engine.colocate needs GPUs"),
        (
            {"gpus": 1, "kind": "torch", "count": 2},
            "1 learner ranks and 2 engines of 1 GPUs each need 2 GPUs",
        ),
        ({"gpus": 2, "kind": "torch", "tensor_parallel": 2}, "this run is with the torch engine"),
        ({"gpus": 2, "kind": "torch", "colocate": True}, "this run is with the torch engine"),
        ({"gpus": 2, "tensor_parallel": 0}, "engine.tensor_parallel 0 is for torch engines"),
        ({"urls": ("http://a:1",), "count": 2}, "engine.urls"),
        ({"urls": ("http://a:1",), "kind": "torch"}, "expected engine.kind vllm"),
        ({"urls": ("http://a:1",), "colocate": True}, "no colocate"),
        ({"ranks": 2, "torchrun": (4, 4)}, "learner.ranks is 2, but torchrun started 4"),
    ],
)
def test_a_split_that_cannot_be_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        split(**given)


def test_sharing_gpus_on_several_ranks_needs_a_torch_that_offloads_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.11.0+cu130")
    assert len(split(colocate=True, ranks=1).learner) == 1
    with pytest.raises(
        ConfigError, match=r"with 8 learner ranks needs torch 2\.13 or newer.*2\.11\.0\+cu130"
    ):
        split(colocate=True)
    config = Config(engine=EngineConfig(kind="torch"))
    assert assign(config, ("0",), 8, torchrun=(1, 2)).world == 2  # nothing is offloaded
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    assert len(split(colocate=True).learner) == 8


@pytest.mark.parametrize(
    ("given", "push", "count"),
    [
        ({"gpus": 0}, "file", 1),
        ({"kind": "torch"}, "file", 6),
        ({"kind": "torch", "tensor_parallel": 0}, "file", 1),
        ({}, "nccl", 6),
        ({"ranks": 2, "tensor_parallel": 3}, "nccl", 2),
        ({"weight_push": "file"}, "file", 6),
        ({"colocate": True, "tensor_parallel": 4}, "ipc", 2),
        ({"colocate": True, "ranks": 2}, "file", 8),  # a rank is not on every GPU of the engines
        ({"urls": ("http://a:1",)}, "file", 0),
        ({"urls": ("http://a:1",), "weight_push": "nccl"}, "nccl", 0),
    ],
)
def test_weights_go_the_shortest_way_the_devices_allow(given: dict[str, Any], push: str, count: int) -> None:
    engine_config = for_roles(settings(**given), split(**given)).engine
    assert (engine_config.weight_push, engine_config.count) == (push, count)


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": 0, "weight_push": "nccl"},
        {"weight_push": "ipc"},
        {"colocate": True, "weight_push": "nccl"},
        {"colocate": True, "ranks": 2, "weight_push": "ipc"},
        {"kind": "torch", "weight_push": "nccl"},
    ],
)
def test_a_way_for_weights_that_the_devices_do_not_allow_is_one_line(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nccl needs learner and engines on distinct GPUs"):
        for_roles(settings(**given), split(**given))


@pytest.mark.parametrize(
    ("given", "gpus", "installed", "kind"),
    [
        ({}, 8, True, "vllm"),
        ({}, 1, True, "vllm"),
        ({}, 8, False, "torch"),
        ({}, 0, True, "torch"),
        ({"urls": ("http://a:1",)}, 0, False, "vllm"),
        ({"kind": "torch"}, 8, True, "torch"),
        ({"kind": "vllm"}, 0, False, "vllm"),
    ],
)
def test_the_engine_is_vllm_on_gpus_where_it_is_installed(
    given: dict[str, Any], gpus: int, installed: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: installed and name == "vllm")
    config = Config(engine=EngineConfig(**given))
    assert with_engine(config, gpus).engine.kind == kind
    if gpus and kind == "vllm":
        devices = assign(with_engine(config, gpus), GPUS[:gpus], 4)
        assert devices.gpus and for_roles(config, devices).engine.kind == "vllm"
        assert bool(set(devices.learner) & set(devices.engines)) == (gpus == 1)  # one GPU: in turns


def test_slices_of_gpus_get_weights_by_file_and_no_second_rank() -> None:
    slices = ("MIG-a", "MIG-b", "MIG-c")
    config = Config(engine=EngineConfig(kind="vllm"))
    assert weight_push(config, assign(config, slices, 4)) == "file"
    two = replace(config, learner=replace(LearnerConfig(), ranks=2))
    with pytest.raises(ConfigError, match="2 learner ranks on slices of GPUs"):
        assign(two, slices, 4)


def test_a_judges_gpu_is_left_to_it_alone() -> None:
    judge = JudgeConfig(path="reward-model", device="cuda:1")
    config = Config(verifier=VerifierConfig(kind="judge", judge=judge))
    assert without_judges(config, ("0", "1", "2")) == ("0", "2")
    with pytest.raises(ConfigError, match=r"judge.device cuda:1: expected cpu, or a GPU of \('0', '2'\)"):
        without_judges(config, ("0", "2"))
    on_cpu = VerifierConfig(kind="judge", judge=replace(judge, device="cpu"))
    for unused in (VerifierConfig(judge=judge), on_cpu):
        assert without_judges(Config(verifier=unused), ("0", "1")) == ("0", "1")
