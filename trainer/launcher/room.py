"""Chooses what is not set so that the run fits its GPUs, and says what would fit where nothing does.

Without a setting a micro-batch has 16,384 tokens, activations are kept, and the torch engine generates 64
sequences at once. Where that does not fit, micro-batches get smaller, down to 4,096 tokens, which costs
little; then activations are recomputed; then a torch engine gets fewer slots.
If even that does not fit, the learner gets more ranks.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from itertools import chain

from trainer.config import Config, ConfigError, LoraConfig, default_token_budget
from trainer.launcher.memory_estimate import (
    GIB,
    SPARE,
    ModelSize,
    estimate,
    gpu_problem,
    rank_bytes,
    with_slots,
)
from trainer.launcher.placement import Devices, assign, with_engine

# Are activations recomputed, and tokens of a micro-batch; the fastest first.
LEARNERS = [
    *((False, tokens) for tokens in (16_384, 8192, 4096)),
    *((True, tokens) for tokens in (16_384, 8192, 4096, 2048, 1024)),
]
TORCH_SLOTS = (64, 32, 16, 8)
CARDS = {"24 GB": 24_564, "48 GB": 49_140, "80 GB": 81_559, "141 GB": 143_771}  # MiB, by nvidia-smi
VLLM = "vLLM, which takes turns with the learner (pip install '.[vllm]')"
MOST_GPUS = 8  # of one machine


def fitted(
    config: Config, size: ModelSize, gpu: float | None, fixed: Set[str], devices_of: Callable[[int], Devices]
) -> tuple[Config, Devices]:
    """The config with what `fixed` does not name chosen by the GPUs' memory, and the split of the GPUs.

    That has the fewest learner ranks, from the usual share on, with which anything fits. `devices_of` assigns
    the GPUs for a number of ranks, 0 for the usual share; ConfigError: too many. The usual share where the
    ranks are not to be chosen, or where nothing fits: `plan` refuses.
    """
    usual = devices = devices_of(0)
    if gpu is None or not usual.gpus:
        return config, usual
    least = chosen = _chosen(config, size, usual, gpu, fixed)
    settled = config.learner.ranks or usual.world or usual.remote or config.engine.colocate
    needed = rank_bytes(least, size, usual) / GIB
    why = f"of {len(usual.learner)}, each would need {needed:.1f} GiB; a GPU has {gpu / GIB:.1f}, and "
    why += f"{SPARE:.0%} stay free"
    while not settled and gpu_problem(chosen, size, devices, gpu):
        try:
            devices = replace(devices_of(len(devices.learner) + 1), why=why)
        except ConfigError:
            return least, usual
        chosen = _chosen(config, size, devices, gpu, fixed)
    return chosen, devices


def fits(config: Config, size: ModelSize, devices: Devices, gpu: float | None, fixed: Set[str]) -> bool:
    """True if these devices hold the config, once what `fixed` does not name is chosen."""
    return gpu is None or not gpu_problem(_chosen(config, size, devices, gpu, fixed), size, devices, gpu)


def _chosen(config: Config, size: ModelSize, devices: Devices, gpu: float, fixed: Set[str]) -> Config:
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
    config: Config, size: ModelSize, devices: Devices, gpu: float | None, asked: Config, fixed: Set[str]
) -> str:
    """The plan for the GPUs in one line, empty where their memory is not known. `asked`: before it was made.

    ConfigError for what does not fit them, with what would fit instead."""
    if gpu is None or not devices.gpus:
        return ""
    if problem := gpu_problem(config, size, devices, gpu):
        instead = " · ".join(_alternatives(asked, size, devices, gpu, fixed))
        name = f"model.path {config.model.path}: {size.parameters / 1e9:.3g} G parameters"
        raise ConfigError(f"{name}, {problem}{f'. Would fit: {instead}' if instead else ''}")
    return _described(config, size, devices, gpu)


def _alternatives(
    config: Config, size: ModelSize, devices: Devices, gpu: float, fixed: Set[str]
) -> Iterator[str]:
    """Changes of the config as it is set, with each of which the run would fit."""
    engine = config.engine

    def would_fit(c: Config, on: Devices = devices, memory: float = gpu) -> bool:
        return fits(c, size, on, memory, fixed)

    def fits_on(count: int) -> bool:
        kind = engine.kind if "engine.kind" in fixed else "auto"
        turns = engine.colocate and "engine.colocate" in fixed
        c = with_engine(replace(config, engine=replace(engine, colocate=turns, kind=kind)), count)
        gpus = tuple(map(str, range(count)))

        def devices_of(ranks: int) -> Devices:
            asked = replace(c, learner=replace(c.learner, ranks=ranks or c.learner.ranks))
            return assign(asked, gpus, os.cpu_count() or 1)

        try:
            chosen, on = fitted(c, size, gpu, fixed, devices_of)
        except ConfigError:
            return False
        return not gpu_problem(chosen, size, on, gpu)

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
        if would_fit(config, replace(devices, engines=((),))):
            yield "--engine.tensor_parallel 0: the engine on the CPU"
    larger = (n for n, mib in CARDS.items() if mib * 2**20 > gpu and would_fit(config, memory=mib * 2.0**20))
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
        where = f"{who} and the learner take turns on the GPU; "
    elif devices.shared:
        where = f"{who} generates beside the learner on the GPU{missing}; "
    else:
        place = f"GPUs of its own{missing}" if any(devices.engines) else "the CPU"
        where = f"{who} generates on {place}; "
    tokens = learner.micro_batch_tokens or default_token_budget(True)
    memory = estimate(config, size, devices)
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
