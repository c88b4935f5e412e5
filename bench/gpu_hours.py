"""Savings by a faster LM-head loss: its share of a step, GPU-hours, and the reward at a budget. [2 s]

  python -m bench gpu_hours                                 published rates, until a GPU has measured ours
  python -m bench gpu_hours --kernels out/kernels.jsonl     rates from the GPU suite's stage `kernels`
  python -m bench gpu_hours --models 8b --budget 4000
  python -m bench gpu_hours --record                        over bench/results/gpu-hours.jsonl

A trainer's step is its body (6 FLOP per active parameter and token, and attention, at --body-mfu) and its
head (6HV per token with loss, at the rate of each implementation). Optimizer, communication, weight pushes
and the generators' own head are left out. The GPUs are assumed to be split so that trainer and generators
take equally long when the trainer uses --curve-head. Generators do the same work per step whatever the
trainer's head, and GPUs are then split again.

The paper's curve is assumed to be measured with --curve-head (the paper does not name its implementation).
With a head that makes a step cheaper by a factor f, a budget C buys as many steps as the curve has at C/f.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Case, Row
from bench.sources import CURVES, R0, TABLE, TABLE_1, with_sources
from bench.table import number, table
from trainer.accounting.kernel_cost import CONSTANTS, MODELS, PUBLISHED_HEADS, Head, Setting, cost_factor
from trainer.accounting.kernel_rates import measured_heads, read_rates
from trainer.config import ConfigError

OPTIONS: dict[str, Any] = {
    "models": ("8b,scout,4b,0.6b", f"comma-separated: {', '.join(MODELS)}"),
    "kernels": (None, "record of kernels.compare, with measured rates"),
    "curve_head": ("naive FP32", "the head that the curve was measured with"),
    "budget": (4000.0, "GPU-hours of the whole run"),
    **{name: (c.value, c.unit) for name, c in CONSTANTS.items()},
}
RECORD = "gpu-hours.jsonl"


def heads_of(options: Namespace) -> dict[str, Head]:
    """Published rates, replaced by those that a GPU measured."""
    heads = {head.name: head for head in PUBLISHED_HEADS}
    if options.kernels:
        heads |= {head.name: head for head in measured_heads(read_rates(Path(options.kernels)), "bfloat16")}
    if options.curve_head not in heads:
        raise ConfigError(f"--curve-head {options.curve_head!r}: expected one of {', '.join(heads)}")
    return heads


def account(model: str, head: Head, reference: Head, setting: Setting, budget: float) -> Row:
    """Costs of a head, beside the one that the curve was measured with."""
    shape = MODELS[model]
    body, hours = setting.body_gpu_hours(shape), setting.head_gpu_hours(shape, head)
    balanced = body + setting.head_gpu_hours(shape, reference)
    factor = cost_factor(shape, setting, head, reference)
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
        "reward": float(TABLE_1[CURVES[model]].reward(budget / factor)) if model in CURVES else None,
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
            f"{r['model']}, {r['head']}", f"{r['tflops']:.0f}", f"{100 * r['head_share']:.1f} %",
            f"{r['trainer_gpu_hours_per_1000']:,.0f}", f"{r['run_gpu_hours_per_1000']:,.0f}",
            f"{r['cost_factor']:.3f}", number(r["reward"], ".4f"),
        ]
        for r in rows
    ]  # fmt: skip
    columns = (
        "model, head", "TF/s", "of trainer step", "trainer GPU-h/1000 steps", "run GPU-h/1000 steps",
        "cost", f"reward at {options['budget']:,.0f} GPU-h",
    )  # fmt: skip
    sources = [f"  {r['head']}: {r['tflops']:.0f} TF/s: {r['source']}" for r in rows]
    sources += with_sources(CONSTANTS | {"R0": R0}, options)
    for key in dict.fromkeys(r["key"] for r in rows):
        shape = MODELS[key]
        billions = shape.body_parameters / 1e9
        sources.append(
            f"  {shape.name} = {billions:g} B active parameters without embeddings: {shape.source}"
        )
        if run := CURVES.get(key):
            sources.append(f"  {shape.name}'s curve: A = {TABLE_1[run].A:g}: {TABLE}, {run}")
    return "\n".join((
        table(columns, lines),
        f"\ncost: GPU-hours of a run's step over those with {options['curve_head']}. "
        "A dash in the last column: the paper has no curve for this model.",
        "Sources:",
        *dict.fromkeys(sources),
    ))  # fmt: skip
