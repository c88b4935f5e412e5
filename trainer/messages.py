"""The messages between the processes, sent through pipes (frozen dataclasses, pickled).

    launcher  --- spawns, reads telemetry of --->  controller, engine, learner
    launcher  --- Shutdown, Keep, Pace, Replacement --->  controller
    controller --- Request, UpdateWeights, Transfer, Abort, Pause, Resume, Waits, Shutdown --->  engine
    engine     --- Ready, Completion, Ack --->                                            controller
    controller --- TrainBatch, Push, Ack, Score, Save, Shutdown --->     learner
    learner    --- Ready, StepDone, Written, Refused, Transfer, Scored, Ack --->  controller

A closed pipe means the other side is dead: `recv` raises EOFError at once. A frozen side leaves it full: see
pipes.py. A role that fails sends `Failed` on its telemetry pipe before it exits, so the launcher can name it
and the error in one line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.types import TokenScores, TrainSequence


@dataclass(frozen=True, slots=True)
class Ready:
    """The role can take work. `info`: parameters that a token passes through, dtype, seconds to start."""

    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ack:
    """Answer to UpdateWeights, Transfer, Push, Pause and Save, once that is complete."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the process after the current step; the controller saves a checkpoint first."""

    ended_by: str = ""  # such as "compute": the run is complete, and its last weights are evaluated


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a checkpoint before the next step and never delete it: the first after a chosen compute."""

    compute: float  # device-hours when this was asked


@dataclass(frozen=True, slots=True)
class Pace:
    """The cost of a step so far: where a compute ends the run, the learning rate's schedule ends with it."""

    compute: float  # device-hours a step


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Swap to the safetensors file, or the model's folder, at `path` before the next token; sequences and
    their KV stay. Every token after the Ack is from `version`."""

    version: int
    path: str


@dataclass(frozen=True, slots=True)
class Push:
    """Send the weights to the engines; answered by Transfers, each to be acknowledged, and then by Ack."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A call of vLLM's weight transfer, which the learner asks every engine to make."""

    call: str  # a method of AsyncLLM's
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop after the current token; sequences stay, and KV unless the GPU is shared. Answered by Ack."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue where Pause stopped."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests now; their completions come back partial, with finish_reason 'abort'."""

    request_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Waits:
    """The state in which the engine's time without a request counts from now on: `tools` while episodes wait
    for their environments, `teacher` while groups do for a teacher behind a URL, `evaluate` while only
    episodes of an evaluation wait, else `idle`."""

    state: str


@dataclass(frozen=True, slots=True)
class Score:
    """Ask the learner what its models say of these sequences' tokens, under their current weights."""

    sequences: tuple[TrainSequence, ...]
    logprobs: bool = True  # the policy's, too


@dataclass(frozen=True, slots=True)
class Scored:
    """Answer to Score, by sequence."""

    scores: tuple[TokenScores, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step is complete. `weights_path`: the new weights (safetensors); the reader deletes it."""

    version: int
    weights_path: str
    metrics: dict[str, Any]  # numbers, and under lag/ numbers by lag (learner version − token version)
    written: bool = True  # False: the file is still being written, and Written follows
    # (2, N) log ratio to the generator and entropy, nats, of the loss tokens of each sequence by its index.
    tokens: Mapping[int, NDArray[np.float16]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """The weights at `path` are complete; or they cannot be, for this `problem`."""

    path: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to a TrainBatch whose step would not be finite, the third in a row: nothing was updated."""

    message: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint folder: weights, tokenizer, optimizer, RNG, and the controller's state."""

    path: str
    controller_state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spans:
    """Telemetry: what a role did, as (state, start, end) on the monotonic clock of this machine."""

    role: str
    spans: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Telemetry: something happened. kind: 'step', 'eval', 'sample', 'log', 'progress', 'alive', 'done'."""

    kind: str
    time: float  # monotonic seconds
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replacement:
    """The launcher has started a new engine for one that died; `conn` is the controller's end of its pipe."""

    role: str
    conn: Connection


@dataclass(frozen=True, slots=True)
class Failed:
    """Telemetry: the error that ends the role. `user_error`: a wrong input, shown without a traceback."""

    role: str
    message: str
    traceback: str
    user_error: bool
