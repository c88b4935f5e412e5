"""`python -m trainer.evaluate`: the controller without a learner, which scores checkpoints.

The engines start with the first checkpoint; the others are pushed to them as weights are in training.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.controller.context import RolloutContext
from trainer.controller.controller import Emit
from trainer.controller.data import Dataset
from trainer.controller.evaluate import evaluate
from trainer.controller.process import note, prepare, run_controller, until_stopped
from trainer.controller.rollout import sample_record
from trainer.types import Group, Prompt, Rollout


def evaluation_main(
    config: Config, model_dir: str, engine_conns: Sequence[Connection], learner: None, start: dict[str, Any],
    telemetry: Connection,
) -> None:  # fmt: skip
    """Entry of the spawned process, as that of the controller. `start`: `checkpoints` as (step, folder)."""

    async def work(stack: ExitStack, emit: Emit) -> None:
        ctx, dataset = prepare(stack, config, model_dir, engine_conns, emit, held_out_only=True)
        prompts = len(dataset.held_out) + sum(map(len, dataset.sets.values()))
        emit("prompts", {"count": prompts})
        evaluations = _evaluate_all(ctx, dataset, start["checkpoints"], emit)
        await until_stopped(evaluations, telemetry, ctx.engine)
        emit("done", {})

    run_controller(telemetry, work)


async def _evaluate_all(
    ctx: RolloutContext, dataset: Dataset, checkpoints: Sequence[tuple[int, str]], emit: Emit
) -> None:
    """Score one checkpoint after the other; one that its run has deleted meanwhile is left out."""
    for info in await ctx.engine.ready():
        emit("ready", {"engine": info})
    for i, (step, folder) in enumerate(checkpoints):
        if i and not Path(folder).is_dir():
            note(emit, f"{folder} was deleted meanwhile, so it is left out (logging.keep_at)")
            continue

        stage = f"evaluate: step {step}"
        await ctx.deadline.wait_for(ctx.engine.update_weights(step, folder if i else ""), stage)
        await ctx.deadline.wait_for(_evaluate(ctx, dataset, step, emit), stage)


async def _evaluate(ctx: RolloutContext, dataset: Dataset, step: int, emit: Emit) -> None:
    """Score the weights that the engines hold; each prompt's completions are sent as they are done."""

    def report(name: str, prompt: Prompt, rollouts: list[Rollout]) -> None:
        emit("sample", sample_record(Group(0, 0, prompt, tuple(rollouts)), step) | {"set": name})

    emit("eval", await evaluate(ctx, dataset, step, report))
