"""What the speed of the LM head's loss is worth: share of a step, GPU-hours, and reward at a budget.

  python -m bench.gpu_hours                                 published rates, until a GPU has measured ours
  python -m bench.gpu_hours --kernels out/kernels.json      rates from the GPU suite's stage `kernels`
  python -m bench.gpu_hours --rate "ours=650" --rate "best peer=500" --models 8b --budget 4000

A trainer's step is its body (6 FLOP per active parameter and token, and attention, at --body-mfu) and its
head (6HV per token with loss, at the rate of each implementation). Optimiser, communication and weight pushes
are left out, and so is the generators' own head. The split of GPUs is taken as balanced when the trainer uses
--curve-head; generators do the same work per step whatever the trainer's head, and GPUs are divided anew.

The law: the paper's curve is taken as measured with --curve-head (it does not say which implementation it
used). A head that makes a step cheaper by a factor f makes as many steps for C as the curve shows at C/f.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import ROOT, write_json
from bench.sources import CURVES, R0, Curve
from bench.table import number, table
from trainer.config import ConfigError
from trainer.scaling.kernel_cost import (
    CONSTANTS,
    MODELS,
    PUBLISHED_HEADS,
    Head,
    Setting,
    Shape,
    cost_factor,
    suite_heads,
)
from trainer.scaling.sigmoid import Sigmoid


def account(
    shape: Shape,
    heads: Sequence[Head],
    setting: Setting,
    curve: Sigmoid | None,
    curve_head: str,
    budget: float,
) -> list[dict[str, Any]]:
    """A record per head."""
    reference = next((head for head in heads if head.name == curve_head), None)
    if reference is None:
        raise SystemExit(f"--curve-head {curve_head!r}: expected one of {', '.join(h.name for h in heads)}")
    body = setting.body_gpu_hours(shape)
    balanced = body + setting.head_gpu_hours(shape, reference)
    generate = balanced * setting.generators / setting.trainers
    records = []
    for head in heads:
        own = setting.head_gpu_hours(shape, head)
        factor = cost_factor(shape, setting, head, reference)
        records.append({
            "model": shape.name,
            "head": head.name,
            "tflops": head.tflops,
            "source": head.source,
            "head_share": own / (body + own),
            "trainer_gpu_hours_per_1000": 1000 * (body + own),
            "run_gpu_hours_per_1000": 1000 * (generate + body + own),
            "cost_factor": factor,
            "budget": budget,
            "reward": float(curve.reward(budget / factor)) if curve else None,
            "gpu_hours_to_that_of_curve_head": budget * factor,
        })  # fmt: skip
    return records


def describe(result: dict[str, Any]) -> str:
    """The table and, below, every constant with its source."""
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
        "reward: – where the paper has no curve.",
        "Sources:",
        *dict.fromkeys(f"  {r['head']}: {r['tflops']:.0f} TF/s: {r['source']}" for r in result["records"]),
        *notes,
    ))  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Left: the trainer's GPU-hours per 1,000 steps, body and head. Right: the law at each head's cost."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = result["records"]
    curves = {m: c for m, c in result["curves"].items() if c}
    figure, axes = plt.subplots(
        1, 1 + len(curves), figsize=(5.5 + 4.5 * len(curves), 4.8), layout="constrained"
    )
    bars, *laws = np.atleast_1d(axes)
    labels = [f"{r['model']} · {r['head']}" for r in records]
    whole = np.array([r["trainer_gpu_hours_per_1000"] for r in records])
    heads = whole * [r["head_share"] for r in records]
    bars.barh(labels, whole - heads, color="#b8c4d0", label="body")
    bars.barh(labels, heads, left=whole - heads, color="#c44e52", label="LM head and loss")
    for y, r in enumerate(records):
        bars.text(whole[y], y, f" {100 * r['head_share']:.0f} %", va="center", fontsize=8)
    bars.set_xlim(0, 1.12 * whole.max())
    bars.invert_yaxis()
    bars.set(xlabel="trainer GPU-hours per 1,000 steps", title="The head's share of the trainer's step")
    bars.legend(loc="lower right", fontsize=8)
    for axis, (model, c) in zip(laws, curves.items(), strict=True):
        law = Sigmoid(c["R0"], c["A"], c["B"], c["C_mid"])
        hours = np.geomspace(result["budget"] / 8, result["budget"] * 8, 200)
        own = [r for r in records if r["model"] == model]
        styles = ("-", "--", "-.", ":")
        for r, style in zip(own, styles * len(own), strict=False):
            axis.plot(
                hours, law.reward(hours / r["cost_factor"]), style, label=f"{r['head']}: {r['reward']:.4f}"
            )
        axis.axvline(result["budget"], color="grey", lw=0.8)
        axis.set(
            xscale="log", xlabel="GPU-hours of the run", ylabel="pass rate", title=f"{model}, by the law"
        )
        axis.legend(title=f"at {result['budget']:,.0f} GPU-h", fontsize=8)
    figure.suptitle(_status(records), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _status(records: Sequence[dict[str, Any]]) -> str:
    """What the rates are, for the picture: nobody should take a target for a measurement."""
    kinds = {r["head"]: r["source"].split(":")[0] for r in records}
    return "rates: " + " · ".join(f"{head} {kind}" for head, kind in kinds.items())


def parser() -> argparse.ArgumentParser:
    """Every option with its default and source."""
    p = argparse.ArgumentParser(
        "python -m bench.gpu_hours", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--models", default="8b,scout,4b,0.6b", help="comma-separated: " + ", ".join(MODELS))
    p.add_argument("--kernels", type=Path, help="kernels.json of the GPU suite")
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
    p.add_argument("--out", type=Path, help="the JSON (bench/results/gpu-hours.json)")
    p.add_argument("--plot", type=Path, help="the picture, .png or .svg (beside the JSON)")
    return p


def _heads(args: argparse.Namespace, shape: Shape) -> list[Head]:
    """Published rates, over them what a GPU measured, over those what the user gives."""
    heads = {head.name: head for head in PUBLISHED_HEADS}
    if args.kernels:
        try:
            heads |= {head.name: head for head in suite_heads(json.loads(args.kernels.read_text()), shape)}
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


def _curve(args: argparse.Namespace, model: str) -> Curve | None:
    if args.law is None:
        return CURVES.get(model)
    try:
        ceiling, slope, mid = map(float, args.law.split(","))
    except ValueError:
        raise SystemExit(
            f"--law {args.law!r}: expected three numbers A,B,C_MID, as in .61,1.92,2542"
        ) from None
    return Curve(ceiling, slope, mid, "GIVEN by --law")


def main(argv: Sequence[str] | None = None) -> None:
    """Account, print the table, write JSON and picture."""
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
    records, curves = [], {}
    for model in models:
        shape, curve = MODELS[model], _curve(args, model)
        law = Sigmoid(args.r0, curve.A, curve.B, curve.C_mid) if curve else None
        records += account(shape, _heads(args, shape), setting, law, args.curve_head, args.budget)
        curves[shape.name] = asdict(curve) | {"R0": args.r0} if curve else None
        constants[shape.name] = {
            "value": shape.body_parameters / 1e9, "unit": "B active parameters without embeddings",
            "source": shape.source,
        }  # fmt: skip
        if curve:
            constants[f"{shape.name}'s curve"] = {"value": curve.A, "unit": "ceiling", "source": curve.source}
    result = {
        "command": " ".join(("python -m bench.gpu_hours", *arguments)),
        "curve_head": args.curve_head,
        "budget": args.budget,
        "constants": constants,
        "curves": curves,
        "records": records,
    }
    out = args.out or ROOT / "bench" / "results" / "gpu-hours.json"
    plot = args.plot or out.with_suffix(".png")
    write_json(out, result)
    draw(result, plot)
    print(describe(result))
    print(f"written to {out} and {plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
