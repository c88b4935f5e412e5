"""How much a faster LM-head loss saves: its share of a step, GPU-hours, and the reward at a budget.

  python -m bench.gpu_hours                                 published rates, until a GPU has measured ours
  python -m bench.gpu_hours --kernels out/kernels.json      rates from the GPU suite's stage `kernels`
  python -m bench.gpu_hours --rate "ours=650" --rate "best peer=500" --models 8b --budget 4000
  python -m bench.gpu_hours --record                        over bench/results/gpu-hours.json and .png

A trainer's step is its body (6 FLOP per active parameter and token, and attention, at --body-mfu) and its
head (6HV per token with loss, at the rate of each implementation). Optimizer, communication, weight pushes
and the generators' own head are left out. The GPUs are assumed to be split so that trainer and generators
take equally long when the trainer uses --curve-head. Generators do the same work per step whatever the
trainer's head, and GPUs are then split again.

The paper's curve is assumed to be measured with --curve-head (the paper does not name its implementation).
With a head that makes a step cheaper by a factor f, a budget C buys as many steps as the curve has at C/f.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path

import numpy as np

from bench import records
from bench.records import Record
from bench.sources import CURVES, R0, PublishedCurve
from bench.table import number, table
from trainer.accounting.kernel_cost import (
    CONSTANTS,
    MODELS,
    PUBLISHED_HEADS,
    Head,
    Setting,
    Shape,
    cost_factor,
)
from trainer.accounting.kernel_rates import measured_heads
from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import Sigmoid


def account(
    shape: Shape,
    heads: Sequence[Head],
    setting: Setting,
    curve: Sigmoid | None,
    curve_head: str,
    budget: float,
) -> list[Record]:
    """A record per head."""
    reference = next((head for head in heads if head.name == curve_head), None)
    if reference is None:
        raise SystemExit(f"--curve-head {curve_head!r}: expected one of {', '.join(h.name for h in heads)}")
    body = setting.body_gpu_hours(shape)
    balanced = body + setting.head_gpu_hours(shape, reference)
    generate = balanced * setting.generators / setting.trainers
    rows = []
    for head in heads:
        hours = setting.head_gpu_hours(shape, head)
        factor = cost_factor(shape, setting, head, reference)
        rows.append({
            "model": shape.name,
            "head": head.name,
            "tflops": head.tflops,
            "source": head.source,
            "head_share": hours / (body + hours),
            "trainer_gpu_hours_per_1000": 1000 * (body + hours),
            "run_gpu_hours_per_1000": 1000 * (generate + body + hours),
            "cost_factor": factor,
            "budget": budget,
            "reward": float(curve.reward(budget / factor)) if curve else None,
            "gpu_hours_to_that_of_curve_head": budget * factor,
        })  # fmt: skip
    return rows


def describe(result: Record) -> str:
    """The table, and every constant with its source."""
    rows = [
        [
            r["model"],
            r["head"],
            number(r["tflops"], ".0f"),
            number(100 * r["head_share"], ".1f") + " %",
            number(r["trainer_gpu_hours_per_1000"], ",.0f"),
            number(r["run_gpu_hours_per_1000"], ",.0f"),
            number(r["cost_factor"], ".3f"),
            number(r["reward"], ".4f"),
        ]
        for r in result["records"]
    ]
    head = (
        "model", "head", "TF/s", "of trainer step", "trainer GPU-h/1000 steps", "run GPU-h/1000 steps",
        "cost", f"reward at {result['budget']:,.0f} GPU-h",
    )  # fmt: skip
    notes = [f"  {key} = {c['value']:g} {c['unit']}: {c['source']}" for key, c in result["constants"].items()]
    return "\n".join((
        table(head, rows),
        f"cost: GPU-hours of a run's step over those with {result['curve_head']}. "
        "A dash in the last column: the paper has no curve for this model.",
        "Sources:",
        *dict.fromkeys(f"  {r['head']}: {r['tflops']:.0f} TF/s: {r['source']}" for r in result["records"]),
        *notes,
    ))  # fmt: skip


def draw(result: Record, path: Path) -> None:
    """Left: the trainer's GPU-hours per 1,000 steps, body and head. Right: the curves at each head's cost."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["records"]
    curves = {m: c for m, c in result["curves"].items() if c}
    figure, axes = plt.subplots(
        1, 1 + len(curves), figsize=(5.5 + 4.5 * len(curves), 4.8), layout="constrained"
    )
    bars, *right = np.atleast_1d(axes)
    labels = [f"{r['model']} · {r['head']}" for r in rows]
    total = np.array([r["trainer_gpu_hours_per_1000"] for r in rows])
    heads = total * [r["head_share"] for r in rows]
    bars.barh(labels, total - heads, color="#b8c4d0", label="body")
    bars.barh(labels, heads, left=total - heads, color="#c44e52", label="LM head and loss")
    for y, r in enumerate(rows):
        bars.text(total[y], y, f" {100 * r['head_share']:.0f} %", va="center", fontsize=8)
    bars.set_xlim(0, 1.12 * total.max())
    bars.invert_yaxis()
    bars.set(xlabel="trainer GPU-hours per 1,000 steps", title="The head's share of the trainer's step")
    bars.legend(loc="lower right", fontsize=8)
    for axis, (model, c) in zip(right, curves.items(), strict=True):
        curve = Sigmoid(c["R0"], c["A"], c["B"], c["C_mid"])
        hours = np.geomspace(result["budget"] / 8, result["budget"] * 8, 200)
        of_model = [r for r in rows if r["model"] == model]
        for r, style in zip(of_model, cycle(("-", "--", "-.", ":")), strict=False):
            reward = curve.reward(hours / r["cost_factor"])
            axis.plot(hours, reward, style, label=f"{r['head']}: {r['reward']:.4f}")
        axis.axvline(result["budget"], color="grey", lw=0.8)
        axis.set(
            xscale="log", xlabel="GPU-hours of the run", ylabel="pass rate", title=f"{model}, by its curve"
        )
        axis.legend(title=f"at {result['budget']:,.0f} GPU-h", fontsize=8)
    figure.suptitle(_status(rows), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _status(rows: Sequence[Record]) -> str:
    """The picture's caption: which rates are measured, published or a target."""
    kinds = {r["head"]: r["source"].split(":")[0] for r in rows}
    return "rates: " + " · ".join(f"{head} {kind}" for head, kind in kinds.items())


def parser() -> argparse.ArgumentParser:
    """Every option with its default and source."""
    p = records.parser("gpu_hours", __doc__)
    p.add_argument("--models", default="8b,scout,4b,0.6b", help="comma-separated: " + ", ".join(MODELS))
    p.add_argument(
        "--kernels", type=Path,
        help="the --out of bench.kernels.compare, as of the GPU suite's stage `kernels`",
    )  # fmt: skip
    p.add_argument(
        "--rate", action="append", default=[], metavar="HEAD=TF/s", help="a rate of your own (6NHV)"
    )
    for name, c in CONSTANTS.items():
        p.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=c.value, help=f"{c.unit} ({c.value:g})"
        )
    p.add_argument(
        "--curve-head", default="naive FP32", help="the head the curve was measured with (naive FP32)"
    )
    p.add_argument("--r0", type=float, default=R0.value, help=f"reward at zero compute ({R0.value}, assumed)")
    p.add_argument("--law", metavar="A,B,C_MID", help="a curve of your own, for all models asked for")
    p.add_argument("--budget", type=float, default=4000, help="GPU-hours of the whole run (4000)")
    records.add_options(p, "gpu-hours.json and .png")
    p.add_argument("--plot", type=Path, metavar="FILE", help="write the picture here, .png or .svg")
    return p


def _heads(args: argparse.Namespace, shape: Shape) -> list[Head]:
    """Published rates, replaced by those that a GPU measured, and these by those that the user gives."""
    heads = {head.name: head for head in PUBLISHED_HEADS}
    if args.kernels:
        try:
            record = json.loads(args.kernels.read_text())
            measured = measured_heads(record, "bfloat16")
            heads |= {head.name: head for head in measured}
        except ConfigError as e:
            raise SystemExit(str(e)) from None
    for text in args.rate:
        name, _, value = text.rpartition("=")
        try:
            heads[name] = Head(name, float(value), "GIVEN by --rate")
        except ValueError:
            raise SystemExit(f"--rate {text!r}: expected HEAD=TF/s, as in 'ours=650'") from None
        if not name or not heads[name].tflops > 0:
            raise SystemExit(f"--rate {text!r}: expected HEAD=TF/s above 0, as in 'ours=650'")
    return list(heads.values())


def _curve(args: argparse.Namespace, model: str) -> PublishedCurve | None:
    if args.law is None:
        return CURVES.get(model)
    try:
        ceiling, slope, mid = map(float, args.law.split(","))
    except ValueError:
        raise SystemExit(
            f"--law {args.law!r}: expected three numbers A,B,C_MID, as in .61,1.92,2542"
        ) from None
    return PublishedCurve(model, mid, slope, ceiling, "GIVEN by --law")


def main(argv: Sequence[str] | None = None) -> None:
    """Compute, print the table, write record and picture where asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    models = args.models.split(",")
    if unknown := [m for m in models if m not in MODELS]:
        raise SystemExit(f"--models {', '.join(unknown)}: expected some of {', '.join(MODELS)}")
    setting = Setting(**{name: getattr(args, name) for name in CONSTANTS})
    if setting.length <= setting.prompt or min(asdict(setting).values()) < 0 or not args.budget > 0:
        raise SystemExit("expected --length above --prompt, --budget above 0 and nothing negative")
    constants = {
        name: asdict(
            c if getattr(args, name) == c.value else replace(c, value=getattr(args, name), source="GIVEN")
        )
        for name, c in CONSTANTS.items()
    }
    constants["R0"] = asdict(R0 if args.r0 == R0.value else replace(R0, value=args.r0, source="GIVEN"))
    rows: list[Record] = []
    curves: dict[str, Record | None] = {}
    for model in models:
        shape, curve = MODELS[model], _curve(args, model)
        sigmoid = Sigmoid(args.r0, curve.A, curve.B, curve.C_mid) if curve else None
        rows += account(shape, _heads(args, shape), setting, sigmoid, args.curve_head, args.budget)
        curves[shape.name] = asdict(curve) | {"R0": args.r0} if curve else None
        constants[shape.name] = {
            "value": shape.body_parameters / 1e9, "unit": "B active parameters without embeddings",
            "source": shape.source,
        }  # fmt: skip
        if curve:
            constants[f"{shape.name}'s curve"] = {"value": curve.A, "unit": "ceiling", "source": curve.source}
    result = {
        "command": records.command("gpu_hours", arguments),
        "curve_head": args.curve_head,
        "budget": args.budget,
        "constants": constants,
        "curves": curves,
        "records": rows,
    }
    out = records.path_of(args, "gpu-hours.json")
    plot = args.plot or (out.with_suffix(".png") if args.record and out else None)
    records.write(out, result)
    if plot:
        draw(result, plot)
    print(describe(result))
    records.say_written(out, plot)


if __name__ == "__main__":
    main()
