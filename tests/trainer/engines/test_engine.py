"""Promises of the embedded engine, against transformers' own forward and generate on tiny random models."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_process import SHAPE, assert_logprobs, load, prompt_of, request
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from trainer.config import ConfigError
from trainer.engines.torch.engine import TorchEngine
from trainer.engines.torch.sampling import uniforms
from trainer.types import Completion, Request


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    configs = {
        "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
        "untied": Qwen3Config(**SHAPE, tie_word_embeddings=False),
        "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "moe": Qwen3MoeConfig(**SHAPE, **moe),
    }
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in configs}


def engine_of(folder: str, slots: int = 8, decoder: bool = False) -> TorchEngine:
    return TorchEngine(folder, torch.float32, True, slots, decoder=decoder)


def submit(engine: TorchEngine, name: str, prompt: Sequence[int], **changes: Any) -> None:
    engine.submit(request(name, prompt, **changes))


def drain(engine: TorchEngine) -> dict[tuple[str, int], Completion]:
    done = {}
    for _ in range(10_000):
        if engine.idle:
            return done
        done |= {(c.request_id, c.index): c for c in engine.step()}
    raise AssertionError("the engine never became idle")


def test_inverse_cdf_takes_the_token_the_uniform_falls_on(models: dict[str, str]) -> None:
    engine, model = engine_of(models["qwen3"]), load(models["qwen3"])
    prompt = prompt_of(6)
    submit(engine, "a", prompt, n=8, max_tokens=1, seed=3)
    done = drain(engine)
    with torch.no_grad():
        cdf = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1).cumsum(-1).numpy()
    for i in range(8):
        key = np.random.SeedSequence([3, i]).generate_state(1, np.uint64).view(np.int64)
        u = float(uniforms(torch.from_numpy(key), torch.zeros(1, dtype=torch.long)))
        assert done["a", i].token_ids[0] == np.searchsorted(cdf, u)


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_greedy_is_that_of_generate(models: dict[str, str], name: str) -> None:
    engine, model = engine_of(models[name]), load(models[name])
    prompt = prompt_of(7)
    submit(engine, "a", prompt, temperature=0.0, max_tokens=30)
    (c,) = drain(engine).values()
    ids = torch.tensor([prompt])
    greedy = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    assert c.token_ids.tolist() == out[0, 7:].tolist()
    assert_logprobs(c, model, prompt)


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The sequence of seed 1234567, as published with the algorithm; the first 53 bits count."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = uniforms(torch.full((4,), 1234567), torch.arange(4))
    assert found.tolist() == [(x >> 11) / 2**53 for x in published]


@pytest.mark.parametrize("name", ["qwen3", "untied", "moe"])
def test_decoding_as_on_a_gpu_completes_the_same(models: dict[str, str], name: str, tmp_path: Path) -> None:
    """Without the graphs: fixed shapes, state and random numbers on the device. Sequences come, end, are
    aborted and outgrow the cache, and the weights change meanwhile."""
    found = []
    model = load(models[name])
    weights = {k: v.detach() * 1.1 for k, v in model.named_parameters()}
    save_file(weights, tmp_path / "new.safetensors")
    for decoder in (False, True):
        engine = engine_of(models[name], 7, decoder)
        done: dict[tuple[str, int], Completion] = {}
        for step in range(400):
            if step < 12:
                settings = {"temperature": (1.0, 0.6, 0.0)[step % 3], "n": 1 + step % 3, "seed": step}
                stops = frozenset({step, step + 20})
                length = 5 + 13 * step
                prompt = prompt_of(3 + step)
                submit(engine, f"r{step}", prompt, max_tokens=length, stop_ids=stops, **settings)
            ended = engine.abort(frozenset({"r2", "r4"})) if step == 9 else []
            if step == 15:
                engine.update_weights(1, str(tmp_path / "new.safetensors"))
            done |= {(c.request_id, c.index): c for c in ended + engine.step()}
        assert engine.idle
        found.append(done)
    ordinary, as_on_a_gpu = found
    assert ordinary.keys() == as_on_a_gpu.keys() and len(ordinary) == 24
    assert max(len(c.token_ids) for c in ordinary.values()) > 64  # the cache has grown
    gaps = [np.abs(as_on_a_gpu[key].logprobs_gen - c.logprobs_gen) for key, c in ordinary.items()]
    assert np.concatenate(gaps).mean() < 1e-6 and np.concatenate(gaps).max() < 1e-5  # a sum in FP32 errs so
    for key, c in ordinary.items():
        other = as_on_a_gpu[key]
        assert other.token_ids.tolist() == c.token_ids.tolist() and other.finish_reason == c.finish_reason
        assert other.versions.tolist() == c.versions.tolist()


def counted(name: str, calls: list[str]) -> Callable[..., object]:
    """A method of Tensor that also records that it was called."""
    method = getattr(torch.Tensor, name)

    def call(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return method(*args, **kwargs)

    return call


def test_a_step_as_on_a_gpu_reads_the_device_once_and_writes_it_only_after_changes(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(models["qwen3"], decoder=True)
    submit(engine, "a", prompt_of(5), n=3, max_tokens=20)
    for _ in range(3):
        engine.step()
    waits: list[str] = []
    for name in ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, waits))
    monkeypatch.setattr("trainer.engines.torch.decoder.torch.from_numpy", None)  # nothing is uploaded
    engine.step()
    assert waits == ["cpu"]


def test_completions_are_aborted_after_the_cache_has_grown(models: dict[str, str]) -> None:
    engine = engine_of(models["qwen3"], slots=3)
    for name in "ab":
        submit(engine, name, prompt_of(5), max_tokens=100)
    engine.step()
    assert [len(c.token_ids) for c in engine.abort(frozenset({"a"}))] == [1]
    assert len(drain(engine)["b", 0].token_ids) == 100


@pytest.mark.parametrize("name", ["qwen3", "untied", "llama"])
def test_the_bits_of_a_completion_depend_on_nothing_beside_it(models: dict[str, str], name: str) -> None:
    def generate(arrivals: Sequence[int]) -> dict[tuple[str, int], Completion]:
        """Completions of requests that arrive at these steps."""
        engine, done = engine_of(models[name], slots=12), dict[tuple[str, int], Completion]()
        todo = deque(enumerate(arrivals))
        for step in range(10_000):
            while todo and todo[0][1] <= step:
                i, _ = todo.popleft()
                submit(engine, f"{i}", prompt_of(3 + 9 * i), n=3, max_tokens=20 + 15 * i, seed=i)
            done |= {(c.request_id, c.index): c for c in engine.step()}
            if engine.idle and not todo:
                return done
        raise AssertionError("the engine never became idle")

    expected = generate((0, 0, 0, 0, 0))
    for arrivals in ((0, 1, 7, 7, 40), (0, 100, 200, 300, 400)):
        for key, c in generate(arrivals).items():
            assert np.array_equal(c.token_ids, expected[key].token_ids)
            assert np.array_equal(c.logprobs_gen, expected[key].logprobs_gen)


def test_the_samples_of_a_request_share_one_prefill(models: dict[str, str]) -> None:
    engine = engine_of(models["qwen3"], slots=8)
    submit(engine, "a", prompt_of(20), n=8, max_tokens=3)
    submit(engine, "b", prompt_of(10), n=1, max_tokens=3)
    drain(engine)
    assert engine.prefilled == 30


def test_long_prompts_are_prefilled_in_turn(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.engines.torch.engine.PREFILL_TOKENS", 100)
    engine = engine_of(models["qwen3"], slots=8)
    lengths = [60, 30, 200, 50, 50]
    for i, length in enumerate(lengths):
        submit(engine, str(i), prompt_of(length), max_tokens=10)
    done: list[Completion] = []
    made = []
    while not engine.idle:
        before = engine.prefilled
        done += engine.step()
        made.append(engine.prefilled - before)
    assert made[:4] == [90, 200, 100, 0] and len(done) == 5


@pytest.mark.parametrize("name", ["qwen3", "moe"])
@pytest.mark.parametrize("decoder", [False, True])
def test_requests_are_continued_among_others_and_only_their_new_tokens_are_prefilled(
    models: dict[str, str], name: str, decoder: bool
) -> None:
    engine = engine_of(models[name], 6, decoder)
    model = load(models[name])
    submit(engine, "other", prompt_of(70), n=2, max_tokens=60)
    thoughts = {
        f"t{i}": request(f"t{i}", prompt_of(5 + 3 * i), max_tokens=6 + i, keep_kv=("length",))
        for i in range(3)
    }
    for thought in thoughts.values():
        engine.submit(thought)
    done: dict[str, Completion] = {}
    answers: dict[str, Request] = {}
    while not engine.idle:
        for c in engine.step():
            done[c.request_id] = c
            if c.request_id in thoughts:
                prompt = (*thoughts[c.request_id].prompt_ids, *c.token_ids.tolist(), 1, 2, 3)
                answer = request(f"{c.request_id}.a", prompt, continues=c.request_id, max_tokens=40)
                answers[answer.request_id] = answer
                engine.submit(answer)
    # Of each continuation the newest token and the phrase are prefilled.
    assert engine.prefilled == 70 + (5 + 8 + 11) + 3 * 4
    for key, answer in answers.items():
        assert_logprobs(done[key], model, answer.prompt_ids)


def test_kept_keys_wait_however_many_they_are_and_are_dropped_when_released(models: dict[str, str]) -> None:
    """A continuation has the same bits whatever else was generated meanwhile."""
    engine = engine_of(models["qwen3"], slots=2)
    for i in range(5):
        submit(engine, f"t{i}", prompt_of(4), max_tokens=3, keep_kv=("length",))
    drain(engine)
    engine.abort(frozenset({"t3", "t4"}))
    assert sorted(engine._kept) == ["t0", "t1", "t2"]
    late = request("late", (*prompt_of(4), 1, 2, 3, 4), continues="t0")
    engine.submit(late)
    tokens = drain(engine)["late", 0].token_ids.tolist()
    assert engine.prefilled == 5 * 4 + 2 and sorted(engine._kept) == ["t1", "t2"] and len(tokens) == 12


@pytest.mark.parametrize("threads", [1, 3])
def test_turns_have_the_same_bits_whatever_else_is_continued_with_them(
    models: dict[str, str], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = []
        for together in (True, False):
            engine = engine_of(models["qwen3"], 8)
            for i in range(8):
                submit(engine, f"t{i}", prompt_of(4 + i // 2), max_tokens=3, seed=i, keep_kv=("length",))
            first, done = drain(engine), dict[tuple[str, int], Completion]()
            for i in range(8):
                said = (*prompt_of(4 + i // 2), *first[f"t{i}", 0].token_ids.tolist())
                submit(engine, f"u{i}", (*said, *prompt_of(i % 4, 1)), continues=f"t{i}", max_tokens=5)
                done |= {} if together else drain(engine)
            done |= drain(engine)
            found.append([done[f"u{i}", 0].logprobs_gen.tobytes() for i in range(8)])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_an_engine_without_the_keys_goes_on_with_the_same_bits(models: dict[str, str], name: str) -> None:
    """As after a resume, or the death of the engine that had them; turns of one token, of few and of many."""

    def play(engines: Sequence[TorchEngine]) -> list[Completion]:
        turns, ended = list[int](), list[Completion]()
        prompt: tuple[int, ...] = prompt_of(9)
        for number, (engine, length) in enumerate(zip(engines, (1, 7, 150, 20, 30), strict=True)):
            continues = f"t{number - 1}" if number else ""
            more = {"continues": continues, "turns": tuple(turns), "keep_kv": ("length",), "seed": number}
            submit(engine, f"t{number}", prompt, max_tokens=length, **more)
            ended.append(drain(engine)[f"t{number}", 0])
            turns += len(prompt), len(prompt) + length
            prompt = (*prompt, *ended[-1].token_ids.tolist(), *prompt_of(3 + 5 * number, number))
        return ended

    unbroken, late = (engine_of(models[name], 4) for _ in range(2))
    submit(unbroken, "other", prompt_of(20), n=2, max_tokens=70)
    expected = play([unbroken] * 5)
    for first_late in (1, 2, 3, 4):
        found = play([unbroken] * first_late + [late] * (5 - first_late))
        for completion, reference in zip(found, expected, strict=True):
            assert completion.token_ids.tolist() == reference.token_ids.tolist()
            assert completion.logprobs_gen.tobytes() == reference.logprobs_gen.tobytes()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": ()}, "0 prompt tokens"),
        ({"max_tokens": 9000}, "8192"),
        ({"max_tokens": 0}, "asks for 0 new ones"),
    ],
)
def test_impossible_requests_are_refused(models: dict[str, str], wrong: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"prompt": prompt_of(5), "max_tokens": 4} | wrong
    with pytest.raises(ConfigError, match=message):
        engine_of(models["qwen3"]).submit(request("a", settings.pop("prompt"), **settings))


def test_wrong_weights_are_refused_and_diverged_ones_named(models: dict[str, str], tmp_path: Path) -> None:
    engine = engine_of(models["qwen3"])
    save_file({"no.such": torch.zeros(1)}, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=r"no\.such"):
        engine.update_weights(1, str(tmp_path / "odd.safetensors"))
    save_file({"model.norm.weight": torch.full((64,), float("nan"))}, tmp_path / "nan.safetensors")
    engine.update_weights(1, str(tmp_path / "nan.safetensors"))
    submit(engine, "a", prompt_of(3))
    with pytest.raises(ConfigError, match="version 1"):
        engine.step()


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_a_model_s_folder_that_is_pushed_gives_the_completions_of_an_engine_that_began_with_it(
    models: dict[str, str], name: str, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(models[name])
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    other.save_pretrained(tmp_path)
    pushed, fresh, first = engine_of(models[name]), engine_of(str(tmp_path)), engine_of(models[name])
    pushed.update_weights(1, str(tmp_path))
    for engine in (pushed, fresh, first):
        submit(engine, "a", prompt_of(5))
    logprobs = [drain(engine)["a", 0].logprobs_gen.tolist() for engine in (pushed, fresh, first)]
    assert logprobs[0] == logprobs[1] != logprobs[2]
