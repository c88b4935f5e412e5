"""Promises of weight transfer between GPUs that can be tested on a CPU: what vLLM's own classes accept and
return, and that vLLM keeps its sequences while it sleeps. No weights travel by NCCL or CUDA IPC here.
"""

import asyncio
import multiprocessing
import os
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import call, create_autospec

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from adapters import push as push_adapters
from engine_process import (
    EngineProcess,
    generate,
    load,
    perturb,
    prompt_of,
    request,
    settings,
    teacher_forced,
)
from fakes import CALLS

from trainer.config import Config, EngineConfig, ModelConfig
from trainer.engines.vllm.engine import LocalVLLM, vllm_settings, with_rank_offset
from trainer.engines.vllm.remote import RemoteVLLM
from trainer.learner.policy_model import PolicyModel
from trainer.learner.sharding import load_from_rank0, shard
from trainer.messages import Ack, Resume, Transfer

MODELS = ("tied_llama", "untied_llama", "tiny_moe")
INFOS: list[dict[str, Any]] = [{"rank_offset": 1}, {}, {"names": []}, {}]  # of CALLS


@pytest.fixture(autouse=True)
def vllm(vllm_installed: None) -> None:
    """All tests here need vLLM."""


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    """As the learner holds them."""
    return dict(PolicyModel(folder, ModelConfig(dtype="float32")).lm.named_parameters())


class Controller:
    """Answers a Relay as the controller does, once all engines have done a call, and keeps the calls."""

    def __init__(self) -> None:
        self.theirs, self._ours = multiprocessing.Pipe()
        self.calls: list[Transfer] = []
        Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            self.calls.append(self._ours.recv())
            self._ours.send(Ack())


class Group:
    """The process group in which rank 0 broadcasts."""

    disabled = False


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Replace the GPU functions under vLLM's senders; returns what the senders passed to them."""
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    sent: dict[str, list[tuple[str, torch.Tensor]]] = {"nccl": [], "ipc": [], "endpoints": []}

    def broadcast(iterator: Any, group: Any, src: int, **options: Any) -> None:
        assert isinstance(group, Group) and src == 0
        sent["nccl"] += [(name, tensor.clone()) for name, tensor in iterator]

    def chunks(iterator: Any, gpu_uuid: str, buffer_size_bytes: int, **options: Any) -> Any:
        for name, tensor in iterator:  # a chunk for each
            assert tensor.nbytes <= buffer_size_bytes
            sent["ipc"].append((name, tensor.clone()))
            handle = (torch.Tensor, tuple(tensor.shape), torch.UntypedStorage, tensor.dtype, 0, b"handle")
            kind = str(tensor.dtype).removeprefix("torch.")
            yield PackedIpcChunk([name], [list(tensor.shape)], [kind], [tensor.nbytes], {gpu_uuid: handle})

    def endpoint(info: Any) -> Group:
        sent["endpoints"].append(info)
        return Group()

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", endpoint)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", chunks)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    properties = type("Properties", (), {"uuid": "GPU-0"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    for name in ("synchronize", "ipc_collect", "current_stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    return sent


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_source_names_what_a_checkpoint_holds_and_declares_what_it_yields(
    model: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    from safetensors.torch import load_file

    from trainer.learner.weight_transfer import Source

    folder = request.getfixturevalue(model)
    source = Source(weights_of(folder), dtype)
    yielded = [(name, t.dtype, tuple(t.shape)) for name, t in source]
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == yielded
    held = load_file(Path(folder) / "model.safetensors")  # tied weights once, experts one by one
    assert {name for name, _, _ in yielded} == set(held)
    assert all(torch.equal(t, held[name].to(dtype)) for name, t in source)


@pytest.mark.parametrize("model", MODELS)
def test_vllms_nccl_sender_makes_its_calls_in_order_and_vllms_workers_understand_them(
    model: str, no_cuda: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import nccl_common
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    from trainer.learner.weight_transfer import Sender

    weights, controller = weights_of(request.getfixturevalue(model)), Controller()
    engine = EngineConfig(weight_push="nccl", count=3, tensor_parallel=2)
    sender = Sender(engine, weights, torch.bfloat16, 0, controller.theirs)
    for _ in range(2):
        sender.send()
    init, *rest = controller.calls
    assert [c.call for c in controller.calls] == [*CALLS, *CALLS[1:]]
    (endpoint,) = no_cuda["endpoints"]
    places: list[tuple[int, int]] = []
    group = lambda host, port, rank, world, device: places.append((rank, world))  # noqa: E731
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", group)
    for number in range(engine.count):
        info = NCCLWeightTransferInitInfo(**with_rank_offset(init.info, engine, number))
        assert (info.master_address, info.master_port) == (endpoint.master_address, endpoint.master_port)
        assert info.packed and info.packed_buffer_size_bytes == endpoint.packed_buffer_size_bytes
        for rank in range(engine.tensor_parallel):
            own = {"data_parallel_index": 0, "world_size": engine.tensor_parallel, "rank": rank}
            nccl_common.worker_init_process_group(info, type("ParallelConfig", (), own))
    # Every engine's GPUs have a rank of their own.
    assert places == [(rank, 7) for rank in range(1, 7)] and endpoint.world_size == 7
    update = NCCLWeightTransferUpdateInfo(**rest[1].info)
    declared = list(zip(update.names, update.dtype_names, map(tuple, update.shapes), strict=True))
    assert [(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in no_cuda["nccl"]] == declared + declared


def test_vllms_ipc_sender_hands_on_handles_that_vllms_workers_can_read(
    no_cuda: Any, tied_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferInitInfo,
        IPCWeightTransferUpdateInfo,
    )

    from trainer.learner.weight_transfer import Sender

    weights, controller = weights_of(tied_llama), Controller()
    Sender(EngineConfig(weight_push="ipc", count=1), weights, torch.float32, 0, controller.theirs).send()
    init, start, *updates, finish = controller.calls
    assert (start.call, finish.call) == ("start_weight_update", "finish_weight_update")
    assert IPCWeightTransferInitInfo(**with_rank_offset(init.info, EngineConfig(), 0)).packed
    assert [c.call for c in updates] == ["update_weights"] * len(weights)
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        IPCWeightTransferUpdateInfo(**updates[0].info)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    for (name, tensor), update in zip(no_cuda["ipc"], updates, strict=True):
        assert torch.equal(tensor, weights[name])
        info = IPCWeightTransferUpdateInfo(**update.info)
        assert info.names == [name] and info.tensor_sizes == [tensor.nbytes]
        assert info.ipc_handles["GPU-0"][1] == tuple(tensor.shape)  # type: ignore[index,call-overload]


def test_a_buffer_of_shared_memory_holds_the_largest_weight() -> None:
    from trainer.learner.weight_transfer import BUFFER, Source, init_info

    embeddings = {"embed": torch.empty(BUFFER // 4, 4, device="meta"), "norm": torch.empty(4, device="meta")}
    engine = EngineConfig(weight_push="ipc", count=1)
    info = init_info(engine, Source(embeddings, torch.bfloat16), rank=1)
    assert info.packed_buffer_size_bytes == 2 * BUFFER and not info.is_sender


def test_a_push_that_fails_says_what_to_do(no_cuda: Any, tied_llama: str, monkeypatch: Any) -> None:
    from trainer.learner.weight_transfer import Sender

    weights, engine = weights_of(tied_llama), EngineConfig(weight_push="nccl", count=1)
    monkeypatch.setattr(Group, "disabled", True)  # vLLM itself would continue and send nothing
    with pytest.raises(RuntimeError, match=r"nccl cannot begin: .*NCCL library; engine.weight_push file"):
        Sender(engine, weights, torch.float32, 0, Controller().theirs)
    monkeypatch.setattr(Group, "disabled", False)
    sender = Sender(engine, weights, torch.float32, 0, Controller().theirs)
    # Declared and sent with the same shape: no error.
    weights["model.norm.weight"] = torch.nn.Parameter(torch.ones(3))
    sender.send()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: 1 / 0)
    with pytest.raises(RuntimeError, match=r"nccl failed: division by zero; engine.weight_push file"):
        sender.send()


@pytest.mark.parametrize(("push", "backend"), [("nccl", "nccl"), ("ipc", "ipc"), ("file", "safetensors")])
def test_vllm_gets_the_backend_of_the_weight_push_and_sleeps_only_where_it_is_colocated(
    push: str, backend: str, tied_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    colocate = push == "ipc"
    config = settings(tied_llama, tmp_path, "vllm", weight_push=push, colocate=colocate, tensor_parallel=2)
    arguments = AsyncEngineArgs(**vllm_settings(config, tied_llama))
    assert arguments.weight_transfer_config.backend == backend
    assert arguments.enable_sleep_mode is colocate and arguments.tensor_parallel_size == 2


@pytest.mark.parametrize("colocate", [False, True])
def test_an_engine_calls_vllm_in_the_order_that_its_documents_give(colocate: bool, tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = LocalVLLM.__new__(LocalVLLM)
    push: Any = "ipc" if colocate else "nccl"
    engine._engine = EngineConfig(colocate=colocate, weight_push=push, tensor_parallel=3)
    engine._index, engine._log = 1, tmp_path / "none.log"
    engine._llm = llm = create_autospec(AsyncLLM, instance=True)  # accepts the arguments of the real one

    async def body() -> None:
        await engine.pause(free_gpu=True)
        for name, info in zip(CALLS, INFOS, strict=True):
            await engine.transfer(name, info)
        await engine.load(3)
        await engine.resume(free_gpu=True)

    asyncio.run(body())
    pause = call.pause_generation(mode="keep", clear_cache=False)
    assert llm.method_calls == [
        call.sleep(level=1, mode="keep") if colocate else pause,
        call.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"rank_offset": 4})),
        *([call.wake_up(tags=["weights"])] if colocate else []),
        call.start_weight_update(),
        call.update_weights(WeightTransferUpdateRequest(update_info={"names": []})),
        call.finish_weight_update(),
        call.update_weight_version("3"),
        call.wake_up() if colocate else call.resume_generation(),
    ]
    llm.update_weights.side_effect = ValueError("two\nlines")
    with pytest.raises(RuntimeError, match=r"failed at update_weights: two lines; engine.weight_push file"):
        asyncio.run(engine.transfer("update_weights", {}))


def test_a_server_by_url_is_called_by_routes_that_vllm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.rl.online.api_router import router

    from trainer.learner.weight_transfer import Source, init_info

    called: list[tuple[str, str, Any]] = []

    async def record(self: RemoteVLLM, method: str, route: str, json: Any = None) -> None:
        called.append((method, route, json))

    monkeypatch.setattr(RemoteVLLM, "_call", record)
    urls = ("http://127.0.0.1:9", "http://127.0.0.1:10")
    config = EngineConfig(urls=urls, weight_push="nccl", tensor_parallel=4)
    info = init_info(config, Source({}, torch.float32), 0)
    assert (info.world_size, info.master_address) == (9, "127.0.0.1")
    remote = RemoteVLLM(urls[1], "engine-1", Config(engine=config))

    async def body() -> None:
        await remote.transfer("shutdown_weight_transfer_engine", {})
        for name, info in zip(CALLS, INFOS, strict=True):
            await remote.transfer(name, info)

    asyncio.run(body())
    bodies = [json for _, _, json in called[1::2]]
    assert bodies == [{"init_info": {"rank_offset": 5}}, {"update_info": {"names": []}}]
    assert {route for _, route, _ in called} <= {route.path for route in router.routes}


def _sharded(rank: int, folder: str, port: int, out: str) -> None:
    """A rank of two: what its source declares and yields."""
    from torch.distributed.device_mesh import init_device_mesh

    from trainer.learner.weight_transfer import Source

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo")
    policy = PolicyModel(folder, ModelConfig(dtype="float32"), empty=True)
    shard(policy, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), False)
    load_from_rank0(policy.lm, load(folder) if rank == 0 else None)
    source = Source(dict(policy.lm.named_parameters()), torch.bfloat16)
    declared = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    torch.save((declared, list(source)), f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model", ["tied_llama", "tiny_moe"])
def test_shards_are_sent_as_by_one_rank(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    from vllm.utils.network_utils import get_open_port

    from trainer.learner.weight_transfer import Source

    folder = request.getfixturevalue(model)
    mp.spawn(_sharded, (folder, get_open_port(), str(tmp_path)), nprocs=2)
    alone = dict(Source(weights_of(folder), torch.bfloat16))
    for rank in range(2):
        declared, yielded = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert declared == [(name, t.dtype, tuple(t.shape)) for name, t in yielded]
        assert [name for name, _ in yielded] == list(alone)
        assert all(torch.equal(t, alone[name]) for name, t in yielded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_vllms_worker_makes_of_adapters_alone_what_the_whole_file_has(
    model: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from trainer.engines.vllm.worker import FileUpdateInfo, FileWeightTransfer

    def loaded(path: str) -> dict[str, torch.Tensor]:
        transfer, weights = FileWeightTransfer.__new__(FileWeightTransfer), dict[str, torch.Tensor]()
        transfer.device, transfer.model = torch.device("cpu"), create_autospec(torch.nn.Module)
        transfer.model.load_weights = weights.update
        transfer.receive_weights(FileUpdateInfo(path=path))
        return {name: w.to(getattr(torch, dtype)) for name, w in weights.items()}  # as a parameter takes it

    pushed = push_adapters(request.getfixturevalue(model), tmp_path, dtype, targets=("k_proj", "o_proj"))
    alone, whole = loaded(pushed.alone), loaded(pushed.whole)
    assert alone.keys() == whole.keys()  # a layer that lacks one of its weights is not reloaded
    assert all(torch.equal(alone[name], w) for name, w in whole.items())


def test_a_sleeping_vllm_keeps_its_sequences_and_takes_new_keys(tied_llama: str, tmp_path: Path) -> None:
    """vLLM's engine core does all it does on a GPU, where its workers also give their memory back. The
    weights come by the calls that the learner's sender makes, here with a file in them."""
    old, new = load(tied_llama), load(tied_llama)
    path = perturb(new, tmp_path / "new.safetensors")
    process = EngineProcess(settings(tied_llama, tmp_path, "vllm", colocate=True))
    prompts = {f"s{i}": prompt_of(7 + 3 * i, i) for i in range(3)}

    async def body() -> dict[tuple[str, int], Any]:
        async with process.client() as client:
            wanted = [request(k, x, max_tokens=900) for k, x in prompts.items()]
            running = asyncio.create_task(generate(client, *wanted))
            # By then they have some tokens.
            await generate(client, request("probe", prompts["s0"], max_tokens=5))
            await client.pause()
            for call, info in zip(CALLS[1:], ({}, {"path": path}, {}), strict=True):
                await client.transfer(call, info)
            await client.update_weights(1, "")
            late = asyncio.create_task(generate(client, request("late", prompts["s0"], max_tokens=20)))
            await asyncio.sleep(0.5)
            assert not late.done() and not running.done()
            client.resume()
            return await asyncio.wait_for(running, 200) | await asyncio.wait_for(late, 200)

    try:
        process.conn.send(Resume())  # the learner has left the GPU
        process.ready()
        done = asyncio.run(body())
    finally:
        process.close()
    for (name, _), c in done.items():
        prompt = prompts.get(name, prompts["s0"])
        swap = int((c.versions == 0).sum())
        assert c.finish_reason == "length" and (np.sort(c.versions) == c.versions).all()
        assert (swap == 0) if name == "late" else (0 < swap < 900 == len(c.token_ids))
        before = teacher_forced(old, prompt, c.token_ids.tolist())[:swap]
        after = teacher_forced(new, prompt, c.token_ids.tolist())[swap:]
        gap = np.abs(c.logprobs_gen - np.concatenate([before, after]))
        assert gap.mean() <= 1e-5 and gap.max() <= 2e-4  # oneDNN's products: 6e-5 in 2,700 tokens
