"""The torch engine beside transformers' `generate` and vLLM (where installed), in one run, interleaved.

  python -m bench.engine                                     tokens/s: median, range, and the engine's ratio
  .venv-vllm/bin/python -m bench.engine --out engine.json    with vLLM, after `make setup-vllm`

Each generates 64 new tokens for each of 32 sequences, on the same weights and prompts, at temperature 1.
"""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from bench import records
from bench.measure import interleaved
from trainer.config import Config
from trainer.engines.torch.engine import TorchEngine
from trainer.engines.vllm.engine import LocalVLLM
from trainer.engines.vllm.process import Sample
from trainer.models.resolve import resolve_model
from trainer.types import Request

SEQUENCES, PROMPT, NEW = 32, 16, 64
Work = Callable[[], int]  # generates; the number of tokens


def providers(folder: str, threads: int) -> dict[str, Work]:
    """Generators on the same weights and prompts, at temperature 1, without a stop at EOS."""
    torch.set_num_threads(threads)
    engine = TorchEngine(folder, torch.float32, True, slots=SEQUENCES)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = random_prompts() % reference.config.vocab_size
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


def random_prompts() -> NDArray[np.int64]:
    """(SEQUENCES, PROMPT) token ids."""
    return np.random.default_rng(0).integers(100, 40_000, (SEQUENCES, PROMPT))


def requests(prompts: NDArray[np.int64]) -> list[Request]:
    """One request for each row of token ids."""
    return [
        Request(f"r{i}", tuple(map(int, prompt)), 1, NEW, 1.0, frozenset(), i)
        for i, prompt in enumerate(prompts)
    ]


def vllm(folder: str, threads: int, stack: ExitStack) -> Work:
    """The same work by vLLM with the settings of a run; its processes end with the stack."""
    config = Config(run_dir=stack.enter_context(tempfile.TemporaryDirectory()))
    config = replace(config, engine=replace(config.engine, slots=SEQUENCES, max_new_tokens=NEW))
    runner = stack.enter_context(asyncio.Runner())

    async def start() -> LocalVLLM:
        engine = LocalVLLM(config, folder, threads, Path(config.run_dir) / "none")
        await engine.load(0)
        return engine

    began = time.perf_counter()
    engine = runner.run(start())
    print(f"vLLM started in {time.perf_counter() - began:.0f} s")
    stack.callback(lambda: runner.run(engine.close()))
    prompts = random_prompts()

    async def generate() -> int:
        done = await asyncio.gather(*(engine.sample(Sample(r, 0), 0) for r in requests(prompts)))
        return sum(len(c.token_ids) for c in done)

    return lambda: runner.run(generate())


def measure(work: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Tokens/s per round; the providers take turns, so that a slow moment of the machine affects all."""
    tokens = {name: run() for name, run in work.items()}  # this is the warm-up
    times, failed = interleaved(work, rounds, "cpu")
    for error in failed.values():
        raise error
    return {name: [1e3 * tokens[name] / ms for ms in times[name]] for name in work}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the record where asked."""
    tracked = "engine-cpu.json"
    parser = records.parser("engine", __doc__, tracked, rounds=5, threads=records.cores())
    parser.add_argument("--model", default="smollm2-135m", help="built-in name, folder or hub name")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = resolve_model(args.model)
        work = providers(folder, args.threads)
        if importlib.util.find_spec("vllm"):
            work["vLLM"] = vllm(folder, args.threads, stack)
        rates = measure(work, args.rounds)
    ours, *others = rates
    ratios = {name: [a / b for a, b in zip(rates[ours], rates[name], strict=True)] for name in others}
    isa = torch.backends.cpu.get_cpu_capability()
    result = {
        "machine": f"{platform.machine()}, {args.threads} threads, {isa}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_per_s": rates,
        "ratio": ratios,  # of the torch engine to each
    }
    lines = [f"{SEQUENCES} sequences x {NEW} tokens, fp32, {result['machine']}, torch {torch.__version__}"]
    for name, values in rates.items():
        ends = f"({min(values):.0f} to {max(values):.0f})"
        lines.append(f"{name:22} {statistics.median(values):7.0f} tok/s  {ends}")
    for name, values in ratios.items():
        ends = f"({min(values):.2f} to {max(values):.2f})"
        lines.append(f"torch engine / {name:20} {statistics.median(values):5.2f}  {ends}")
    return records.finish(args, tracked, result, "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
