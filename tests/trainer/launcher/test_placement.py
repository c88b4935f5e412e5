"""Promises of the device split: derived where nothing is said, obeyed where it is, refused in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import having

from trainer.config import Config, ConfigError, EngineConfig, JudgeConfig, LoraConfig, VerifierConfig
from trainer.launcher import placement
from trainer.launcher.placement import Devices, Split, assign, engines_alone, for_roles, slow_dtype

GPUS = tuple("01234567")


def settings(kind: Any = "vllm", ranks: int = 0, **engine: Any) -> Config:
    return having(Config(), engine={"kind": kind, **engine}, learner={"ranks": ranks})


def split(gpus: int = 8, torchrun: tuple[int, int] = (0, 0), **named: Any) -> Devices:
    return assign(settings(**named), GPUS[:gpus], 4, torchrun)


def engine_of(gpus: int = 8, torchrun: tuple[int, int] = (0, 0), **named: Any) -> EngineConfig:
    """The engines' settings as their roles get them."""
    return for_roles(settings(**named), split(gpus, torchrun, **named)).engine


def test_eight_gpus_are_split_two_to_six_and_no_gpu_is_given_twice() -> None:
    devices = split()
    assert devices.learner == (("0",), ("1",))
    assert devices.engines == tuple((gpu,) for gpu in "234567")
    assert devices.by_role() == {"learner": 2.0, "engine": 1.0} | {f"engine-{i}": 1.0 for i in range(1, 6)}
    assert devices.unit == "GPU-hours"


TWO = ("http://a:1", "http://b:1")
SPLITS: list[tuple[dict[str, Any], int, list[int], list[float], str]] = [
    # Settings; learner ranks; GPUs of each engine; devices booked for the learner and each engine; the way
    # of new weights.
    ({}, 2, [1] * 6, [2] + [1] * 6, "nccl"),
    ({"weight_push": "file"}, 2, [1] * 6, [2] + [1] * 6, "file"),
    ({"ranks": 4}, 4, [1] * 4, [4] + [1] * 4, "nccl"),
    ({"ranks": 3, "tensor_parallel": 2}, 3, [2, 2], [3, 2, 2], "nccl"),
    ({"ranks": 2, "tensor_parallel": 3}, 2, [3, 3], [2, 3, 3], "nccl"),
    ({"ranks": 1, "count": 2}, 1, [1, 1], [1, 1, 1], "nccl"),
    ({"gpus": 2}, 1, [1], [1, 1], "nccl"),
    ({"gpus": 0}, 1, [0], [2, 2], "file"),
    ({"colocate": True, "gpus": 4, "tensor_parallel": 4}, 4, [4], [2, 2], "ipc"),
    ({"colocate": True, "gpus": 2}, 2, [1, 1], [1, 0.5, 0.5], "ipc"),
    ({"colocate": True, "ranks": 8, "count": 1, "tensor_parallel": 4}, 8, [4], [6, 2], "ipc"),
    ({"colocate": True, "tensor_parallel": 4}, 8, [4, 4], [4, 2, 2], "ipc"),
    # A rank is not on every GPU of the engines.
    ({"colocate": True, "ranks": 2}, 2, [1] * 8, [1, 0.5, 0.5] + [1] * 6, "file"),
    ({"colocate": True, "ranks": 3, "tensor_parallel": 4}, 3, [4, 4], [1.5, 2.5, 4], "file"),
    ({"colocate": True, "gpus": 2, "torchrun": (2, 4)}, 2, [1, 1], [3, 0.5, 0.5], "ipc"),  # 2 elsewhere
    ({"kind": "torch"}, 2, [1] * 6, [2] + [1] * 6, "file"),
    ({"kind": "torch", "gpus": 1}, 1, [1], [0.5, 0.5], "file"),
    ({"kind": "torch", "gpus": 3, "count": 1}, 1, [1], [1, 1], "file"),
    ({"kind": "torch", "gpus": 1, "tensor_parallel": 0}, 1, [0], [1, 0], "file"),
    ({"kind": "torch", "tensor_parallel": 0}, 2, [0], [2, 0], "file"),
    ({"kind": "torch", "tensor_parallel": 0, "count": 3, "ranks": 2}, 2, [0] * 3, [2, 0, 0, 0], "file"),
    ({"urls": TWO}, 8, [], [8, 1, 1], "file"),
    ({"urls": TWO, "weight_push": "nccl"}, 8, [], [8, 1, 1], "nccl"),
    ({"urls": TWO, "tensor_parallel": 4}, 8, [], [8, 4, 4], "file"),
    ({"urls": TWO[:1], "gpus": 2, "torchrun": (2, 4)}, 2, [], [4, 1], "file"),
]


@pytest.mark.parametrize(("named", "ranks", "engines", "booked", "push"), SPLITS)
def test_settings_are_obeyed_the_rest_is_derived_and_every_device_is_booked_whole(
    named: dict[str, Any], ranks: int, engines: list[int], booked: list[float], push: str
) -> None:
    devices, engine = split(**named), engine_of(**named)
    assert (len(devices.learner), [len(gpus) for gpus in devices.engines]) == (ranks, engines)
    assert list(devices.by_role().values()) == booked
    assert devices.unit == ("GPU-hours" if named.get("gpus", 8) else "core-hours")
    assert (engine.weight_push, engine.count) == (push, len(engines))
    used = [gpu for role in (*devices.learner, *devices.engines) for gpu in role]
    assert devices.shared or len(used) == len(set(used)) <= 8


def test_remote_engines_count_with_all_their_gpus() -> None:
    assert split(urls=TWO).split() == Split(8, 2)
    assert split(urls=TWO, tensor_parallel=4).split() == Split(8, 8)


def test_a_run_on_a_cpu_books_every_core_once_however_many_processes_share_it() -> None:
    devices = split(gpus=0, ranks=2, count=3)
    assert devices.unit == "core-hours" and sum(devices.by_role().values()) == pytest.approx(4.0)
    assert (devices.threads(0, 2), devices.threads(0, 3), devices.threads(3, 2)) == (2, 1, 3)


ALONE: list[tuple[dict[str, Any], int, list[int], str]] = [  # settings, GPUs, those of each engine, in words
    ({"kind": "vllm"}, 3, [1, 1, 1], "GPUs: engines 0 | 1 | 2"),
    ({"kind": "vllm", "tensor_parallel": 2}, 5, [2, 2], "GPUs: engines 0,1 | 2,3"),
    ({"kind": "torch", "count": 2}, 4, [1, 1], "GPUs: engines 0 | 1"),
    ({"kind": "torch", "count": 2}, 0, [0, 0], "4 CPU cores for 2 engines"),
    ({"kind": "torch", "tensor_parallel": 0}, 2, [0], "4 CPU cores for 1 engine"),
    ({"kind": "vllm", "urls": TWO, "tensor_parallel": 2}, 0, [], "GPUs: engines 2 remote"),
]


def test_adapters_go_whole_to_vllm_on_gpus_of_its_own_and_alone_by_file_on_the_learners() -> None:
    for colocate, route in ((False, "nccl"), (True, "file")):
        config = having(settings(colocate=colocate), model={"lora": LoraConfig(rank=16)})
        assert for_roles(config, assign(config, GPUS, 4)).engine.weight_push == route


@pytest.mark.parametrize(("named", "gpus", "widths", "words"), ALONE)
def test_an_evaluation_gives_every_device_to_engines(
    named: dict[str, Any], gpus: int, widths: list[int], words: str
) -> None:
    config = settings(weight_push="file", **named)
    devices = engines_alone(config, GPUS[:gpus], 4)
    assert ([len(one) for one in devices.engines], devices.describe()) == (widths, words)
    on_cpu = words.endswith(("engine", "engines"))
    assert devices.unit == ("core-hours" if on_cpu else "GPU-hours")
    booked = [4 / len(widths)] * len(widths) if on_cpu else widths or [2, 2]
    assert list(devices.by_role().values()) == booked and "learner" not in devices.by_role()
    assert for_roles(config, devices).engine.weight_push == "file"


def test_an_evaluation_needs_a_device_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="3 engines of 1 GPUs each need 3 GPUs, this machine has 2"):
        engines_alone(settings(count=3), GPUS[:2], 4)
    monkeypatch.setattr(placement, "cpu_has_bfloat16", lambda: False)
    config = having(settings("torch"), model={"dtype": "bfloat16"})
    assert ": the engine would run on this CPU" in slow_dtype(config, engines_alone(config, (), 4))


def test_where_the_torch_engine_runs_is_said() -> None:
    said = {
        "GPUs: learner 0; engines 0, beside the learner": split(kind="torch", gpus=1),
        "GPUs: learner 0; engines 1": split(kind="torch", gpus=3, count=1),
        "GPUs: learner 0, 1; engines 3 on the CPU": split(kind="torch", tensor_parallel=0, count=3),
    }
    assert [devices.describe() for devices in said.values()] == list(said)


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
    text = placement.slow_dtype(having(Config(), model={"dtype": dtype}), devices)
    assert text.startswith(f"model.dtype bfloat16: {roles} would run on this CPU") if roles else not text


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("9 learner ranks and 1 engines of 1 GPUs each need 10 GPUs, this machine has 8", {"ranks": 9}),
    ("need 9 GPUs", {"ranks": 7, "tensor_parallel": 2}),
    ("engine.colocate", {"gpus": 1}),
    ("1 engines of 4 GPUs each need 4 GPUs", {"gpus": 2, "tensor_parallel": 4, "colocate": True}),
    ("5 learner ranks and 1 engines on 4 CPU cores", {"gpus": 0, "ranks": 5}),
    ("engine.colocate needs GPUs", {"gpus": 0, "colocate": True}),
    ("2 engines of 1 GPUs each need 2 GPUs", {"gpus": 1, "kind": "torch", "count": 2}),
    ("this run is with the torch engine", {"gpus": 2, "kind": "torch", "tensor_parallel": 2}),
    ("this run is with the torch engine", {"gpus": 2, "kind": "torch", "colocate": True}),
    ("engine.tensor_parallel 0 is for torch engines", {"gpus": 2, "tensor_parallel": 0}),
    ("engine.urls", {"urls": TWO, "count": 2}),
    ("expected engine.kind vllm", {"urls": TWO, "kind": "torch"}),
    ("no colocate", {"urls": TWO, "colocate": True}),
    ("learner.ranks is 2, but torchrun started 4", {"ranks": 2, "torchrun": (4, 4)}),
]


@pytest.mark.parametrize(("said", "named"), IMPOSSIBLE)
def test_a_split_that_cannot_be_is_one_line(said: str, named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        split(**named)


def test_sharing_gpus_of_several_ranks_needs_a_torch_that_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.11.0+cu130")
    assert len(split(colocate=True, ranks=1).learner) == 1
    with pytest.raises(ConfigError, match=r"with 8 learner ranks needs torch 2\.13.*2\.11\.0\+cu130"):
        split(colocate=True)
    assert split(kind="torch", gpus=1, torchrun=(1, 2)).world == 2  # nothing is offloaded
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    assert len(split(colocate=True).learner) == 8


@pytest.mark.parametrize(
    "named",
    [
        {"gpus": 0, "weight_push": "nccl"},
        {"weight_push": "ipc"},
        {"colocate": True, "weight_push": "nccl"},
        {"colocate": True, "ranks": 2, "weight_push": "ipc"},
        {"kind": "torch", "weight_push": "nccl"},
    ],
)
def test_a_way_for_weights_that_the_devices_do_not_allow_is_one_line(named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nccl needs learner and engines on distinct GPUs"):
        engine_of(**named)


@pytest.mark.axis("model.dtype", "auto")
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
    assert placement.with_engine(config, gpus).engine.kind == kind
    dtype = "bfloat16" if gpus else "float32"
    assert placement.with_dtype(config, gpus).model.dtype == dtype
    fixed = having(config, model={"dtype": "float16"})
    assert placement.with_dtype(fixed, gpus) == fixed
    if gpus and kind == "vllm":
        devices = assign(placement.with_engine(config, gpus), GPUS[:gpus], 4)
        assert devices.gpus and for_roles(config, devices).engine.kind == "vllm"
        assert bool(set(devices.learner) & set(devices.engines)) == (gpus == 1)  # one GPU: in turns


def test_slices_of_gpus_get_weights_by_file_and_no_second_rank() -> None:
    slices = ("MIG-a", "MIG-b", "MIG-c")
    assert placement.weight_push(settings(), assign(settings(), slices, 4)) == "file"
    with pytest.raises(ConfigError, match="2 learner ranks on slices of GPUs"):
        assign(settings(ranks=2), slices, 4)


def test_a_judges_gpu_is_left_to_it_alone() -> None:
    judge = JudgeConfig(path="reward-model", device="cuda:1")
    config = Config(verifier=VerifierConfig(kind="judge", judge=judge))
    assert placement.without_judges(config, ("0", "1", "2")) == ("0", "2")
    with pytest.raises(ConfigError, match=r"judge.device cuda:1: expected cpu, or a GPU of \('0', '2'\)"):
        placement.without_judges(config, ("0", "2"))
    on_cpu = VerifierConfig(kind="judge", judge=replace(judge, device="cpu"))
    for unused in (VerifierConfig(judge=judge), on_cpu):
        assert placement.without_judges(Config(verifier=unused), ("0", "1")) == ("0", "1")
