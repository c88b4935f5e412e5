"""Advice, before a run and after it, on the split of the devices between learner and engines.

After a run (`advise_run`) the advice follows from measured idle shares. The l learner devices were busy for
a share b_l of the time and the e engine devices for b_e, so l' and e' devices take b_l·l/l' and b_e·e/e' for
the same work. The share h of the shorter one that overlapped with the longer stays hidden, and the time in
which neither side worked stays as it was:

    step time, in present steps = max(b_l, b_e) + (1 − h) · min(b_l, b_e) + time in which neither works

Before a run (`plan`) it follows from the model's size and the rates of `ASSUMED`. For a step of T tokens
whose longest completion has L of them, on e engines of n slots and l learner devices, with lag k:

    generate = a·T/(n·e) + b·T/e + prefill         a, b: decode_step_s, decode_token_s
    train    = c·T/l                               c: train_token_s; 4/3 of it with recomputed activations
    step     = max(generate, train, a·max(L, T/(n·e))/(k + 1) + b·T/e + prefill + train/(k + 1))

The last term is the time of one batch, while k + 1 are under way: its longest completion, then its training.
PPO-off-policy-k takes turns, with k batches under way and E epochs: step = generate/E + train, where the
longest completion counts once in k batches.
Weight pushes and the optimizer are left out: they are short, and the split does not change them.
tests/bench/pipeline compares this with the runs of `python -m bench pipeline`: the split it names is at most
5 % slower than the best simulated one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.accounting.kernel_cost import Constant
from trainer.config import Config
from trainer.launcher.memory_estimate import ModelSize
from trainer.launcher.placement import Split

MIN_SPEEDUP = 1.03  # another split must gain this factor to be advised
NOTABLE_IDLE = 0.15  # share of the time; less is not mentioned
OVERLAP = "a higher pipeline.max_lag, with scheme pipeline_rl,"
NO_SPLIT = "learner and engine share the {} in time, so there is no split to choose"


class Advice(NamedTuple):
    """A recommendation as a sentence, and the numbers behind it."""

    text: str
    best: Split | None = None  # None: there is no choice
    speedup: float = 1.0  # steps per hour with it, over those at present


@dataclass(frozen=True, slots=True)
class AssumedRates:
    """Seconds of work of one engine and of one learner GPU, at the rates of ASSUMED."""

    decode_step_s: float  # one token of every running sequence, whatever their number
    decode_token_s: float  # more for each of them
    prefill_token_s: float
    train_token_s: float


ASSUMED = {
    "peak": Constant(989e12, "FLOP/s", "NVIDIA H200 SXM datasheet: dense bf16"),
    "bandwidth": Constant(4.8e12, "B/s", "NVIDIA H200 SXM datasheet: HBM3e"),
    "train_mfu": Constant(0.3, "of peak", "ASSUMED; whole trainers: .15 (prime-rl, 4B, 16K, 8×H200) to .27"),
    "decode_share": Constant(0.6, "of bandwidth and of peak", "ASSUMED of a tuned engine with CUDA graphs"),
    "mean_share": Constant(0.42, "of the longest", "ASSUMED: mean completion, reasoning models"),
    "context_share": Constant(0.27, "of the longest", "ASSUMED: mean context, log-normal lengths"),
    "prompt_tokens": Constant(200, "tokens", "ASSUMED: a question in a template"),
}


def advise_run(books: Mapping[str, Any], idle: Mapping[str, float], config: Config) -> Advice:
    """Advice at the end of a run: `ledger.to_json()`, `ledger.idle_shares()` and the run's config."""
    engines = {role: books["roles"][role]["devices"] for role in idle if role != "learner"}
    total, learner_idle, cores = sum(engines.values()), idle["learner"], books["unit"] == "core-hours"
    if not engines:
        return Advice(f"learner idle {learner_idle:.0%}; there is no engine")
    weights = engines if total else dict.fromkeys(engines, 1.0)
    engine_idle = sum(idle[role] * n for role, n in weights.items()) / sum(weights.values())
    if cores or config.engine.colocate or 0 < total < 1:  # the last: side by side on one GPU
        return advise_shared("cores" if cores else "GPUs", learner_idle, engine_idle)
    if config.engine.urls or not total:
        more = "engines" if engine_idle < learner_idle else "learner ranks"
        shares = f"learner idle {learner_idle:.0%}, engines idle {engine_idle:.0%}"
        place = "the engines are on other machines or on the CPU"
        return Advice(f"{shares}: {place}; more {more} would help first")
    split = Split(round(books["roles"]["learner"]["devices"]), round(total))
    return advise(split, learner_idle, engine_idle, config.engine.tensor_parallel)


def advise(split: Split, learner_idle: float, engine_idle: float, width: int = 1) -> Advice:
    """The best split of the same devices, by measured idle shares; engines take `width` devices each."""
    total = split.learner + split.engine
    splits = (Split(total - engine, engine) for engine in range(width, total, width))
    busy = 1 - learner_idle, 1 - engine_idle
    best, speedup, _ = _best(split, splits, lambda new: _step_time(split, new, *busy))
    text = f"learner idle {learner_idle:.0%}, engine idle {engine_idle:.0%}: "
    if speedup < MIN_SPEEDUP:
        text += f"{split} GPUs (engine + learner) is the best split"
        if min(learner_idle, engine_idle) > NOTABLE_IDLE:
            text += f"; both sides wait: {OVERLAP} would let them overlap more"
        return Advice(text, split)
    text += f"of {split} GPUs (engine + learner) make {best}: about {speedup:.2f}x steps per hour"
    return Advice(text, best, speedup)


def _best(
    split: Split, others: Iterable[Split], seconds: Callable[[Split], float]
) -> tuple[Split, float, Split | None]:
    """The split with the shortest step, how many times as fast as `split` it is, and the best but `split`."""
    ranked = sorted({split, *others}, key=lambda new: (seconds(new), abs(new.engine - split.engine)))
    second = next((new for new in ranked if new != split), None)
    return ranked[0], seconds(split) / seconds(ranked[0]), second


def _step_time(present: Split, new: Split, learner_busy: float, engine_busy: float) -> float:
    """The step time on the new split, in steps of the present one."""
    together = learner_busy + engine_busy - 1
    least = min(learner_busy, engine_busy)
    hidden = max(0.0, together) / least if least > 0 else 1.0
    learner, engine = learner_busy * present.learner / new.learner, engine_busy * present.engine / new.engine
    return max(0.0, -together) + max(learner, engine) + (1 - hidden) * min(learner, engine)


def advise_shared(devices: str, learner_idle: float, engine_idle: float) -> Advice:
    """Name what bounds a run whose learner and engines share their devices: nothing can be split."""
    both_busy = 1 - learner_idle - engine_idle  # share of the time
    if min(learner_idle, engine_idle) > NOTABLE_IDLE and both_busy < NOTABLE_IDLE:
        bound = f"they take turns: {OVERLAP} would let one work while the other waits"
    elif min(learner_idle, engine_idle) > NOTABLE_IDLE:
        bound = "both wait part of the time: for verdicts, for batches being built, or for each other"
    elif abs(learner_idle - engine_idle) < NOTABLE_IDLE:
        bound = f"both are busy nearly all the time: the {devices} bound the run"
    else:
        bound = f"{'generation' if engine_idle < learner_idle else 'the learner'} bounds the run"
    idle = f"(learner idle {learner_idle:.0%}, engine idle {engine_idle:.0%})"
    return Advice(f"{NO_SPLIT.format(devices)}; {bound} {idle}")


def plan(
    config: Config, size: ModelSize, split: Split, others: Iterable[tuple[Split, Config]] = ()
) -> Advice:
    """Advice before a run: `split`, as config and machine give it, compared with others, each with its
    config, at assumed rates.

    It is `Split(learner GPUs, engine GPUs)`, or on a CPU, where there is no choice, `Split(1, 1, cores)`.
    """
    if config.engine.urls:
        return Advice("the engines are on other machines, so there is no split to choose")
    if split.cores or config.engine.colocate:
        return Advice(NO_SPLIT.format("cores" if split.cores else "GPUs"))
    if config.engine.kind == "torch":
        return Advice(
            "no rates of the torch engine on GPUs are known: the learner has its usual share, or what its "
            "memory needs"
        )
    steps = {new: step_on(c, size, new) for new, c in (*others, (split, config))}
    best, speedup, second = _best(split, steps, lambda new: steps[new].step)
    now = steps[split]
    text = (
        f"at assumed rates, {split} GPUs (engine + learner) make {3600 / now.step:.3g} steps per hour, "
        f"learner idle {1 - now.train / now.step:.0%}, engine idle {1 - now.generate / now.step:.0%}"
    )
    if speedup < MIN_SPEEDUP:
        text += ": the best split" + " that fits" * bool(second)
        if second:
            text += ", so it is taken" * (not config.learner.ranks and not config.engine.count)
            text += f"; the next, {second}, would make {3600 / steps[second].step:.3g}"
        return Advice(text, split)
    text += f"; {best} would be about {speedup:.2f}x as fast (learner.ranks {best.learner})"
    return Advice(text, best, speedup)


class StepTime(NamedTuple):
    """Seconds of one optimizer step, and of each side's work in it."""

    generate: float
    train: float
    step: float


def step_on(config: Config, size: ModelSize, split: Split) -> StepTime:
    """The step time of a model of this size on a split of GPUs, at assumed rates."""
    engine = config.engine
    context = ASSUMED["prompt_tokens"].value + ASSUMED["context_share"].value * engine.longest_completion()
    rates = assumed_rates(size.parameters, size.layers, size.kv_width, context, engine.tensor_parallel)
    return assumed_step(config, rates, split)


def assumed_step(config: Config, rates: AssumedRates, split: Split) -> StepTime:
    """The step time on a split of GPUs: the closed form at the head of this module."""
    pipeline, engines = config.pipeline, split.engine / config.engine.tensor_parallel
    longest, turns = config.engine.longest_completion(), pipeline.batches_open
    completions = pipeline.prompts_per_step * pipeline.completions_per_prompt
    generated = completions * max(1.0, ASSUMED["mean_share"].value * longest)
    prompts = pipeline.prompts_per_step * ASSUMED["prompt_tokens"].value
    forward = 4 / 3 if config.learner.checkpoint_activations else 1  # once more: 2 of 6 FLOPs
    train = forward * (generated + prompts) * rates.train_token_s / split.learner
    full = generated / (config.engine.slots * engines)  # decoding steps of a batch, if all slots are in use
    rest = (generated * rates.decode_token_s + prompts * rates.prefill_token_s) / engines
    generate = full * rates.decode_step_s + rest
    if pipeline.off_policy:
        generate = (max(full, longest / turns) * rates.decode_step_s + rest) / pipeline.epochs
        return StepTime(generate, train, generate + train)
    alone = max(full, longest) * rates.decode_step_s / turns + rest
    return StepTime(generate, train, max(generate, train, alone + train / turns))


def assumed_rates(
    parameters: float, layers: int, kv_width: int, context: float, width: int = 1
) -> AssumedRates:
    """The rates of a learner GPU and of an engine of `width` GPUs, in bf16.

    A decoding step reads all weights once and the keys and values of `context` tokens per sequence. FLOPs are
    2 per parameter and token forward, 6 with backward.
    """
    a = {name: constant.value for name, constant in ASSUMED.items()}
    reads, computes = a["decode_share"] * a["bandwidth"] * width, a["decode_share"] * a["peak"] * width
    cache = 2 * layers * kv_width * 2 * context  # bytes: keys and values
    return AssumedRates(
        decode_step_s=2 * parameters / reads,
        decode_token_s=cache / reads + 2 * parameters / computes,
        prefill_token_s=2 * parameters / computes,
        train_token_s=6 * parameters / (a["train_mfu"] * a["peak"]),
    )
