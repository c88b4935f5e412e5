"""Chooses what is not set so that the run fits its GPUs, and says what would fit where nothing does.

Without a setting a micro-batch has 16,384 tokens, activations are kept, and the torch engine generates 64
sequences at once. Where that does not fit, micro-batches get smaller, down to 4,096 tokens, which costs
little; then activations are recomputed; then a torch engine gets fewer slots.
Of the splits of several GPUs that fit, that with the shortest step by `advice` is taken; where none fits,
learner and vLLM take turns on all of them.
"""

import importlib.util
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count

from trainer.config import Config, ConfigError, LoraConfig, default_token_budget
from trainer.launcher.advice import step_on
from trainer.launcher.memory_estimate import GIB, ModelSize, estimate, gpu_problem, with_slots
from trainer.launcher.placement import Devices, with_engine

# Are activations recomputed, and tokens of a micro-batch; the fastest first.
LEARNERS = [
    *((False, tokens) for tokens in (16_384, 8192, 4096)),
    *((True, tokens) for tokens in (16_384, 8192, 4096, 2048, 1024)),
]
TORCH_SLOTS = (64, 32, 16, 8)
CARDS = {"24 GB": 24_564, "48 GB": 49_140, "80 GB": 81_559, "141 GB": 143_771}  # MiB, by nvidia-smi
VLLM = "vLLM, which takes turns with the learner (pip install '.[vllm]')"
MOST_GPUS = 8  # of one machine
SHORTER = (16_384, 8192, 4096, 2048, 1024)  # completions to propose
DevicesOf = Callable[..., Devices]  # (config, count=0): of `count` GPUs, by default this machine's


def fitted(
    config: Config, size: ModelSize, gpu: float | None, fixed: Set[str], devices_of: DevicesOf,
    before: int = 0,
) -> tuple[Config, Devices]:  # fmt: skip
    """The config with what `fixed` does not name chosen by the GPUs' memory, and the split of the GPUs.

    That is the one with the shortest step, by `advice`, of those with which anything fits; where no rates are
    known, or engine.count is set, the one with the fewest ranks from the usual share on. One with `before`
    ranks, as a run that goes on had them, comes first. Where none fits, learner and vLLM take turns on all
    GPUs. What is set stays. `devices_of` assigns the GPUs; ConfigError: too few. The usual share where even
    that does not fit, or the memory is not known: `plan` refuses.
    """
    usual, engine = devices_of(config), config.engine
    if gpu is None or not usual.gpus:
        return config, usual
    least = _chosen(config, size, usual, gpu, fixed)
    if config.learner.ranks or usual.world or usual.remote or engine.colocate:
        return least, usual
    timed = engine.kind == "vllm" and not engine.count
    if splits := fitting(config, size, gpu, fixed, devices_of, 1 if timed else len(usual.learner)):
        splits = [pair for pair in splits if len(pair[1].learner) == before] or splits
        chosen, best = min(splits, key=lambda x: step_on(x[0], size, x[1].split()).step if timed else 0)
        why = "the fastest split that fits, at assumed rates" if timed else "with fewer it does not fit"
        why = why if len(best.learner) != len(usual.learner) else ""
        return chosen, replace(best, why="as before" if len(best.learner) == before else why)
    if timed and "engine.colocate" not in fixed:
        turns = replace(config, engine=replace(engine, colocate=True))
        with suppress(ConfigError):
            devices = replace(devices_of(turns), why="they take turns with the engines, as no split fits")
            chosen = _chosen(turns, size, devices, gpu, fixed)
            if not gpu_problem(chosen, size, devices, gpu):
                return chosen, devices
    return least, usual


def with_ranks(config: Config, ranks: int) -> Config:
    """The config with that many learner ranks."""
    return replace(config, learner=replace(config.learner, ranks=ranks))


def fitting(
    config: Config, size: ModelSize, gpu: float | None, fixed: Set[str], devices_of: DevicesOf, least: int = 1
) -> list[tuple[Config, Devices]]:
    """The splits of the GPUs with `least` learner ranks or more that fit, and the config for each."""
    splits = []
    with suppress(ConfigError):  # an engine has too few GPUs
        for ranks in count(least):
            devices = devices_of(with_ranks(config, ranks))
            chosen = _chosen(config, size, devices, gpu, fixed)
            if not gpu_problem(chosen, size, devices, gpu):
                splits.append((chosen, devices))
    return splits


def _chosen(config: Config, size: ModelSize, devices: Devices, gpu: float | None, fixed: Set[str]) -> Config:
    """The fastest config that fits these devices; the one that needs least if nothing does."""
    if "engine.slots" not in fixed:
        config = with_slots(config, size, devices, gpu)
    choices = list(_choices(config, devices, fixed))
    return next((c for c in choices if not gpu_problem(c, size, devices, gpu)), choices[-1])


def _choices(config: Config, devices: Devices, fixed: Set[str]) -> Iterator[Config]:
    """The configs that differ in what is not fixed, the fastest first. What an earlier start of this run has
    chosen is chosen again: it may go on on another machine."""
    learner, tokens = config.learner, config.learner.micro_batch_tokens
    tokens_set = "learner.micro_batch_tokens" in fixed
    steps = [(False, tokens), (True, tokens)] if tokens_set else LEARNERS
    if "learner.checkpoint_activations" in fixed:
        steps = [step for step in steps if step[0] == learner.checkpoint_activations]
    slots_vary = config.engine.kind != "vllm" and any(devices.engines) and "engine.slots" not in fixed
    for slots in TORCH_SLOTS if slots_vary else (config.engine.slots,):
        for recomputed, budget in steps:
            chosen = replace(learner, checkpoint_activations=recomputed, micro_batch_tokens=budget)
            yield replace(config, learner=chosen, engine=replace(config.engine, slots=slots))


def plan(
    config: Config, size: ModelSize, devices: Devices, gpu: float | None, asked: Config, fixed: Set[str],
    devices_of: DevicesOf,
) -> str:  # fmt: skip
    """The plan for the GPUs in one line, empty where their memory is not known. `asked`: before it was made.

    ConfigError for what does not fit them, with what would fit instead."""
    if gpu is None or not devices.gpus:
        return ""
    if problem := gpu_problem(config, size, devices, gpu):
        instead = " · ".join(_alternatives(asked, size, devices, gpu, fixed, devices_of))
        name = f"model.path {config.model.path}: {size.parameters / 1e9:.3g} G parameters"
        raise ConfigError(f"{name}, {problem}{f'. Would fit: {instead}' if instead else ''}")
    return _described(config, size, devices, gpu)


def _alternatives(
    config: Config, size: ModelSize, devices: Devices, gpu: float, fixed: Set[str], devices_of: DevicesOf
) -> Iterator[str]:
    """Changes of the config as it is set, with each of which the run would fit."""
    engine = config.engine

    def would_fit(c: Config, memory: float = gpu, count: int = 0) -> bool:
        try:
            chosen, on = fitted(c, size, memory, fixed, partial(devices_of, count=count))
        except ConfigError:
            return False
        return not gpu_problem(chosen, size, on, memory)

    def fits_on(count: int) -> bool:
        kind = engine.kind if "engine.kind" in fixed else "auto"
        turns = engine.colocate and "engine.colocate" in fixed
        asked = replace(config, engine=replace(engine, colocate=turns, kind=kind))
        return would_fit(with_engine(asked, count), count=count)

    adapted = replace(config, model=replace(config.model, lora=LoraConfig(rank=16)))
    lora_fits = not config.model.lora.rank and would_fit(adapted)
    if lora_fits:
        yield "--model.lora.rank 16"
    if devices.shared and engine.kind == "torch":
        turns = replace(engine, kind="vllm", colocate=True)
        if would_fit(replace(config, engine=turns)):
            yield VLLM
        elif not lora_fits and would_fit(replace(adapted, engine=turns)):
            yield f"--model.lora.rank 16 and {VLLM}"
        if would_fit(replace(config, engine=replace(engine, tensor_parallel=0))):
            yield "--engine.tensor_parallel 0: the engine on the CPU"
    off = replace(engine.interruption, enabled=False)
    for tokens in (n for n in SHORTER if n < engine.longest_completion()):
        if would_fit(replace(config, engine=replace(engine, max_new_tokens=tokens, interruption=off))):
            flag = "--engine.interruption.enabled false " * engine.interruption.enabled
            yield f"{flag}--engine.max_new_tokens {tokens}"
            break
    larger = (n for n, mib in CARDS.items() if mib * 2**20 > gpu and would_fit(config, mib * 2.0**20))
    used = len({*chain(*devices.learner), *chain(*devices.engines)})
    most = 0 if devices.world else MOST_GPUS  # torchrun says how many
    more = (f"{n} such GPUs" for n in range(used + 1, most + 1) if fits_on(n))
    yield from filter(None, (next((f"a GPU of {n}" for n in larger), ""), next(more, "")))


def _described(config: Config, size: ModelSize, devices: Devices, gpu: float) -> str:
    """The plan: who generates, in which portions is learned, how much it takes."""
    engine, learner = config.engine, config.learner
    who = "vLLM" if engine.kind == "vllm" else "the torch engine"
    missing = " (vLLM is not installed)" * (who != "vLLM" and importlib.util.find_spec("vllm") is None)
    if not devices.engines:  # a replay has none at all
        where = "vLLM servers generate; " * bool(devices.remote)
    elif engine.colocate:
        where = f"{who} and the learner take turns on the GPU{'s' * (len(devices.engines) > 1)}; "
    elif devices.shared:
        where = f"{who} generates beside the learner on the GPU{missing}; "
    else:
        place = f"GPUs of its own{missing}" if any(devices.engines) else "the CPU"
        where = f"{who} generates on {place}; "
    tokens = learner.micro_batch_tokens or default_token_budget(True)
    memory = estimate(config, size, devices, gpu)
    rank, beside = sum(memory.rank.values()), sum(memory.engine.values())
    takes = f"a learner rank takes {rank / GIB:.1f}"
    if devices.shared and not engine.colocate:
        takes += f" and the engine {beside / GIB:.1f}"
    takes += f" of {gpu / GIB:.1f} GiB"
    if engine.kind == "vllm" and any(devices.engines):
        takes += f", {'then ' * engine.colocate}vLLM {engine.memory * gpu / GIB:.1f}"
    at_once = f", {engine.slots} sequences at once" * bool(devices.engines)
    return (
        f"plan: {where}micro-batches of {tokens:,} tokens, activations "
        f"{'recomputed' if learner.checkpoint_activations else 'kept'}{at_once}; {takes}"
    )
