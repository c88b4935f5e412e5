"""Scores of a run's checkpoints by a command of the user's that asks the server, such as lm-eval.

The command runs in a shell, once for each checkpoint, whose weights the server then has. It finds the server
by its environment, SIGMOID_RL_URL, SIGMOID_RL_TOKEN, SIGMOID_RL_MODEL (the name), SIGMOID_RL_CHECKPOINT (the
folder) and SIGMOID_RL_STEP, and ends by printing a line of JSON: an object of numbers. They become
`eval/NAME/KEY` in RUN/evaluations/NAME/results.jsonl, at the compute of the checkpoint.
"""

import asyncio
import json
import math
import os
import signal
from contextlib import suppress
from subprocess import PIPE

from trainer.config import ConfigError
from trainer.engines.pool import EnginePool
from trainer.evaluate.question import Checkpoint
from trainer.jsonl import append, open_to_append
from trainer.run_folder import RESULTS
from trainer.serve.endpoint import Endpoint, Scoring


async def score(scoring: Scoring, endpoint: Endpoint, url: str, pool: EnginePool) -> None:
    """Score the checkpoints one after the other, the first of which the engines have."""
    with open_to_append(scoring.folder / RESULTS) as file:
        for checkpoint in scoring.checkpoints:
            if checkpoint.step != endpoint.version:
                await pool.update_weights(checkpoint.step, checkpoint.folder)
            numbers = await _ask(scoring.command, endpoint, url, checkpoint)
            line = {"step": checkpoint.step} | {f"eval/{scoring.name}/{k}": v for k, v in numbers.items()}
            append(file, line | {"compute/total": checkpoint.compute})


async def _ask(command: str, endpoint: Endpoint, url: str, checkpoint: Checkpoint) -> dict[str, float]:
    """The numbers that the command prints; ConfigError for anything else."""
    known = {
        "URL": url, "TOKEN": endpoint.token, "MODEL": endpoint.name, "CHECKPOINT": checkpoint.folder,
        "STEP": str(checkpoint.step),
    }  # fmt: skip
    environment = os.environ | {f"SIGMOID_RL_{key}": value for key, value in known.items()}
    process = await asyncio.create_subprocess_shell(
        command, env=environment, stdout=PIPE, start_new_session=True
    )
    assert process.stdout is not None
    reading = asyncio.create_task(process.stdout.read())
    try:
        await process.wait()
    finally:
        with suppress(ProcessLookupError):  # what the shell has left running, or all of it after Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
    printed = (await reading).decode(errors="replace")
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    problem = f"--score, step {checkpoint.step}: "
    if process.returncode:
        raise ConfigError(
            f"{problem}the command ended with exit code {process.returncode}: {last or 'it printed nothing'}"
        )
    with suppress(ValueError, OverflowError):
        numbers = json.loads(last)
        if isinstance(numbers, dict) and numbers and all(map(_is_number, numbers.values())):
            return numbers
    raise ConfigError(
        f'{problem}the last line printed is {last[:200]!r}; expected numbers in JSON, as {{"accuracy": 0.5}}'
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
