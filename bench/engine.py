"""The torch engine's tokens/s beside transformers' `generate` and, on a CPU, vLLM, in turns. [3 min]

  python -m bench engine                                      tokens/s: median, range, and the engine's ratio
  .venv-vllm/bin/python -m bench engine --out engine.jsonl    with vLLM, after `make setup-vllm`
  python -m bench engine --model qwen3-0.6b                   on a GPU: bf16, 96 sequences of 256 new tokens

Each generates as many new tokens for each sequence, on the same weights and prompts, at temperature 1. Where
the model is a shape of bench/learner/step.py other than smollm2-135m, its weights are random.
"""

import asyncio
import atexit
import importlib.util
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.harness import Case, Row, by_round, cores, grouped, in_turns, machine_of, median_and_range
from bench.learner.step import MODELS, TINY, save_model
from bench.measure import DEVICE, milliseconds
from bench.table import table
from trainer.config import Config
from trainer.engines.torch.engine import TorchEngine
from trainer.engines.vllm.engine import LocalVLLM
from trainer.engines.vllm.process import Sample
from trainer.models.resolve import resolve_model
from trainer.types import Request

CUDA = DEVICE == "cuda"
OPTIONS: dict[str, Any] = {
    "model": ("smollm2-135m", "built-in name, shape, folder or hub name"),
    "dtype": ("bfloat16" if CUDA else "float32", "of the weights", ("float32", "bfloat16")),
    "sequences": (96 if CUDA else 32, "sequences at once"),
    "tokens": (256 if CUDA else 64, "new tokens of each"),
    "rounds": (5, "timed calls of each"),
    "threads": (cores(), "CPU threads"),
}
PROMPT = 16  # tokens
OURS = "torch engine"
Work = Callable[[], int]  # generates; the number of tokens


def providers(stack: ExitStack) -> dict[str, Callable[[Namespace, str], Work]]:
    """Functions that start the generators, by name."""
    named: dict[str, Callable[[Namespace, str], Work]] = {OURS: ours, "transformers generate": generate}
    if importlib.util.find_spec("vllm") and not CUDA:
        named["vLLM"] = partial(vllm, stack=stack)
    return named


def requests(options: Namespace, vocabulary: int) -> list[Request]:
    """One request for each row of random token ids."""
    rows = np.random.default_rng(0).integers(100, 40_000, (options.sequences, PROMPT)) % vocabulary
    return [
        Request(f"r{i}", tuple(row.tolist()), 1, options.tokens, 1.0, frozenset(), i)
        for i, row in enumerate(rows)
    ]


def ours(options: Namespace, folder: str) -> Work:
    """The embedded engine."""
    engine = TorchEngine(folder, getattr(torch, options.dtype), True, options.sequences, DEVICE)

    def run() -> int:
        before = engine.generated
        for request in requests(options, engine.model.config.vocab_size):
            engine.submit(request)
        while not engine.idle:
            engine.step()
        return engine.generated - before

    return run


def generate(options: Namespace, folder: str) -> Work:
    """transformers' `generate`, without a stop at EOS."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    model.to(DEVICE)
    prompts = [request.prompt_ids for request in requests(options, model.config.vocab_size)]
    ids = torch.tensor(prompts, device=DEVICE)

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                max_new_tokens=options.tokens, min_new_tokens=options.tokens, pad_token_id=0,
            )  # fmt: skip
        return len(ids) * (out.shape[1] - PROMPT)

    return run


def vllm(options: Namespace, folder: str, stack: ExitStack) -> Work:
    """The same work by vLLM with the settings of a run; its processes end with the stack."""
    config = Config(run_dir=stack.enter_context(tempfile.TemporaryDirectory()))
    engine_config = replace(config.engine, slots=options.sequences, max_new_tokens=options.tokens)
    config = replace(config, engine=engine_config, model=replace(config.model, dtype=options.dtype))
    runner = stack.enter_context(asyncio.Runner())

    async def start() -> LocalVLLM:
        engine = LocalVLLM(config, folder, options.threads, Path(config.run_dir) / "none")
        await engine.load(0)
        return engine

    engine = runner.run(start())
    stack.callback(lambda: runner.run(engine.close()))

    async def run() -> int:
        done = await asyncio.gather(*(engine.sample(Sample(r, 0), 0) for r in requests(options, 40_000)))
        return sum(len(c.token_ids) for c in done)

    return lambda: runner.run(run())


def cases(options: Namespace) -> Iterator[Case]:
    """Every generator, once a round."""
    torch.set_num_threads(options.threads)
    stack = ExitStack()
    atexit.register(stack.close)
    if options.model in MODELS and options.model != "smollm2-135m":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-engine-"))
        save_model(replace(TINY, model=options.model, device=DEVICE, dtype=options.dtype), folder)
    else:
        folder = resolve_model(options.model)
    named = providers(stack)

    @cache
    def started(name: str) -> tuple[Work, int]:
        work = named[name](options, folder)
        return work, work()

    def measure(name: str) -> Row:
        work, tokens = started(name)
        return {"provider": name, "tokens_per_s": 1e3 * tokens / milliseconds(work, DEVICE)}

    yield from in_turns(list(named), options.rounds, measure)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """Tokens/s of each, and the engine's ratio to each, round by round: medians and ranges."""
    o = head["options"]
    rates = {name: by_round(x, "tokens_per_s") for name, x in grouped(rows, "provider").items()}
    lines = []
    for name, values in rates.items():
        ratios = [rates[OURS][i] / rate for i, rate in values.items() if i in rates.get(OURS, {})]
        ratio = median_and_range(ratios) if ratios and name != OURS else "–"
        lines.append([name, median_and_range(values.values(), ".0f"), ratio])
    work = f"{o['sequences']} sequences × {o['tokens']} tokens, {o['model']}, {o['dtype']}"
    return f"{work}, {machine_of(head)}\n" + table(("", "tokens/s", "of the torch engine"), lines)
