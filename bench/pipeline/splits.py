"""Steps per hour, idle shares and token lag of every split of the GPUs, in virtual time. [3 min]

  python -m bench pipeline                                  an 8-GPU node: every split, both schemes; minutes
  python -m bench pipeline --devices 16 --k 1,8
  python -m bench pipeline --engine-rate 1:150,32:3200,128:4900 --train-tokens-per-s 9000
                                                            rates that you measured, of one GPU each
  python -m bench pipeline --record                         over bench/results/pipeline.jsonl

The trainer's own controller runs in virtual time (virtual_run.py). The lengths of completions are log-normal
by --mean and --p95. Without --engine-rate, a decoding step reads the weights once and each sequence's KV
cache; without --train-tokens-per-s, the learner runs at an assumed MFU. Every constant is printed with its
source. Evaluation is left out.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bench.harness import Case, Row
from bench.pipeline.timed import Rates, Workload
from bench.pipeline.virtual_run import STEPS, Scheme, lognormal_lengths, run
from bench.sources import with_sources
from bench.table import table
from trainer.accounting.kernel_cost import MODELS, Constant
from trainer.config import ConfigError
from trainer.launcher.advice import ASSUMED, assumed_rates
from trainer.launcher.placement import Split

UNIT = 100  # tokens that count as one, where completions are thousands of tokens long
CONSTANTS = {
    "prompts": Constant(48, "prompts per step", "arXiv 2510.13786: 48 × 16"),
    "completions": Constant(16, "completions per prompt", "arXiv 2510.13786: 48 × 16"),
    "mean": Constant(6000, "tokens per completion", "ASSUMED: .42 of the longest"),
    "p95": Constant(12000, "tokens, 95th percentile", "ASSUMED: .85 of the longest"),
    "longest": Constant(14336, "tokens", "arXiv 2510.13786: 12,288 thinking + 2,048 answer"),
    "slots": Constant(96, "sequences per GPU", "ASSUMED: 8B in bf16 leaves an H200 KV for about 200 of 4K"),
}
PUSH = Constant(0.8, "s of the engine", "ASSUMED: 16 GB at 20 GB/s, loading included")
STEP = Constant(0.8, "s of the learner", "ASSUMED: gradient norm, AdamW, publishing of 8B parameters")
OPTIONS: dict[str, Any] = {
    "devices": (8, "GPUs"),
    "k": ("0,1,4,8", "lags of PipelineRL-k and PPO-off-policy-k, whose k = 1 is PipelineRL-0"),
    "model": ("8b", "whose size gives rates that are not given", MODELS),
    "engine_rate": (None, "N:TOK/S,...: tokens/s of one GPU with N sequences running"),
    "train_tokens_per_s": (0.0, "tokens/s of the learner on one GPU; 0: by its size"),
    **{name: (int(c.value), c.unit) for name, c in CONSTANTS.items()},
}
PARALLEL = True
RECORD = "pipeline.jsonl"


def fit_engine(text: str) -> tuple[float, float]:
    """Seconds of a decoding step, fixed and per sequence, from `sequences:tokens/s,...` of one engine."""
    try:
        points = [tuple(map(float, point.split(":"))) for point in text.split(",")]
        sequences, rates = np.array([(n, rate) for n, rate in points]).T
    except ValueError:
        sequences = rates = np.zeros(0)
    if len(sequences) < 2 or min(*sequences, *rates) <= 0:
        raise ConfigError(
            f"--engine-rate {text!r}: expected SEQUENCES:TOKENS/S,... of two points or more, all above 0, as "
            "in 1:150,32:3200,128:4900"
        )
    # n / rate = seconds of a step = a + b·n, in relative least squares
    seconds = sequences / rates
    (step, token), _ = nnls(np.stack([1 / seconds, sequences / seconds], 1), np.ones(len(seconds)))
    return float(step), float(token)


def rates_of(options: Namespace, work: Workload) -> tuple[Rates, dict[str, Constant]]:
    """The rates given by options; the others follow from the model's size. Both with their sources."""
    shape = MODELS[options.model]
    parameters = shape.body_parameters + shape.hidden * shape.vocab
    assumed = assumed_rates(parameters, shape.layers, shape.kv_heads * shape.head_dim, work.context)
    rates = Rates(slots=options.slots, push_s=PUSH.value, step_s=STEP.value, **asdict(assumed))
    train = f"6 FLOP per parameter at peak · train_mfu, {shape.source}"
    engine = f"weights and KV cache at bandwidth · decode_share, {shape.source}"
    if options.train_tokens_per_s:
        train = "GIVEN by --train-tokens-per-s"
        rates = replace(rates, train_token_s=1 / options.train_tokens_per_s)
    if options.engine_rate:
        engine = "GIVEN by --engine-rate"
        step, token = fit_engine(options.engine_rate)
        rates = replace(rates, decode_step_s=step, decode_token_s=token)
    step_s = rates.decode_step_s + rates.decode_token_s * options.slots
    unit = f"tokens/s and GPU, {options.slots} sequences running"
    return rates, {
        "learner": Constant(1 / rates.train_token_s, "tokens/s and GPU", train),
        "engine": Constant(options.slots / step_s, unit, engine),
    }


def workload(options: Namespace) -> Workload:
    """The work of a step."""
    try:
        count = 4096 * options.completions
        lengths = lognormal_lengths(options.mean, options.p95, options.longest, count)
    except ValueError as e:
        raise ConfigError(f"--mean {options.mean} --p95 {options.p95}: {e}") from None
    return Workload(
        prompts=options.prompts, completions=options.completions, lengths=lengths,
        prompt_tokens=ASSUMED["prompt_tokens"].value, unit=UNIT if options.mean > 10 * UNIT else 1,
    )  # fmt: skip


def schemes(text: str) -> list[Scheme]:
    """PipelineRL and PPO-off-policy for each k."""
    ks = [int(k) if k.strip().isdigit() else -1 for k in text.split(",")]
    if min(ks) < 0:
        raise ConfigError(f"--k {text!r}: expected whole numbers from 0 on, as in 0,1,8")
    return [Scheme("pipeline", k) for k in ks] + [Scheme("ppo", k) for k in ks if k > 1]


def measure(work: Workload, rates: Rates, scheme: Scheme, split: Split) -> Row:
    """The outcome of a split under a scheme."""
    return {"scheme": str(scheme), "split": str(split)} | asdict(run(work, rates, split, scheme, STEPS))


def cases(options: Namespace) -> Iterator[Case]:
    """Every split of the devices under every scheme."""
    if options.devices < 2:
        raise ConfigError(f"--devices {options.devices}: expected 2 or more")
    work = workload(options)
    rates, _ = rates_of(options, work)
    for scheme in schemes(options.k):
        for n in range(1, options.devices):
            split = Split(n, options.devices - n)
            yield f"{scheme} on {split}", partial(measure, work, rates, scheme, split)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The best split under every scheme, the speed of all, and every constant with its source."""
    options = Namespace(**head["options"])
    best = max(rows, key=lambda row: row["steps_per_hour"])
    lines = [
        [
            row["scheme"], f"{row['steps_per_hour']:.2f}", f"{row['learner_idle']:.1%}",
            f"{row['engine_idle']:.1%}", f"{row['lag_mean']:.2f}", str(row["lag_max"]),
            "  ".join(f"{lag}: {share:.0%}" for lag, share in row["lag"].items()),
        ]
        for row in rows
        if row["split"] == best["split"]
    ]  # fmt: skip
    columns = ("scheme", "steps/h", "learner idle", "engine idle", "lag, mean", "max", "tokens")
    names, splits = (list(dict.fromkeys(row[key] for row in rows)) for key in ("scheme", "split"))
    speed = {(row["scheme"], row["split"]): row["steps_per_hour"] for row in rows}
    fastest = {name: max(splits, key=lambda split: speed[name, split]) for name in names}
    cells = [[s, *(f"{speed[name, s]:.2f}" + " *" * (fastest[name] == s) for name in names)] for s in splits]
    derived = {"push_s": PUSH, "step_s": STEP, **ASSUMED, **rates_of(options, workload(options))[1]}
    return "\n".join((
        f"split {best['split']} (GPUs of engine + learner); the last column is tokens by lag",
        table(columns, lines),
        "\nsteps per hour by split; * the best of a scheme",
        table(("split", *names), cells),
        f"\nbest of all: {best['scheme']} on {best['split']}, {best['steps_per_hour']:.2f} steps per hour",
        "Sources:",
        *with_sources(CONSTANTS | derived, vars(options)),
    ))  # fmt: skip
