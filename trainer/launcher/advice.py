"""Which devices to whom: advice before a run, from assumed rates, and after it, from measured idle shares.

After a run (`advise_run`): the l devices of the learner were busy for a share b_l of the time, the e of the
engines for b_e. On l' and e' devices the same work takes b_l·l/l' and b_e·e/e'. The part h of the shorter
one that was hidden behind the longer stays hidden, and the time in which neither worked stays:

    present step = 1 = max(b_l, b_e) + (1 − h) · min(b_l, b_e) + neither

Before a run (`plan`): every split is simulated (simulate.py) with rates that follow from the model's size and
`ASSUMED`, each constant with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.pipeline.simulate import Outcome, Rates, Scheme, Split, Workload, simulate
from trainer.config import Config

WORTH = 1.03  # a smaller gain is not worth another split
IDLE = 0.15  # an idle share worth a word


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, in words, and the numbers behind them."""

    text: str
    best: Split | None = None  # None: nothing to choose
    faster: float = 1.0  # steps per hour with it, over those at present


@dataclass(frozen=True, slots=True)
class Assumption:
    """A constant and where it comes from."""

    value: float
    unit: str
    source: str


ASSUMED = {
    "peak": Assumption(989e12, "FLOP/s", "NVIDIA H200 SXM datasheet: dense bf16"),
    "bandwidth": Assumption(4.8e12, "B/s", "NVIDIA H200 SXM datasheet: HBM3e"),
    "train_mfu": Assumption(
        0.30, "of peak", "ASSUMED; published for whole trainers: .15 (prime-rl, 4B, 16K, 8×H200) to .27"
    ),
    "decode_share": Assumption(
        0.6, "of bandwidth and of peak", "ASSUMED of a tuned engine with CUDA graphs: no bar of ours"
    ),
    "push_rate": Assumption(2e10, "B/s", "ASSUMED: bf16 weights by NCCL within a node, loading included"),
    "update_s": Assumption(1e-10, "s per parameter", "ASSUMED: gradient norm, AdamW, publishing, per step"),
    "mean_share": Assumption(0.42, "of the longest", "ASSUMED: mean completion, reasoning models"),
    "p95_share": Assumption(0.85, "of the longest", "ASSUMED: 95th percentile of completions"),
    "prompt_tokens": Assumption(200, "tokens", "ASSUMED: a question in a template"),
}


def advise_run(books: Mapping[str, Any], idle: Mapping[str, float], config: Config) -> Advice:
    """Advice at the end of a run: `ledger.to_json()`, `ledger.idle_shares()` and the run's config."""
    held = {role: books["roles"][role]["devices"] for role in idle}
    engines = {role: n for role, n in held.items() if role != "learner"}
    total = sum(engines.values())
    engine_idle = sum(idle[role] * n for role, n in engines.items()) / total
    if books["unit"] == "core-hours":
        return advise_shared(f"{books['devices_total']:g} cores", idle["learner"], engine_idle)
    if config.engine.colocate:
        return advise_shared(f"{books['devices_total']:g} GPUs", idle["learner"], engine_idle)
    split, width = Split(round(held["learner"]), round(total)), config.engine.tensor_parallel
    if config.engine.urls:
        shares = f"learner idle {idle['learner']:.0%}, engines idle {engine_idle:.0%}"
        side = "servers" if engine_idle < idle["learner"] else "learner ranks"
        return Advice(f"{shares}: the engines are on other machines; more {side} would help first")
    return advise(split, idle["learner"], engine_idle, width)


def advise(split: Split, learner_idle: float, engine_idle: float, width: int = 1) -> Advice:
    """The best split of the same devices, by measured idle shares; engines take `width` devices each."""
    devices = split.learner + split.engine
    candidates = [Split(devices - e, e) for e in range(width, devices, width)]
    step = {s: _step_time(split, s, 1 - learner_idle, 1 - engine_idle) for s in candidates}
    best = min(candidates, key=lambda s: (step[s], abs(s.engine - split.engine)))
    faster = 1 / step[best]
    text = f"learner idle {learner_idle:.0%}, engine idle {engine_idle:.0%}: "
    if faster < WORTH:
        text += f"{split} GPUs (engine + learner) is the best split of {devices}"
        if min(learner_idle, engine_idle) > IDLE:
            text += "; both sides wait: a higher pipeline.max_lag lets them overlap more"
        return Advice(text, split)
    moved = abs(best.engine - split.engine)
    giver, taker = ("learner", "engine") if best.engine > split.engine else ("engine", "learner")
    text += f"give {moved} GPU{'s' * (moved > 1)} of the {giver} to the {taker}: {split} -> {best} "
    return Advice(text + f"(engine + learner), about {faster:.2f}x steps per hour", best, faster)


def _step_time(now: Split, then: Split, learner_busy: float, engine_busy: float) -> float:
    """Of a step after the move, in steps of now."""
    together = learner_busy + engine_busy - 1
    least = min(learner_busy, engine_busy)
    hidden = max(0.0, together) / least if least > 0 else 1.0
    learner, engine = learner_busy * now.learner / then.learner, engine_busy * now.engine / then.engine
    return max(0.0, -together) + max(learner, engine) + (1 - hidden) * min(learner, engine)


def advise_shared(what: str, learner_idle: float, engine_idle: float) -> Advice:
    """Nothing can be split where both sides use the same devices in turns: what bounds the run instead."""
    text = f"learner and engine share the {what} in time, so there is no split to choose; "
    together = 1 - learner_idle - engine_idle  # share of time in which both work
    if min(learner_idle, engine_idle) > IDLE and together < IDLE:
        bound = "they take turns: a higher pipeline.max_lag would let one fill the other's pauses"
    elif min(learner_idle, engine_idle) > IDLE:
        bound = "both wait a part of the time: for verdicts, for batches being built, or for each other"
    elif abs(learner_idle - engine_idle) < IDLE:
        bound = "both are busy nearly all the time: the cores bound the run"
    elif engine_idle < learner_idle:
        bound = "generation bounds the run"
    else:
        bound = "the learner bounds the run"
    return Advice(f"{text}{bound} (learner idle {learner_idle:.0%}, engine idle {engine_idle:.0%})")


def plan(config: Config, parameters: int, layers: int, kv_width: int, split: Split) -> Advice:
    """Advice before a run: `split`, as config and machine give it, beside the best, at assumed rates.

    It is `Split(learner GPUs, engine GPUs)`, or on a CPU, where there is no choice, `Split(1, 1, cores)`.
    """
    if config.engine.urls:
        return Advice("the engines are on other machines, so there is no split to choose")
    if split.cores or config.engine.colocate:
        what = f"{split.cores} cores" if split.cores else "GPUs"
        return Advice(f"learner and engine share the {what} in time, so there is no split to choose")
    width, pipeline, slots = config.engine.tensor_parallel, config.pipeline, config.engine.slots
    longest = config.engine.longest_completion()
    work = assumed_workload(pipeline.prompts_per_step, pipeline.completions_per_prompt, longest)
    rates = assumed_rates(parameters, layers, kv_width, work.context, slots, width)
    scheme, devices = Scheme("pipeline", pipeline.max_lag), split.learner + split.engine

    @cache
    def outcome(engines: int) -> Outcome:
        return simulate(work, rates, Split(devices - engines * width, engines), scheme, steps=12)

    # Uphill from where both sides have as much to do as devices.
    most = (devices - 1) // width
    generate = rates.decode_step_s / slots + rates.decode_token_s  # seconds a token, of one engine
    engines = round(devices / width * generate / (generate + rates.train_token_s / width))
    engines = max(1, min(most, engines))
    while True:
        near = [n for n in (engines, engines - 1, engines + 1) if 1 <= n <= most]
        better = max(near, key=lambda n: outcome(n).steps_per_hour)
        if better == engines:
            break
        engines = better
    best = Split(devices - engines * width, engines * width)
    now = outcome(split.engine // width)
    faster = outcome(engines).steps_per_hour / now.steps_per_hour
    text = (
        f"at assumed rates, {split} GPUs (engine + learner) make {now.steps_per_hour:.3g} steps per hour, "
        f"learner idle {now.learner_idle:.0%}, engine idle {now.engine_idle:.0%}"
    )
    if faster < WORTH:
        return Advice(text + ": the best split", split)
    text += f"; {best} would be about {faster:.2f}x as fast (learner.ranks {best.learner})"
    return Advice(text, best, faster)


def assumed_workload(prompts: int, completions: int, longest: int) -> Workload:
    """A step's work with completions as ASSUMED."""
    mean, p95 = (max(1.0, ASSUMED[name].value * longest) for name in ("mean_share", "p95_share"))
    lengths = lognormal_lengths(mean, p95, longest, completions)
    return Workload(prompts=prompts, prompt_tokens=ASSUMED["prompt_tokens"].value, lengths=lengths)


def assumed_rates(
    parameters: float, layers: int, kv_width: int, context: float, slots: int, width: int = 1
) -> Rates:
    """Of one GPU of the learner, and of one engine of `width` GPUs, in bf16.

    A decoding step reads all weights once and the keys and values of `context` tokens per sequence. FLOPs are
    2 per parameter and token forward, 6 with backward.
    """
    a = {name: assumption.value for name, assumption in ASSUMED.items()}
    reads, computes = a["decode_share"] * a["bandwidth"] * width, a["decode_share"] * a["peak"] * width
    cache = 2 * layers * kv_width * 2 * context  # bytes: keys and values
    return Rates(
        decode_step_s=2 * parameters / reads,
        decode_token_s=cache / reads + 2 * parameters / computes,
        slots=slots,
        train_token_s=6 * parameters / (a["train_mfu"] * a["peak"]),
        prefill_token_s=2 * parameters / computes,
        push_s=2 * parameters / a["push_rate"],
        step_s=parameters * a["update_s"],
    )


def lognormal_lengths(
    mean: float, p95: float, longest: int, completions: int, rows: int = 4096, seed: int = 0
) -> NDArray[np.int64]:
    """(rows, completions) lengths of a log-normal with this mean and 95th percentile, cut at `longest`."""
    z = 1.6449  # of the normal's 95th percentile
    # ln(p95/mean) = z·σ − σ²/2, whose smaller root is meant
    root = z * z - 2 * np.log(p95 / mean)
    if not (1 <= mean <= p95 and root >= 0):
        raise ValueError(
            f"no log-normal has mean {mean:g} and 95th percentile {p95:g}: expected a percentile of 1 to "
            f"{np.exp(z * z / 2):.2f} times the mean, and a mean of 1 or more"
        )
    sigma = z - float(np.sqrt(root))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, (rows, completions))
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)
