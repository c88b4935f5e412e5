"""What every engine promises the controller, tested on each kind of engine as its own process."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import push as push_adapters
from engine_process import (
    VOCAB,
    EngineProcess,
    abort,
    alive,
    assert_logprobs,
    assert_swapped,
    generate,
    load,
    perturb,
    request,
    settings,
    stale_kv,
    teacher_forced,
    wait_until_gone,
    write,
)
from engine_process import prompt_of as p

from trainer.engines.protocol import EngineClient
from trainer.run_folder import sweep
from trainer.types import Completion, Request

LONG = 5900  # tokens of a completion that is still running when a short one has ended


@pytest.fixture(scope="module")
def engine(kind: str, tied_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """float32, tied embeddings."""
    process = EngineProcess(settings(tied_llama, tmp_path_factory.mktemp("run"), kind))
    process.info = process.ready()  # type: ignore[attr-defined]
    yield process
    process.close()


@pytest.fixture(scope="module")
def second(kind: str, untied_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """bfloat16 under an FP32 head, untied embeddings."""
    config = settings(untied_llama, tmp_path_factory.mktemp("run"), kind, "bfloat16")
    process = EngineProcess(config, "engine-1")
    process.ready()
    yield process
    process.close()


def run(engine: EngineProcess, work: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `work(client)`."""

    async def body() -> Any:
        async with engine.client() as client:
            return await asyncio.wait_for(work(client), 250)

    return asyncio.run(body())


def test_logprobs_are_those_of_the_distribution_sampled_from(engine: EngineProcess, tied_llama: str) -> None:
    model, cases = load(tied_llama), list(product((1, 2, 9, 70), (1.0, 0.7)))
    wanted = [request(str(i), p(n), n=3, temperature=t, max_tokens=20) for i, (n, t) in enumerate(cases)]
    done = run(engine, lambda client: generate(client, *wanted))
    assert len(done) == 24
    for (name, _), c in done.items():
        assert c.finish_reason == "length" and len(c.token_ids) == len(c.versions) == 20
        length, temperature = cases[int(name)]
        expected = teacher_forced(model, p(length), c.token_ids.tolist(), temperature)
        assert np.abs(c.logprobs_gen - expected).max() <= 2e-5


def test_a_prompt_s_tokens_are_scored_where_a_request_asks(engine: EngineProcess, tied_llama: str) -> None:
    model, lengths = load(tied_llama), (1, 2, 70, 200)
    scored = [
        request(f"s{n}", p(n), temperature=0.5, max_tokens=3 + n % 4, score_prompt=True) for n in lengths
    ]
    plain = [request(f"p{n}", p(n), temperature=0.5, max_tokens=3 + n % 4) for n in lengths]
    done = run(engine, lambda client: generate(client, *scored, *plain))
    for n in lengths:
        c, scores = done[f"s{n}", 0], done[f"s{n}", 0].prompt_scores
        assert c.token_ids.tolist() == done[f"p{n}", 0].token_ids.tolist() and len(scores) == n - 1
        assert len(done[f"p{n}", 0].prompt_scores) == 0
        if n > 1:
            expected = teacher_forced(model, p(n)[:1], p(n)[1:])
            np.testing.assert_allclose(scores["logprob"], expected, atol=2e-5)
            likeliest = teacher_forced(model, p(n)[:1], (*p(n)[1:-1], int(scores["best_id"][-1])))[-1]
            assert scores["best_logprob"][-1] == pytest.approx(likeliest, abs=2e-5)
            assert (scores["best_logprob"] >= scores["logprob"]).all()
            assert ((scores["best_logprob"] == scores["logprob"]) == (scores["best_id"] == p(n)[1:])).all()


def test_tokens_are_sampled_with_their_probabilities(engine: EngineProcess, tied_llama: str) -> None:
    n, prompt = 600, p(6)
    done = run(engine, lambda client: generate(client, request("draw", prompt, n=n, max_tokens=1)))
    drawn = np.bincount([c.token_ids[0] for c in done.values()], minlength=VOCAB)
    with torch.no_grad():
        expected = n * load(tied_llama)(torch.tensor([prompt])).logits[0, -1].double().softmax(-1).numpy()
    often = expected >= 5
    chi2 = float(((drawn - expected) ** 2 / expected)[often].sum())
    assert often.sum() > 5 and chi2 < often.sum() + 4 * (2 * often.sum()) ** 0.5


def test_a_samples_tokens_depend_on_its_seed_and_index_alone(engine: EngineProcess) -> None:
    alone = run(engine, lambda c: generate(c, request("a", p(11), n=2, max_tokens=25)))
    crowd = [request(f"b{i}", p(3 + i), n=2, max_tokens=5 + 7 * i, seed=i) for i in range(6)]
    crowded = run(engine, lambda c: generate(c, *crowd, request("a", p(11), n=2, max_tokens=25)))
    other = run(engine, lambda c: generate(c, request("a", p(11), n=2, max_tokens=25, seed=6)))
    for key, completion in alone.items():
        assert completion.token_ids.tolist() == crowded[key].token_ids.tolist()
    assert len({tuple(c.token_ids.tolist()) for c in (*alone.values(), *other.values())}) == 4


def test_prompts_longer_in_all_than_a_step_keep_their_tokens(engine: EngineProcess, tied_llama: str) -> None:
    prompts = {f"long{i}": p(1200, i) for i in range(6)}
    wanted = [request(k, x, max_tokens=6) for k, x in prompts.items()]
    together = run(engine, lambda c: generate(c, *wanted))
    alone = run(engine, lambda c: generate(c, wanted[5]))
    assert together["long5", 0].token_ids.tolist() == alone["long5", 0].token_ids.tolist()
    for (name, _), c in together.items():
        assert_logprobs(c, load(tied_llama), prompts[name])


def test_a_stop_token_ends_a_completion_and_is_its_last(engine: EngineProcess) -> None:
    free = run(engine, lambda c: generate(c, request("free", p(5), n=4, max_tokens=40)))
    stops = frozenset({int(free["free", 0].token_ids[9]), int(free["free", 1].token_ids[15])})
    stopped = run(engine, lambda c: generate(c, request("free", p(5), n=4, max_tokens=40, stop_ids=stops)))
    assert {c.finish_reason for c in free.values()} == {"length"}  # only stop_ids and max_tokens end one
    assert "stop" in {c.finish_reason for c in stopped.values()}
    for key, c in stopped.items():
        whole = free[key].token_ids.tolist()
        end = next((i + 1 for i, t in enumerate(whole) if t in stops), 40)
        assert c.token_ids.tolist() == whole[:end]
        assert c.finish_reason == ("stop" if whole[end - 1] in stops else "length")
        assert len(c.logprobs_gen) == len(c.versions) == end
        np.testing.assert_allclose(c.logprobs_gen, free[key].logprobs_gen[:end], atol=2e-5)


def test_more_samples_than_slots_all_end_and_evaluations_go_first(engine: EngineProcess) -> None:
    order: list[str] = []

    async def one(client: EngineClient, r: Request) -> None:
        async for ended in client.stream(r):
            order.extend([r.request_id] * len(ended))

    async def all_of(client: EngineClient) -> None:
        # The first is long, so that it still runs when the engine reads the evaluation.
        lengths = (800, 40, 40, 40)
        training = [request(f"t{i}", p(4), n=8, max_tokens=length) for i, length in enumerate(lengths)]
        evaluation = request("eval", p(4), n=8, max_tokens=3, evaluation=True)
        await asyncio.gather(*(one(client, r) for r in (*training, evaluation)))

    run(engine, all_of)
    assert len(order) == 40
    assert order.index("eval") < order.index("t1")  # after the running sequences, before the waiting ones


def test_abort_returns_partial_completions(engine: EngineProcess) -> None:
    async def aborted(client: EngineClient) -> dict[tuple[str, int], Completion]:
        wanted = (("x", 6, LONG), ("short", 1, 6), ("y", 8, LONG))
        requests = (request(name, p(5), n=n, max_tokens=most) for name, n, most in wanted)
        x, short, y = (asyncio.create_task(generate(client, r)) for r in requests)
        await short
        abort(engine.conn, "x", "y")
        return await x | await y

    done = run(engine, aborted)
    lengths = {key: len(c.token_ids) for key, c in done.items()}
    assert len(done) == 14 and {c.finish_reason for c in done.values()} == {"abort"}
    assert all(0 < lengths["x", i] < LONG for i in range(6))
    assert min(lengths.values()) == 0  # the last of y never got a slot
    whole = run(engine, lambda c: generate(c, request("x", p(5), n=6, max_tokens=4)))
    for key, completion in whole.items():
        assert done[key].token_ids[:4].tolist() == completion.token_ids.tolist()
        assert len(done[key].logprobs_gen) == len(done[key].versions) == lengths[key]


def test_weights_change_mid_sequence_and_the_old_keys_are_kept(
    engine: EngineProcess, tied_llama: str, tmp_path: Path
) -> None:
    old, new = load(tied_llama), load(tied_llama)
    path, prompt = perturb(new, tmp_path / "new.safetensors"), p(70)

    async def swapped(client: EngineClient) -> tuple[dict[tuple[str, int], Completion], ...]:
        before = engine.version
        long = asyncio.create_task(generate(client, request("long", prompt, n=2, max_tokens=LONG)))
        await asyncio.sleep(0)
        await generate(client, request("short", p(5), max_tokens=6))
        await engine.push(client, path)
        fresh = await generate(client, request("fresh", prompt, n=2, max_tokens=8, seed=9))
        abort(engine.conn, "long")
        running = await long
        await engine.push(client, write(old, tmp_path / "old.safetensors"))
        back = await generate(client, request("back", prompt, max_tokens=8))
        await engine.push(client, "")  # a step without a gradient
        same = await generate(client, request("same", prompt, max_tokens=8))
        assert engine.version == before + 3
        return running, fresh, back, same

    running, fresh, back, same = run(engine, swapped)
    version = engine.version - 2
    for c in running.values():
        swap = assert_swapped(c, old, new, prompt, version)
        with_new_keys = teacher_forced(new, prompt, c.token_ids.tolist())[swap:]
        assert np.abs(c.logprobs_gen[swap:] - with_new_keys).max() > 1e-2  # else the test shows nothing
    # The prefix cache holds the prompt's old keys; a new request must not use them.
    for later, (completions, model) in enumerate(((fresh, new), (back, old), (same, old))):
        for c in completions.values():
            assert set(c.versions.tolist()) == {version + later}
            assert_logprobs(c, model, prompt)


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_adapters_alone_become_the_sums_amid_requests_and_the_next_are_not_added_to_them(
    targets: tuple[str, ...], engine: EngineProcess, tied_llama: str, tmp_path: Path
) -> None:
    """Log-probs are those of transformers with sums made in float64: parity's, on both engines."""
    old, prompt = load(tied_llama), p(70)
    first, second = (push_adapters(tied_llama, tmp_path / str(r), rank=r, targets=targets) for r in (4, 2))
    assert Path(first.alone).stat().st_size < 0.5 * Path(first.whole).stat().st_size

    async def swapped(client: EngineClient) -> list[dict[tuple[str, int], Completion]]:
        long = asyncio.create_task(generate(client, request("long", prompt, n=2, max_tokens=LONG)))
        await asyncio.sleep(0)
        await generate(client, request("short", p(5), max_tokens=6))
        await engine.push(client, first.alone)
        fresh = await generate(client, request("fresh", prompt, n=2, max_tokens=20, seed=9))
        abort(engine.conn, "long")
        running = await long
        await engine.push(client, second.alone)
        later = await generate(client, request("later", prompt, n=2, max_tokens=20))
        await engine.push(client, write(old, tmp_path / "old.safetensors"))
        return [running, fresh, later]

    running, fresh, later = run(engine, swapped)
    for c in running.values():
        assert_swapped(c, old, first.model, prompt, engine.version - 2)
    for completions, model in ((fresh, first.model), (later, second.model)):
        for c in completions.values():
            assert_logprobs(c, model, prompt)
    differ = teacher_forced(old, prompt, fresh["fresh", 0].token_ids.tolist())
    assert np.abs(fresh["fresh", 0].logprobs_gen - differ).max() > 1e-2  # else the test shows nothing


def test_under_bfloat16_adapters_alone_are_the_learner_s_sums(
    second: EngineProcess, untied_llama: str, tmp_path: Path
) -> None:
    pushed, wanted = (
        push_adapters(untied_llama, tmp_path, "bfloat16"),
        request("r", p(30), n=4, max_tokens=60),
    )

    async def both(client: EngineClient) -> list[dict[tuple[str, int], Completion]]:
        before = await generate(client, wanted)
        await second.push(client, pushed.alone)
        alone = await generate(client, wanted)
        await second.push(client, pushed.whole)
        whole = await generate(client, wanted)
        await second.push(client, write(load(untied_llama), tmp_path / "old.safetensors"))
        return [before, alone, whole]

    before, alone, whole = run(second, both)
    for key, c in alone.items():
        np.testing.assert_array_equal(c.token_ids, whole[key].token_ids)
        # A sum's last bit depends on what runs beside it; a weight rounded elsewhere would be 1e-3 nats.
        np.testing.assert_allclose(c.logprobs_gen, whole[key].logprobs_gen, atol=5e-6)
        assert c.token_ids.tolist() != before[key].token_ids.tolist()


def test_the_weights_of_a_model_s_folder_are_loaded_whatever_their_dtype_and_number_of_files(
    engine: EngineProcess, tied_llama: str, tmp_path: Path
) -> None:
    """As `python -m trainer.evaluate` pushes the checkpoints of a run, whose weights are FP32."""
    old, new, prompt = load(tied_llama), load(tied_llama), p(30)
    perturb(new, tmp_path / "new.safetensors")
    new.save_pretrained(tmp_path / "checkpoint", max_shard_size="100KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1

    async def pushed(client: EngineClient) -> Completion:
        await engine.push(client, str(tmp_path / "checkpoint"))
        after = await generate(client, request("after", prompt))
        await engine.push(client, write(old, tmp_path / "old.safetensors"))
        return after["after", 0]

    assert_logprobs(run(engine, pushed), new, prompt)


def test_a_paused_engine_generates_nothing_until_it_is_resumed(engine: EngineProcess) -> None:
    free = run(engine, lambda c: generate(c, request("z", p(8), n=3, max_tokens=60)))

    async def paused(client: EngineClient) -> dict[tuple[str, int], Completion]:
        task = asyncio.create_task(generate(client, request("z", p(8), n=3, max_tokens=60)))
        await asyncio.sleep(0)
        await client.pause()
        late = asyncio.create_task(generate(client, request("late", p(8), max_tokens=1)))
        await engine.push(client, "")  # a weight update does not end the pause
        await asyncio.sleep(1.0)
        assert not late.done()
        client.resume()
        await late
        return await task

    for key, c in run(engine, paused).items():
        assert c.token_ids.tolist() == free[key].token_ids.tolist()


def test_time_without_a_request_is_booked_by_what_episodes_wait_for(engine: EngineProcess) -> None:
    began = time.monotonic()

    def states() -> list[str]:
        """Those since the test began, one after the other, without how weights are taken up."""
        spans = [span for message in list(engine.spans) for span in message.spans if span[1] > began]
        waits = [state for state, *_ in spans if state not in ("generate", "weight_update")]
        return [state for i, state in enumerate(waits) if not i or waits[i - 1] != state]

    async def work(client: EngineClient) -> None:
        await generate(client, request("before", p(3), max_tokens=2))
        # Two training episodes and one of an evaluation wait, and go on one after the other.
        waits = (("tools", 1), ("evaluate", 1), ("tools", 1), ("tools", -1), ("tools", -1), ("evaluate", -1))
        for state, more in waits:
            client.wait(state, more)
            await engine.push(client, "")  # it has read all that came before
            await engine.push(client, "")
        expected, i = ["idle", "tools", "evaluate", "idle"], 0
        while states() != expected and time.monotonic() < began + 200:  # spans come with what follows
            i += 1
            await asyncio.sleep(0.1)
            await generate(client, request(f"after{i}", p(3), max_tokens=2))
        assert states() == expected

    run(engine, work)


def test_a_continued_request_keeps_its_keys(engine: EngineProcess, tied_llama: str, tmp_path: Path) -> None:
    old, new, prompt, phrase = load(tied_llama), load(tied_llama), p(40), [1, 2, 3]
    path = perturb(new, tmp_path / "new.safetensors")

    async def continued(client: EngineClient) -> tuple[list[int], Completion, Completion]:
        # 64 tokens have keys then, two of vLLM's blocks: it keeps whole ones.
        thought = await generate(client, request("think", prompt, max_tokens=25, keep_kv=("length",)))
        ids = [*thought["think", 0].token_ids.tolist(), *phrase]
        await engine.push(client, path)
        after = (*prompt, *ids)
        kept = await generate(client, request("kept", after, max_tokens=12, continues="think"))
        anew = await generate(client, request("anew", after, max_tokens=12))
        await engine.push(client, write(old, tmp_path / "old.safetensors"))
        return ids, kept["kept", 0], anew["anew", 0]

    ids, kept, anew = run(engine, continued)
    gap = {}
    for name, c in (("kept", kept), ("anew", anew)):
        tokens = [*ids, *c.token_ids.tolist()]
        stale = stale_kv(old, new, prompt, tokens, 25)
        gap[name] = np.abs(c.logprobs_gen - stale[-12:]).max()
        if name == "anew":
            assert_logprobs(c, new, [*prompt, *ids])
    assert gap["kept"] <= 2e-5 and gap["anew"] > 1e-2, gap


def test_an_idle_engine_has_reported_every_token_and_booked_all_of_its_time(engine: EngineProcess) -> None:
    def reports() -> list[int]:
        time.sleep(1.0)  # the engine is idle, so its last report is under way
        return [e.data["tokens"] for e in engine.events if e.kind == "engine"]

    async def work(client: EngineClient) -> int:
        evaluation = request("eval", p(9), n=8, max_tokens=5, evaluation=True)
        done = await generate(client, request("train", p(9), n=16, max_tokens=40), evaluation)
        await engine.push(client, "")
        return sum(len(c.token_ids) for c in done.values())

    run(engine, lambda client: generate(client, request("before", p(9), max_tokens=6)))
    before = reports()[-1]
    made = run(engine, work)
    tokens = reports()
    assert made == 16 * 40 + 8 * 5 and tokens[-1] == before + made and tokens == sorted(tokens)
    assert engine.events[-1].data["busy_s"] > 0
    # The clock sends its spans when the state changes, at most every half second.
    run(engine, lambda client: generate(client, request("after", p(9), max_tokens=6)))
    reports()
    spans = [span for message in engine.spans for span in message.spans]
    states = {state for state, _, _ in spans} - {"tools"}  # of another test
    assert states == {"start-up", "idle", "generate", "evaluate", "weight_update"}
    assert {message.role for message in engine.spans} == {"engine"}
    assert all(a[2] == pytest.approx(b[1], abs=1e-6) for a, b in pairwise(spans))
    info = engine.info  # type: ignore[attr-defined]
    assert info["dtype"] == "float32" and info["slots"] == 8


def test_vllm_says_how_much_of_its_kv_cache_was_in_use(engine: EngineProcess, kind: str) -> None:
    if kind != "vllm":
        pytest.skip("a slot of the torch engine has room for a whole sequence: nothing is preempted")
    run(engine, lambda client: generate(client, request("long", p(9), n=8, max_tokens=1900)))
    time.sleep(1.0)
    said = [e.data for e in engine.events if "kv_use" in e.data]
    assert 0 < max(data["kv_use"] for data in said) <= 1 and said[-1]["preemptions"] == 0


def test_two_engines_run_concurrently_in_bfloat16_under_an_fp32_head(
    engine: EngineProcess, second: EngineProcess, untied_llama: str, tmp_path: Path
) -> None:
    model = load(untied_llama, torch.bfloat16)
    prompt = p(40)

    async def both() -> tuple[Any, Any]:
        async with engine.client() as one, second.client() as two:
            wanted = request("both", prompt, n=8, max_tokens=30)
            first = await asyncio.gather(generate(one, wanted), generate(two, wanted))
            await second.push(two, perturb(model, tmp_path / "two.safetensors", scale=0.1))
            return first[1], await generate(two, wanted)

    before, after = asyncio.run(asyncio.wait_for(both(), 250))
    for completions, weights in ((before, load(untied_llama, torch.bfloat16)), (after, model)):
        pairs = [(c.logprobs_gen, c.token_ids.tolist()) for c in completions.values()]
        gaps = [np.abs(logp - teacher_forced(weights, prompt, tokens)) for logp, tokens in pairs]
        assert np.concatenate(gaps).mean() <= 0.02


def test_a_killed_engine_leaves_no_process_and_no_file(second: EngineProcess, tmp_path: Path) -> None:
    pids = second.processes()
    os.kill(second.process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    second.process.join()
    wait_until_gone(pids)
    sweep(tmp_path)  # as the launcher does
    assert list(second.temporary.iterdir()) == []


def test_a_busy_engine_ends_with_its_controller_and_leaves_no_process_or_file(engine: EngineProcess) -> None:
    pids = engine.processes()
    engine.conn.send(request("endless", p(5), n=8, max_tokens=LONG))
    time.sleep(0.5)
    assert alive(pids) == pids
    engine.conn.close()  # as when the controller dies
    engine.process.join(60)
    assert engine.process.exitcode == 0, engine.failure
    wait_until_gone(pids)
    assert list(engine.temporary.iterdir()) == []
