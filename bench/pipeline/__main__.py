"""Steps per hour, idle shares and token lag of every split of the GPUs, by the controller in virtual time.

  python -m bench.pipeline                                  an 8-GPU node: every split, both schemes; minutes
  python -m bench.pipeline --devices 16 --learner 4 --k 1,8 a split of your own beside the best
  python -m bench.pipeline --engine-rate 1:150,32:3200,128:4900 --train-tokens-per-s 9000
                                                            rates that you measured, of one GPU each
  python -m bench.pipeline --run runs/demo-0                rates of a real run: predicted beside measured
  python -m bench.pipeline --run A B C --rates-from A       the same with the rates of one of them
  python -m bench.pipeline --record                         over bench/results/pipeline.json and .png

The trainer's own controller runs in virtual time (virtual_run.py). The lengths of completions are log-normal
by --mean and --p95, or (--run) those of the run. Without --engine-rate, a decoding step reads the weights
once and each sequence's KV cache; without --train-tokens-per-s, the learner runs at an assumed MFU. Every
constant is printed with its source. Evaluation is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from bench import records
from bench.pipeline.measured_run import MeasuredRun, read_run
from bench.pipeline.timed import Rates, Workload
from bench.pipeline.virtual_run import Outcome, Scheme, lognormal_lengths, run
from bench.records import Record
from bench.table import number, table
from trainer.accounting.kernel_cost import MODELS, Constant
from trainer.launcher.advice import ASSUMED, assumed_rates
from trainer.launcher.placement import Split

BAR = 0.15  # relative error that a prediction may have
MAX_STEPS = 12  # of a real run that are run again: one is like another
UNIT = 100  # tokens that count as one, where completions are thousands of tokens long
TRACKED = "pipeline.json"

DEFAULTS = {
    "prompts": Constant(48, "prompts per step", "arXiv 2510.13786: 48 × 16"),
    "completions": Constant(16, "completions per prompt", "arXiv 2510.13786: 48 × 16"),
    "mean": Constant(6000, "tokens per completion", "ASSUMED: .42 of the longest"),
    "p95": Constant(12000, "tokens, 95th percentile", "ASSUMED: .85 of the longest"),
    "longest": Constant(14336, "tokens", "arXiv 2510.13786: 12,288 thinking + 2,048 answer"),
    "prompt_tokens": Constant(200, "tokens", ASSUMED["prompt_tokens"].source),
    "slots": Constant(
        96, "sequences per GPU", "ASSUMED: 8B in bf16 leaves an H200 KV cache for about 200 of 4K"
    ),
    "push_s": Constant(0.8, "s of the engine", "ASSUMED: 16 GB at 20 GB/s, loading included"),
    "step_s": Constant(0.8, "s of the learner", "ASSUMED: gradient norm, AdamW, publishing of 8B parameters"),
}


def fit_engine(text: str) -> tuple[float, float]:
    """Seconds of a decoding step, fixed and per sequence, from `sequences:tokens/s,...` of one engine."""
    try:
        points = [tuple(map(float, point.split(":"))) for point in text.split(",")]
        sequences, rates = np.array([(n, rate) for n, rate in points]).T
    except ValueError:
        raise SystemExit(
            f"--engine-rate {text!r}: expected SEQUENCES:TOKENS/S,..., as in 1:150,32:3200,128:4900"
        ) from None
    if len(points) < 2 or min(*sequences, *rates) <= 0:
        raise SystemExit(f"--engine-rate {text!r}: expected two points or more, all numbers above 0")
    # n / rate = seconds of a step = a + b·n, in relative least squares
    seconds = sequences / rates
    (step, token), _ = nnls(np.stack([1 / seconds, sequences / seconds], 1), np.ones(len(points)))
    return float(step), float(token)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def describe(result: Record) -> str:
    """The tables, from the JSON record alone."""
    outcomes, chosen = result["records"], result["split"]
    rows = [
        [
            r["scheme"], r["split"], number(r["steps_per_hour"], ".2f"), _percent(r["learner_idle"]),
            _percent(r["engine_idle"]), number(r["lag_mean"], ".2f"), str(r["lag_max"]),
            "  ".join(f"{lag}: {share:.0%}" for lag, share in r["lag"].items()),
        ]
        for r in outcomes
        if r["split"] == chosen
    ]  # fmt: skip
    head = ("scheme", "split", "steps/h", "learner idle", "engine idle", "lag, mean", "max", "note")
    schemes, splits = (list(dict.fromkeys(r[key] for r in outcomes)) for key in ("scheme", "split"))
    speed = {(r["scheme"], r["split"]): r["steps_per_hour"] for r in outcomes}
    best = {scheme: max(splits, key=lambda split: speed[scheme, split]) for scheme in schemes}
    cells = [[s, *(f"{speed[c, s]:.2f}" + (" *" if best[c] == s else "  ") for c in schemes)] for s in splits]
    top = max(outcomes, key=lambda r: r["steps_per_hour"])
    constants = [f"  {k} = {c['value']:g} {c['unit']}: {c['source']}" for k, c in result["constants"].items()]
    return "\n".join((
        f"split {chosen} (GPUs of engine + learner); the note is tokens by lag",
        table(head, rows),
        "\nsteps per hour by split; * the best of a scheme",
        table(("split", *schemes), cells),
        f"best of all: {top['scheme']} on {top['split']}, {top['steps_per_hour']:.2f} steps per hour",
        "Sources:",
        *constants,
    ))  # fmt: skip


def describe_runs(result: Record) -> str:
    """Predicted beside measured, from the JSON record alone."""
    rows, lines = [], []
    for one in result["runs"]:
        for figure, c in one["figures"].items():
            form, error = _percent if "idle" in figure else partial(number, form=".4g"), c["error"]
            note = f"over {BAR:.0%}" if abs(error or 0) > BAR else ""
            percent = "–" if error is None else f"{100 * error:+.1f} %"
            both = [form(c["predicted"]), form(c["measured"])]
            rows.append([one["name"], one["scheme"], figure, *both, percent, note])
        rates = ", ".join(f"{name} {value:.4g}" for name, value in one["rates"].items() if value)
        lines.append(f"{one['name']}: rates of {one['rates_of']}: {rates}")
    head = ("run", "scheme", "", "predicted", "measured", "error", "note")
    return "\n".join([table(head, rows), *lines])


def compare(one: MeasuredRun, source: MeasuredRun) -> Record:
    """A run's figures, measured and predicted with the rates of `source`, and the relative errors."""
    steps = min(one.steps, MAX_STEPS)
    out = run(one.work, source.rates, one.split, one.scheme, steps, one.warm)
    figures = {}
    for name in ("steps_per_hour", "learner_idle", "engine_idle", "lag_mean"):
        predicted, measured = getattr(out, name), getattr(one.figures, name)
        error = predicted / measured - 1 if measured else None
        title = {"lag_mean": "mean lag"}.get(name, name.replace("_", " "))
        figures[title] = {"predicted": predicted, "measured": measured, "error": error}
    return {
        "name": one.name, "scheme": str(one.scheme), "split": str(one.split), "steps": one.steps,
        "rates_of": source.name, "rates": asdict(source.rates), "figures": figures,
    }  # fmt: skip


def draw(result: Record, path: Path) -> None:
    """Steps per hour, and both idle shares, over the split; a line for each scheme."""
    from matplotlib.figure import Figure

    outcomes = result["records"]
    schemes = list(dict.fromkeys(r["scheme"] for r in outcomes))
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True)
    titles = ("steps per hour", "learner idle, % of the time", "engine idle, % of the time")
    keys = ("steps_per_hour", "learner_idle", "engine_idle")
    for axis, key, title in zip(axes, keys, titles, strict=True):
        for i, scheme in enumerate(schemes):
            of_scheme = [r for r in outcomes if r["scheme"] == scheme]
            values = [r[key] * (100 if "idle" in key else 1) for r in of_scheme]
            marker, line = ("o", "-") if scheme.startswith("Pipeline") else ("s", "--")
            width = 4 - 3 * i / len(schemes)  # so that lines below stay visible
            splits = [r["split"] for r in of_scheme]
            axis.plot(splits, values, line, color=f"C{i}", label=scheme, marker=marker, ms=4, linewidth=width)
        axis.axvline(result["split"], color="grey", lw=0.8, zorder=0)
        axis.set(title=title, xlabel="GPUs of engine + learner", ylim=(0, None if key == keys[0] else 100))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(result["what"], fontsize=10)
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    """Every option with its default and source."""
    p = records.parser("pipeline", __doc__, f"{TRACKED} and .png", devices=8, steps=24, seed=0)
    p.add_argument("--learner", type=int, help="GPUs of the learner in your split (the best of PipelineRL)")
    text = "lags of PipelineRL-k and PPO-off-policy-k, whose k = 1 is PipelineRL-0 (0,1,4,8)"
    p.add_argument("--k", default="0,1,4,8", help=text)
    text = "whose size gives rates that are not given"
    p.add_argument("--model", choices=MODELS, default="8b", help=text)
    for name, c in DEFAULTS.items():
        kind = int if name in ("prompts", "completions", "longest", "slots") else float
        text = f"{c.unit} ({c.value:g})"
        p.add_argument(f"--{name.replace('_', '-')}", type=kind, default=kind(c.value), help=text)
    text = "tokens/s of one GPU with N sequences running"
    p.add_argument("--engine-rate", metavar="N:TOK/S,...", help=text)
    p.add_argument("--train-tokens-per-s", type=float, help="tokens/s of the learner on one GPU")
    text = "real runs to predict and compare with"
    p.add_argument("--run", type=Path, nargs="+", metavar="RUN_DIR", help=text)
    text = "the run whose rates are used (each its own)"
    p.add_argument("--rates-from", type=Path, metavar="RUN_DIR", help=text)
    text = "the part of a decoding step of --run that does not depend on the number of sequences (0)"
    p.add_argument("--decode-step-s", type=float, default=0.0, help=text)
    return p


def _outcome(args: argparse.Namespace, work: Workload, rates: Rates, key: tuple[Scheme, Split]) -> Outcome:
    return run(work, rates, key[1], key[0], args.steps, seed=args.seed)


def predict(args: argparse.Namespace) -> Record:
    """The record of every split of the devices under every scheme."""
    schemes = _schemes(args.k)
    _check(args)
    count = 4096 * args.completions
    try:
        lengths = lognormal_lengths(args.mean, args.p95, args.longest, count, args.seed)
    except ValueError as e:
        raise SystemExit(f"--mean {args.mean:g} --p95 {args.p95:g}: {e}") from None
    work = Workload(
        prompts=args.prompts, completions=args.completions, lengths=lengths,
        prompt_tokens=args.prompt_tokens, unit=UNIT if args.mean > 10 * UNIT else 1,
    )  # fmt: skip
    rates = _rates(args, work)
    keys = [(c, Split(n, args.devices - n)) for c in schemes for n in range(1, args.devices)]
    with ProcessPoolExecutor(min(records.cores(), len(keys))) as pool:
        outcomes = dict(zip(keys, pool.map(partial(_outcome, args, work, rates), keys), strict=True))
    best = max(outcomes, key=lambda key: outcomes[key].steps_per_hour)[1]
    return {
        "what": f"{MODELS[args.model].name} on {args.devices} GPUs, {args.prompts} × {args.completions} "
        f"completions of mean {args.mean:g}, 95th percentile {args.p95:g} tokens; simulated",
        "split": str(Split(args.learner, args.devices - args.learner) if args.learner else best),
        "rates": asdict(rates),
        "constants": _constants(args, rates),
        "records": [
            {"scheme": str(c), "split": str(s), **asdict(o), "lag_mean": o.lag_mean, "lag_max": o.lag_max}
            for (c, s), o in outcomes.items()
        ],
    }


def _check(args: argparse.Namespace) -> None:
    if args.devices < 2 or not 0 < (1 if args.learner is None else args.learner) < args.devices:
        raise SystemExit(
            f"--devices {args.devices} --learner {args.learner}: expected 2 devices or more, and a learner "
            "that has one and leaves one to the engine"
        )
    records.at_least(1, args, "prompts", "completions", "longest", "slots", "steps")
    records.at_least(0, args, "prompt_tokens", "push_s", "step_s")
    if args.train_tokens_per_s is not None and not args.train_tokens_per_s > 0:
        raise SystemExit(f"--train-tokens-per-s {args.train_tokens_per_s:g}: expected a rate above 0")


def _rates(args: argparse.Namespace, work: Workload) -> Rates:
    """The rates given by options; the others follow from the model's size."""
    shape = MODELS[args.model]
    parameters = shape.body_parameters + shape.hidden * shape.vocab
    assumed = assumed_rates(parameters, shape.layers, shape.kv_heads * shape.head_dim, work.context)
    rates = Rates(slots=args.slots, push_s=args.push_s, step_s=args.step_s, **asdict(assumed))
    if args.train_tokens_per_s:
        rates = replace(rates, train_token_s=1 / args.train_tokens_per_s)
    if args.engine_rate:
        step, token = fit_engine(args.engine_rate)
        rates = replace(rates, decode_step_s=step, decode_token_s=token)
    return rates


def _constants(args: argparse.Namespace, rates: Rates) -> dict[str, Record]:
    """Every number used, with its source."""
    constants = {
        name: c if getattr(args, name) == c.value else replace(c, value=getattr(args, name), source="GIVEN")
        for name, c in DEFAULTS.items()
    }
    source = MODELS[args.model].source
    train, engine = "GIVEN by --train-tokens-per-s", "GIVEN by --engine-rate"
    if not args.train_tokens_per_s:
        train = f"6 FLOP per parameter at peak · train_mfu, {source}"
        constants |= {name: ASSUMED[name] for name in ("peak", "train_mfu")}
    if not args.engine_rate:
        engine = f"weights and KV cache at bandwidth · decode_share, {source}"
        constants |= {name: ASSUMED[name] for name in ("peak", "bandwidth", "decode_share")}
    step_s = rates.decode_step_s + rates.decode_token_s * args.slots
    constants["learner"] = Constant(1 / rates.train_token_s, "tokens/s and GPU", train)
    unit = f"tokens/s and GPU, {args.slots} sequences running"
    constants["engine"] = Constant(args.slots / step_s, unit, engine)
    return {name: asdict(c) for name, c in constants.items()}


def _schemes(text: str) -> list[Scheme]:
    try:
        ks = [int(k) for k in text.split(",")]
    except ValueError:
        ks = [-1]
    if min(ks) < 0:
        raise SystemExit(f"--k {text!r}: expected whole numbers from 0 on, as in 0,1,8")
    return [Scheme("pipeline", k) for k in ks] + [Scheme("ppo", k) for k in ks if k > 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print the tables, write record and picture where asked."""
    args = parser().parse_args(argv)
    if args.rates_from and not args.run:
        raise SystemExit("--rates-from needs --run: the runs to predict")
    if args.run:
        if args.record:
            raise SystemExit("--record is of a sweep over splits; it does not go with --run")
        source = read_run(args.rates_from, args.decode_step_s) if args.rates_from else None
        runs = [read_run(folder, args.decode_step_s) for folder in args.run]
        result: Record = {"runs": [compare(one, source or one) for one in runs]}
        text = describe_runs(result)
    else:
        result = predict(args)
        text = describe(result)
    result["command"] = records.command("pipeline", argv)
    if args.record:
        draw(result, records.RESULTS / "pipeline.png")
    return records.finish(args, TRACKED, result, text)


if __name__ == "__main__":
    sys.exit(main())
