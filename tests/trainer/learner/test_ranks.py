"""Promises of a learner on several ranks: the gradient, the scores and the weights are those of one."""

import errno
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from fakes import having
from torch.distributed.device_mesh import init_device_mesh
from training import (
    NoClock,
    config,
    error,
    gradients_of_step,
    learner,
    moved,
    of_the_data,
    oracle,
    same,
    save,
    scored,
    sequences,
    weights_of,
    with_values,
)
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import trainer.learner.learner
from trainer.config import Config, ConfigError, CriticConfig, KLConfig, LoraConfig, PipelineConfig
from trainer.learner.offload import Offload
from trainer.learner.process import LearnerService, learner_main
from trainer.learner.ranks import Ranks, init_ranks
from trainer.learner.schedule import DUMMY, schedule
from trainer.messages import Failed, Ready, Score
from trainer.types import TrainBatch, TrainSequence

Results = dict[str, Any]
FEW = 45  # tokens of a micro-batch: several to each of three ranks
TIED = config(micro_batch_tokens=FEW)
TIMEOUT_S = 90
METHOD = "spawn" if torch.cuda.is_available() else forked.METHOD


def _start(rank: int, size: int, port: str, folder: str, work: Callable[[Ranks], Results]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    transformers_logging.disable_progress_bar()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["NCCL_HOSTID"] = f"host-{rank}"  # NCCL refuses two ranks of one host on one GPU
    ranks = init_ranks(60)
    torch.save(work(ranks), f"{folder}/{rank}.pt")
    ranks.close()
    os._exit(0)  # gloo's threads may outlive the interpreter, and abort the process (pytorch issue 190489)


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@contextmanager
def lone_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """The only rank of a process group."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks = init_ranks(60)
    yield ranks
    ranks.close()


def on_ranks(size: int, folder: Path, work: Callable[[Ranks], Results]) -> list[Results]:
    """The results of each of `size` processes."""
    mp.start_processes(_start, (size, free_port(), str(folder), work), nprocs=size, start_method=METHOD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def case(
    kind: str, dtype: str = "float32", count: int | None = None, objective: Any = None, **learner: Any
) -> tuple[Any, ...]:
    """(model, config, the batch's sequences)."""
    c = having(
        config(**{"micro_batch_tokens": FEW, **learner}), objective=objective or {}, model={"dtype": dtype}
    )
    batch = sequences(seed=1)[:count]
    return kind, c, scored(batch) if objective else batch


def critic(body: Any, dtype: Any = "float32") -> dict[str, Any]:
    return {"critic": CriticConfig(body=body, dtype=dtype, lr=1e-3, value_clip=0.1)}


def adapted(kind: str, dtype: str = "float32", **more: Any) -> tuple[Any, ...]:
    """A case with LoRA, whose reference is the frozen base."""
    kind, c, batch = case(kind, dtype, **{"objective": PENALTIES, **more})
    return kind, having(c, model={"lora": LoraConfig(rank=4)}), batch


def routed(one: tuple[Any, ...]) -> tuple[Any, ...]:
    """The case with experts that the router would not choose; those of a prompt are its completions'."""
    kind, c, batch = one
    rng, sequences = np.random.default_rng(3), []
    for s in batch:
        prompt = np.random.default_rng(len(s.prompt_ids)).integers(0, 4, (len(s.prompt_ids), 2))
        first = np.concatenate([prompt, rng.integers(0, 4, (len(s.token_ids) - 1, 2))])
        ids = np.stack([first, (first + 1) % 4], 2).reshape(len(first), 4)  # (T, layers · k)
        sequences.append(replace(s, experts=ids.astype(np.uint8)))
    return kind, c, tuple(sequences)


GSPO = {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.3}
PENALTIES = {"loss": "dapo", "anchor": "recomputed", "kl": KLConfig(coefficient=0.3), "entropy_bonus": 0.2}
TOP_K = {"loss": "none", "kl": KLConfig(coefficient=0.3, top_k=4)}
CASES = {
    "tied": case("tied"),
    "tied, one row each": case("tied", micro_batch_tokens=9),
    "tied, an empty rank": case("tied", count=1, grad_clip=0.05),
    "tied, bfloat16": case("tied", "bfloat16"),
    "tied, float16": case("tied", "float16"),
    "untied": case("untied", grad_clip=0.05),
    "untied, checkpointed": case("untied", checkpoint_activations=True),
    "untied, bfloat16, checkpointed": case("untied", "bfloat16", checkpoint_activations=True),
    "tied, vocabulary split": case("tied", vocab_parallel=True, count=5),
    "untied, vocabulary split": case("untied", vocab_parallel=True, grad_clip=0.05),
    "untied, bfloat16, vocabulary split, empty": case("untied", "bfloat16", count=1, vocab_parallel=True),
    "experts": case("moe"),
    "experts, bfloat16": case("moe", "bfloat16"),
    "experts replayed": routed(case("moe")),
    "experts replayed, bfloat16, checkpointed": routed(case("moe", "bfloat16", checkpoint_activations=True)),
    "sequences": case("tied", objective=GSPO),
    "sequences, vocabulary split, empty": case("untied", count=1, vocab_parallel=True, objective=GSPO),
    "penalties, vocabulary split": case("untied", vocab_parallel=True, objective=PENALTIES),
    "penalties, empty": case("tied", count=1, objective=PENALTIES),
    "penalties, float16": case("tied", "float16", objective=PENALTIES),
    "critic": case("untied", grad_clip=0.05, objective=critic("own")),
    "critic, bfloat16": case("untied", objective=critic("own", "bfloat16")),
    "critic, float16": case("untied", checkpoint_activations=True, objective=critic("own", "float16")),
    "shared": case("untied", objective=critic("shared")),
    "LoRA": adapted("tied", grad_clip=0.05),
    "LoRA, bfloat16, vocabulary split, checkpointed": adapted(
        "untied", "bfloat16", vocab_parallel=True, checkpoint_activations=True
    ),
    "top-k, empty": case("tied", count=1, objective=TOP_K | {"loss": "dapo"}),
    "LoRA, top-k": adapted("tied", objective=TOP_K),
    "LoRA, bfloat16, top-k": adapted("untied", "bfloat16", objective=TOP_K),
    "frozen, tied": case("tied", grad_clip=0.05, freeze=("*embed_tokens*",)),
    "frozen head, vocabulary split": case("untied", vocab_parallel=True, freeze=("lm_head*", "*0*norm*")),
    "shared, vocabulary split": case("untied", vocab_parallel=True, objective=critic("shared")),
}


def one_step(model_dir: str, c: Config, batch: tuple[TrainSequence, ...], ranks: Ranks | None) -> Results:
    """Scores, then an optimizer step: its gradient, its metrics and the weights after it."""
    one = moved(learner(model_dir, c, None, ranks))
    if one.critic is not None:
        with_values(one)
    for network in one.networks.values():
        if network.scale.dynamic:
            network.scale.state[0] = 2.0**40  # overflows: every rank must compute the step again, as often
    scores = [y for x in one.score(batch) for y in (x.logprobs, x.logprobs_ref, x.values) if y is not None]
    kept = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if isinstance(x, torch.nn.Parameter) else x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        metrics, gradients = gradients_of_step(one, TrainBatch(1, batch, {}))
    results = {"scores": scores, "metrics": metrics, "kept": kept, "weights": weights_of(one)}
    return results | {"gradient": gradients.pop("policy"), "critic": gradients.get("critic", {})}


def all_cases(models: dict[str, str], ranks: Ranks) -> dict[str, Results]:
    chosen = {name: x for name, x in CASES.items() if ranks.size == 2 or "float16" not in name}
    results = {name: one_step(models[kind], c, batch, ranks) for name, (kind, c, batch) in chosen.items()}
    if ranks.size == 2:  # as on two machines of one rank each
        two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for name in ("tied, bfloat16", "untied, vocabulary split"):
            kind, c, batch = CASES[name]
            results[f"{name}, two machines"] = one_step(models[kind], c, batch, replace(ranks, mesh=two))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_do_what_one_does(
    size: int, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = on_ranks(size, tmp_path, partial(all_cases, models))

    def on_one_rank(batch: Any, budget: int, ranks: int) -> list[Any]:
        """The same micro-batches on one rank: in bfloat16 each rounds its gradients."""
        return [(m,) for step in schedule(batch, budget, size) for m in step if m is not DUMMY]

    monkeypatch.setattr(trainer.learner.learner, "schedule", on_one_rank)
    for name, ours in got[0].items():
        kind, c, batch = CASES[name.removesuffix(", two machines")]
        one = one_step(models[kind], c, batch, None)
        assert error(ours["gradient"], one["gradient"]) < 1e-5, name
        assert not one["critic"] or error(ours["critic"], one["critic"]) < 1e-5, name
        plain = c.objective.loss == "cispo" and batch[0].experts is None and not c.learner.freeze
        if c.model.dtype == "float32" and plain and not one["critic"]:
            assert error(ours["gradient"], oracle(models[kind], batch, 2.0)[1]) < 1e-5, name
        assert one["metrics"].get("learner/overflows", 6) > 5
        start = weights_of(learner(models[kind], c))
        moved = [{n: w - start[n] for n, w in result["weights"].items()} for result in (ours, one)]
        assert error(*moved) < 1e-3, name
        for a, b in zip(ours["scores"], one["scores"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=name)
        for key, value in of_the_data(one["metrics"]).items():
            if not key.startswith(("learner/rank", "learner/tflop")):
                assert ours["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)
        for other in got[1:]:
            assert same(ours["weights"], other[name]["weights"]), name
            assert other[name]["metrics"]["learner/grad_norm"] == ours["metrics"]["learner/grad_norm"]

    assert got[0]["untied, checkpointed"]["kept"] < 0.3 * got[0]["untied"]["kept"]  # bytes autograd holds


def batch(step: int) -> TrainBatch:
    return TrainBatch(step, scored(sequences(step, step - 1)), {})


def on_two_from_one(c: Config, one: Path, two: Path, ranks: Ranks) -> Results:
    """Goes on from a checkpoint of one rank, and saves; then rank 1's disk is full at the next one."""
    resumed = learner(one, c, one, ranks)
    random = torch.get_rng_state()
    resumed.train(batch(2))
    save(resumed, two)
    if ranks.rank == 1:

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        torch.save = full
    with pytest.raises(ConfigError) as refusal:
        save(resumed, two)
    resumed.train(batch(3))
    weights = weights_of(resumed)
    first, *rest = batch(4).sequences
    bad = (replace(first, advantages=first.advantages * np.nan), *rest)  # in one rank's micro-batch
    why = resumed.train(TrainBatch(4, bad, {}))["learner/skipped_why"]
    assert same(weights_of(resumed), weights)
    return {"random": random, "refusal": str(refusal.value), "weights": weights, "why": why}


@pytest.mark.slow
@pytest.mark.parametrize("body", ["own", "shared"])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(
    body: str, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = case("tied", objective=critic(body))[1]
    unbroken = learner(models["tied"], c)
    unbroken.train(batch(1))
    one, two = tmp_path / "step-000001", tmp_path / "step-000002"
    save(unbroken, one)
    random = torch.get_rng_state()
    got = on_ranks(2, tmp_path, partial(on_two_from_one, c, one, two))
    for step in (2, 3):
        unbroken.train(batch(step))
    back = learner(two, c, two)
    assert back.version == 2
    back.train(batch(3))
    expected = weights_of(unbroken)
    for weights in (got[0]["weights"], got[1]["weights"], weights_of(back)):
        for name, w in weights.items():
            torch.testing.assert_close(w, expected[name], rtol=0, atol=2e-6, msg=name)
    saved = AutoModelForCausalLM.from_pretrained(two)
    assert saved.num_parameters() == sum(w.numel() for w in unbroken.weights.values())
    assert all(torch.equal(rank["random"], random) for rank in got)
    for rank in got:
        assert f"no space left for the checkpoint {two}; older ones are whole" in rank["refusal"]
        assert "advantages holds NaN" in rank["why"]
    assert not list(tmp_path.glob(".step*"))


class Peer:
    """The controller's end of a learner's pipe."""

    conn: Any

    def receive(self) -> Any:
        assert self.conn.poll(TIMEOUT_S)
        return self.conn.recv()

    def ask(self, message: object) -> Any:
        self.conn.send(message)
        return self.receive()


def _member(environment: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ |= environment
    learner_main(*args)


class Group(Peer):
    """`learner_main` in `size` processes, and the controller's end of rank 0's pipe."""

    def __init__(self, c: Config, model_dir: str, size: int = 2) -> None:
        context: Any = multiprocessing.get_context(METHOD)
        self.conn, theirs = context.Pipe()
        self.processes: list[Any] = []
        self.telemetry: list[Any] = []
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(size)}
        for rank in range(size):
            ours, telemetry = context.Pipe()
            member = (c, model_dir, theirs if rank == 0 else None, 1, None, telemetry)
            args = (there | {"RANK": str(rank)}, member)
            self.processes.append(context.Process(target=_member, args=args, daemon=True))
            self.processes[-1].start()
            telemetry.close()
            self.telemetry.append(ours)
        theirs.close()
        assert isinstance(self.receive(), Ready)

    def failures(self, rank: int) -> list[Failed]:
        """The failures it sent; waits until its process has ended."""
        messages = []
        with suppress(EOFError):
            while self.telemetry[rank].poll(TIMEOUT_S):
                messages.append(self.telemetry[rank].recv())
        self.processes[rank].join(TIMEOUT_S)
        assert self.processes[rank].exitcode is not None
        return [t for t in messages if isinstance(t, Failed)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "how"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)], ids=str
)
def test_a_rank_that_is_lost_is_named_and_no_other_waits_for_ever(
    models: dict[str, str], tmp_path: Path, lost: int, how: signal.Signals
) -> None:
    c = replace(TIED, run_dir=str(tmp_path), pipeline=PipelineConfig(deadline_s=60, max_lag=2))
    group = Group(c, models["tied"])
    began = time.monotonic()
    os.kill(group.processes[lost].pid, how)
    with suppress(BrokenPipeError):
        group.conn.send(TrainBatch(1, sequences(), {}))
    (failed,) = group.failures(1 - lost)
    assert failed.role == ("learner-1" if lost == 0 else "learner")
    assert f"learner rank {lost} died, hung or cannot be reached" in failed.message
    assert time.monotonic() - began < 60  # ranks wait for half of the deadline
    group.processes[lost].kill()


@pytest.mark.slow
def test_a_rank_that_fails_is_named_by_the_others_and_a_controller_that_ends_is_no_failure(
    models: dict[str, str], tmp_path: Path
) -> None:
    group = Group(replace(TIED, run_dir=str(tmp_path)), models["tied"])
    beyond = replace(sequences()[0], token_ids=np.array([1, 99], np.int32))  # in one rank's micro-batch
    group.conn.send(TrainBatch(1, (beyond, *sequences()[1:]), {}))
    messages = [f.message for rank in range(2) for f in group.failures(rank)]
    assert any(m.startswith("targets hold ids") for m in messages)
    assert any(re.match(r"learner rank . failed: targets hold ids", m) for m in messages)
    group = Group(replace(TIED, run_dir=str(tmp_path)), models["tied"])
    group.conn.close()
    assert not group.failures(0) and not group.failures(1)
    assert [p.exitcode for p in group.processes] == [0, 0]


def late_while_starting_and_after(ranks: Ranks) -> Results:
    """Rank 1 comes 4 s late to a collective before all are ready, and to one after that."""
    result: Results = {}
    for phase in ("start", "run"):
        ranks.broadcast(None)
        time.sleep(4.0 * ranks.rank)
        try:
            result[phase] = ranks.gather(ranks.rank)
        except RuntimeError as e:
            result[phase] = str(e)
        ranks = ranks.started(1.5)
    return result


@pytest.mark.slow
def test_a_rank_may_be_late_only_while_it_starts(tmp_path: Path) -> None:
    patient, _ = on_ranks(2, tmp_path, late_while_starting_and_after)
    assert patient["start"] == [0, 1]
    assert "1500" in patient["run"]  # gloo's message: timed out waiting 1500ms


def answers(model_dir: str, folder: Path, ranks: Ranks) -> Results:
    """When rank 0 answers a request and when each rank's memory is free, with a slow rank 1."""
    freed: list[float] = []
    offload = Offload.offload

    def slow(self: Offload, tensors: Any) -> None:
        time.sleep(1.5 * ranks.rank)
        offload(self, tensors)
        freed.append(time.monotonic())

    Offload.offload = slow  # type: ignore[method-assign]  # a slow stand-in
    c = replace(TIED, run_dir=str(folder), engine=replace(TIED.engine, colocate=True))
    clock: Any = NoClock()
    service = LearnerService(c, model_dir, None, clock, None, ranks)
    ready = time.monotonic()
    service.answer(Score(sequences()[:2]))
    answered = time.monotonic()
    service.close()
    return {"freed": freed, "answered": [ready, answered]}


@pytest.mark.slow
def test_on_shared_gpus_no_answer_comes_before_every_rank_has_freed_its_memory(
    models: dict[str, str], tmp_path: Path
) -> None:
    first, second = on_ranks(2, tmp_path, partial(answers, models["tied"], tmp_path))
    for answered, freed in zip(first["answered"], second["freed"], strict=True):
        assert answered >= freed


LOCAL = {"MASTER_ADDR": "127.0.0.1"}
MISSING = {  # the environment of rank 0, TAKEN being a port on which another process listens
    "RANK is set and WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not": {},
    "rank 0 of 2.*127.0.0.1:TAKEN": {**LOCAL, "WORLD_SIZE": "2", "MASTER_PORT": "TAKEN"},
    r"rank 0 of 2.*after 1 s: learner rank 1 did not connect\.": {**LOCAL, "WORLD_SIZE": "2"},
    # As set by hand, or by srun.
    r"rank 0 of 3.* learner ranks 1, 2 did not connect\.": {"MASTER_ADDR": "localhost", "WORLD_SIZE": "3"},
}


@pytest.mark.parametrize("error", MISSING)
def test_a_rank_without_companions_says_where_it_looked(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"RANK": "0", **MISSING[error]}.items():
            monkeypatch.setenv(name, value.replace("TAKEN", taken))
        if len(MISSING[error]) == 2:
            monkeypatch.setenv("MASTER_PORT", free_port())
        with pytest.raises(ConfigError, match=error.replace("TAKEN", taken)):
            init_ranks(1)
