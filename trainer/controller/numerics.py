"""`python -m trainer.doctor --numerics`: a controller that compares learner and engine."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from trainer.config import Config
from trainer.controller.controller import Emit
from trainer.controller.learner_client import LearnerClient
from trainer.controller.parity import measure
from trainer.controller.process import note, prepare, run_controller
from trainer.controller.weight_sync import WeightSync


def numerics_main(
    config: Config, model_dir: str, engine_conns: Sequence[Connection], learner_conn: Connection,
    start: dict[str, Any], telemetry: Connection,
) -> None:  # fmt: skip
    """Entry of the spawned process, as that of the controller. `start`: how many `prompts` and `samples`."""

    async def work(stack: ExitStack, emit: Emit) -> None:
        learner = stack.enter_context(closing(LearnerClient(learner_conn)))
        ctx, dataset = prepare(stack, config, model_dir, engine_conns, emit, held_out_only=True)
        info = await ctx.deadline.wait_for(learner.ready(), "learner: start", start=True)
        if config.engine.colocate:
            ctx.engine.resume()
        await ctx.engine.ready()
        weights = WeightSync(config.engine, ctx.engine, learner, ctx.deadline, lambda version: False)
        await weights.push(0)
        emit("phase", {"name": "sampling, and scoring the same tokens"})
        lacking = partial(note, emit) if info.get("experts") else None
        prompts = dataset.held_out[: start["prompts"]]
        measured = measure(ctx, learner, weights, prompts, start["samples"], lacking)
        gaps = await ctx.deadline.wait_for(measured, "numerics: learner and engine on the same tokens")
        emit("numerics", asdict(gaps))
        emit("done", {"step": 0, "ended_by": "steps"})

    run_controller(telemetry, work)
