"""Savings by a faster LM-head loss: its share of a step, GPU-hours, and the reward at a budget.

  python -m bench gpu_hours                                 published rates, until a GPU has measured ours
  python -m bench gpu_hours --kernels out/kernels.jsonl     rates from the GPU suite's stage `kernels`
  python -m bench gpu_hours --rates "ours=650,best peer=500" --models 8b --budget 4000
  python -m bench gpu_hours --record                        over bench/results/gpu-hours.jsonl and .png

A trainer's step is its body (6 FLOP per active parameter and token, and attention, at --body-mfu) and its
head (6HV per token with loss, at the rate of each implementation). Optimizer, communication, weight pushes
and the generators' own head are left out. The GPUs are assumed to be split so that trainer and generators
take equally long when the trainer uses --curve-head. Generators do the same work per step whatever the
trainer's head, and GPUs are then split again.

The paper's curve is assumed to be measured with --curve-head (the paper does not name its implementation).
With a head that makes a step cheaper by a factor f, a budget C buys as many steps as the curve has at C/f.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import RESULTS, Case, Row
from bench.sources import CURVES, R0
from bench.table import number, table
from trainer.accounting.kernel_cost import CONSTANTS, MODELS, PUBLISHED_HEADS, Head, Setting, cost_factor
from trainer.accounting.kernel_rates import measured_heads, read_rates
from trainer.config import ConfigError
from trainer.scaling.curve.sigmoid import Sigmoid

OPTIONS: dict[str, Any] = {
    "models": ("8b,scout,4b,0.6b", f"comma-separated: {', '.join(MODELS)}"),
    "kernels": (None, "record of kernels.compare, with measured rates"),
    "rates": ("", "rates of your own, HEAD=TF/s,... (6NHV)"),
    "curve_head": ("naive FP32", "the head that the curve was measured with"),
    "budget": (4000.0, "GPU-hours of the whole run"),
    **{name: (c.value, c.unit) for name, c in CONSTANTS.items()},
}
RECORD = "gpu-hours.jsonl"


def heads_of(options: Namespace) -> dict[str, Head]:
    """Published rates, replaced by those that a GPU measured, and these by those that the user gives."""
    heads = {head.name: head for head in PUBLISHED_HEADS}
    if options.kernels:
        measured = measured_heads(read_rates(Path(options.kernels)), "bfloat16")
        heads |= {head.name: head for head in measured}
    for text in filter(None, options.rates.split(",")):
        name, _, value = text.rpartition("=")
        if not (name and value.replace(".", "", 1).isdigit() and float(value) > 0):
            raise ConfigError(f"--rates {text!r}: expected HEAD=TF/s above 0, as in 'ours=650'")
        heads[name] = Head(name, float(value), "GIVEN by --rates")
    if options.curve_head not in heads:
        raise ConfigError(f"--curve-head {options.curve_head!r}: expected one of {', '.join(heads)}")
    return heads


def account(model: str, head: Head, reference: Head, setting: Setting, budget: float) -> Row:
    """Costs of a head, beside the one that the curve was measured with."""
    shape = MODELS[model]
    body, hours = setting.body_gpu_hours(shape), setting.head_gpu_hours(shape, head)
    balanced = body + setting.head_gpu_hours(shape, reference)
    factor = cost_factor(shape, setting, head, reference)
    curve = CURVES.get(model)
    law = Sigmoid(R0.value, curve.A, curve.B, curve.C_mid) if curve else None
    return {
        "key": model,
        "model": shape.name,
        "head": head.name,
        "tflops": head.tflops,
        "source": head.source,
        "head_share": hours / (body + hours),
        "trainer_gpu_hours_per_1000": 1000 * (body + hours),
        "run_gpu_hours_per_1000": 1000 * balanced * (1 + setting.generators / setting.trainers) * factor,
        "cost_factor": factor,
        "reward": float(law.reward(budget / factor)) if law else None,
    }


def cases(options: Namespace) -> Iterator[Case]:
    """Every model with every head."""
    models = options.models.split(",")
    if unknown := [model for model in models if model not in MODELS]:
        raise ConfigError(f"--models {', '.join(unknown)}: expected some of {', '.join(MODELS)}")
    setting, heads = Setting(**{name: getattr(options, name) for name in CONSTANTS}), heads_of(options)
    if setting.length <= setting.prompt:
        raise ConfigError("expected --length above --prompt")
    reference = heads[options.curve_head]
    for model in models:
        for head in heads.values():
            yield f"{model}, {head.name}", partial(account, model, head, reference, setting, options.budget)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The table, and every constant with its source."""
    options = head["options"]
    lines = [
        [
            r["model"], r["head"], f"{r['tflops']:.0f}", f"{100 * r['head_share']:.1f} %",
            f"{r['trainer_gpu_hours_per_1000']:,.0f}", f"{r['run_gpu_hours_per_1000']:,.0f}",
            f"{r['cost_factor']:.3f}", number(r["reward"], ".4f"),
        ]
        for r in rows
    ]  # fmt: skip
    columns = (
        "model", "head", "TF/s", "of trainer step", "trainer GPU-h/1000 steps", "run GPU-h/1000 steps",
        "cost", f"reward at {options['budget']:,.0f} GPU-h",
    )  # fmt: skip
    sources = [f"{r['head']}: {r['tflops']:.0f} TF/s: {r['source']}" for r in rows]
    for name, c in CONSTANTS.items():
        value = options[name]
        sources.append(f"{name} = {value:g} {c.unit}: {c.source if value == c.value else 'GIVEN'}")
    sources.append(f"R0 = {R0.value:g} {R0.unit}: {R0.source}")
    for key in dict.fromkeys(r["key"] for r in rows):
        shape, curve = MODELS[key], CURVES.get(key)
        billions = shape.body_parameters / 1e9
        sources.append(f"{shape.name} = {billions:g} B active parameters without embeddings: {shape.source}")
        if curve:
            sources.append(f"{shape.name}'s curve: A = {curve.A:g}: {curve.source}")
    return "\n".join((
        table(columns, lines),
        f"cost: GPU-hours of a run's step over those with {options['curve_head']}. "
        "A dash in the last column: the paper has no curve for this model.",
        "Sources:",
        *dict.fromkeys(f"  {source}" for source in sources),
    ))  # fmt: skip


def publish(head: Row, rows: Sequence[Row]) -> None:
    """Draw, left, the trainer's GPU-hours per 1,000 steps; right, the curves at each head's cost."""
    from matplotlib.figure import Figure

    budget = head["options"]["budget"]
    keys = [key for key in dict.fromkeys(r["key"] for r in rows) if key in CURVES]
    figure = Figure(figsize=(5.5 + 4.5 * len(keys), 4.8), layout="constrained")
    bars, *right = np.atleast_1d(figure.subplots(1, 1 + len(keys)))
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
    hours = np.geomspace(budget / 8, budget * 8, 200)
    for axis, key in zip(right, keys, strict=True):
        curve = Sigmoid(R0.value, CURVES[key].A, CURVES[key].B, CURVES[key].C_mid)
        of_model = [r for r in rows if r["key"] == key]
        for r, style in zip(of_model, cycle(("-", "--", "-.", ":")), strict=False):
            reward = curve.reward(hours / r["cost_factor"])
            axis.plot(hours, reward, style, label=f"{r['head']}: {r['reward']:.4f}")
        axis.axvline(budget, color="grey", lw=0.8)
        axis.set(
            xscale="log", xlabel="GPU-hours of the run", ylabel="pass rate", title=f"{key}, by its curve"
        )
        axis.legend(title=f"at {budget:,.0f} GPU-h", fontsize=8)
    kinds = {r["head"]: r["source"].split(":")[0] for r in rows}
    figure.suptitle("rates: " + " · ".join(f"{name} {kind}" for name, kind in kinds.items()), fontsize=9)
    figure.savefig(RESULTS / "gpu-hours.png", dpi=130)
