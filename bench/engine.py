"""The torch engine beside vLLM (where installed) and transformers' `generate`: 32 sequences of 64 new tokens,
in one run, interleaved.

python -m bench.engine            a table: median, spread and ratio of tokens/s
pytest bench --benchmark-only           torch engine and transformers as a pytest-benchmark suite
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from trainer.config import Config
from trainer.engines.torch.engine import TorchEngine
from trainer.engines.vllm.engine import VLLM
from trainer.models.resolve import resolve_model
from trainer.types import Request

SEQUENCES, PROMPT, NEW = 32, 16, 64
Work = Callable[[], int]  # generates, returns how many tokens


def providers(model: str, threads: int) -> dict[str, Work]:
    """Generators on the same weights and prompts, sampling at T = 1, EOS ignored."""
    torch.set_num_threads(threads)
    folder = resolve_model(model)
    prompts = np.random.default_rng(0).integers(100, 40_000, (SEQUENCES, PROMPT))
    engine = TorchEngine(folder, torch.float32, True, slots=SEQUENCES)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)

    def ours() -> int:
        before = engine.generated
        for request in requests(prompts):
            engine.submit(request)
        while not engine.idle:
            engine.step()
        return engine.generated - before

    def generate() -> int:
        with torch.inference_mode():
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip
        return SEQUENCES * (out.shape[1] - PROMPT)

    return {"torch engine": ours, "transformers generate": generate}


def requests(prompts: Any) -> list[Request]:
    """One for each prompt (a row of ids)."""
    return [
        Request(f"r{i}", tuple(map(int, prompt)), 1, NEW, 1.0, frozenset(), i)
        for i, prompt in enumerate(prompts)
    ]


def vllm(model: str, threads: int, stack: ExitStack) -> Work:
    """The same work by vLLM with the settings of a run; its processes end with the stack."""
    config = Config(run_dir=stack.enter_context(tempfile.TemporaryDirectory()))
    config = replace(config, engine=replace(config.engine, slots=SEQUENCES, max_new_tokens=NEW))
    runner = stack.enter_context(asyncio.Runner())

    async def start() -> VLLM:
        engine = VLLM(config, resolve_model(model), threads, Path(config.run_dir) / "none")
        await engine.label(0)
        return engine

    began = time.perf_counter()
    engine = runner.run(start())
    print(f"vLLM started in {time.perf_counter() - began:.0f} s")
    stack.callback(lambda: runner.run(engine.close()))
    prompts = np.random.default_rng(0).integers(100, 40_000, (SEQUENCES, PROMPT))

    async def generate() -> int:
        done = await asyncio.gather(*(engine.sample(r, 0, 0) for r in requests(prompts)))
        return sum(len(c.token_ids) for c in done)

    return lambda: runner.run(generate())


def measure(work: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Tokens/s per round; the providers take turns, so that a slow moment of the machine hits all."""
    rates: dict[str, list[float]] = {name: [] for name in work}
    for name in work:
        work[name]()  # warm up
    for _ in range(rounds):
        for name, run in work.items():
            start = time.perf_counter()
            tokens = run()
            rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="built-in name, folder or hub name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        work = providers(args.model, args.threads)
        if importlib.util.find_spec("vllm"):
            work["vLLM"] = vllm(args.model, args.threads, stack)
        rates = measure(work, args.rounds)
    ours, *others = rates
    ratios = {
        name: [a / b for a, b in zip(rates[ours], rates[name], strict=True)] for name in others
    }  # of the torch engine to each
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {args.threads} threads, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_per_s": rates,
        "ratio": ratios,
    }
    print(f"{SEQUENCES} sequences x {NEW} tokens, fp32, {result['machine']}, torch {torch.__version__}")
    for name, values in rates.items():
        print(f"{name:22} {statistics.median(values):7.0f} tok/s  ({min(values):.0f} to {max(values):.0f})")
    for name, values in ratios.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"torch engine / {name:20} {statistics.median(values):5.2f}  ({spread})")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def test_torch_engine(benchmark: Any) -> None:
    """Continuous batching over slots."""
    benchmark.pedantic(providers("smollm2-135m", 2)["torch engine"], rounds=3, warmup_rounds=1)


def test_transformers_generate(benchmark: Any) -> None:
    """The same work by transformers."""
    benchmark.pedantic(providers("smollm2-135m", 2)["transformers generate"], rounds=3, warmup_rounds=1)


if __name__ == "__main__":
    main()
