"""The controller's process: loads the data, connects to engines and learner, trains, saves, ends."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from trainer.config import Config, ConfigError, EngineConfig
from trainer.controller.bad_rows import write_skipped
from trainer.controller.context import RolloutContext
from trainer.controller.controller import Controller, Emit
from trainer.controller.data import Dataset
from trainer.controller.deadline import Deadline
from trainer.controller.journal import Journal
from trainer.controller.learner_client import LearnerClient
from trainer.controller.mixture import load_tasks, sampler_of
from trainer.controller.parity import parity_gate
from trainer.controller.rewards import Rewards
from trainer.controller.teacher import Teacher
from trainer.engines.pool import EnginePool
from trainer.engines.protocol import EngineClient
from trainer.environments.pool import EnvironmentPool
from trainer.jsonl import append, open_to_append
from trainer.messages import Event, Keep, Pace, Replacement, Shutdown
from trainer.roles import role_name, run_role, started
from trainer.run_folder import EVENTS
from trainer.telemetry import send
from trainer.types import Prompt
from trainer.verifiers.verifier import Scorer

ALIVE_EVERY_S = 2.0
LOGGED = ("ready", "training_begins", "step", "eval")  # kinds of events
_sending = threading.Lock()


def controller_main(
    config: Config,
    model_dir: str,
    engine_conns: Sequence[Connection],
    learner_conn: Connection,
    resume: dict[str, Any] | None,
    telemetry: Connection,
    kind: type[Controller] = Controller,
) -> None:
    """Entry of the spawned process. `resume` is the controller's state in a checkpoint, and its 'path'.
    `kind`: the class of controller; a replay has no engines."""

    async def work(stack: ExitStack, emit: Emit) -> None:
        log = Path(config.run_dir, EVENTS)  # a resume deletes it once it has recorded them
        emit = partial(send_event, telemetry, log=stack.enter_context(open_to_append(log)))
        learner = stack.enter_context(closing(LearnerClient(learner_conn)))
        ctx, dataset = prepare(stack, config, model_dir, engine_conns, emit)
        journal = stack.enter_context(closing(Journal(Path(config.run_dir) / "journal")))
        sampler = sampler_of(config, dataset.train, partial(note, emit))
        controller = kind(ctx, dataset, sampler, learner, journal, emit)
        await _start(controller, resume)
        asyncio.get_running_loop().add_reader(telemetry.fileno(), _hear, telemetry, controller)
        started()
        gc.freeze()  # otherwise a fifth of the time goes into walking the objects of imported modules
        await controller.run()
        await controller.save()
        emit("done", {"step": controller.version, "ended_by": controller.ended_by})

    run_controller(telemetry, work)


def run_controller(telemetry: Connection, work: Callable[[ExitStack, Emit], Awaitable[None]]) -> None:
    """Do the work of the controller's process, or of another in its place. The stack closes what it opens."""

    async def run() -> None:
        with _alive(telemetry), ExitStack() as stack:
            await work(stack, partial(send_event, telemetry))

    run_role("controller", telemetry, lambda: asyncio.run(run()), ends_with_peer=False)


def prepare(
    stack: ExitStack, config: Config, model_dir: str, engine_conns: Sequence[Connection], emit: Emit,
    held_out_only: bool = False,
) -> tuple[RolloutContext, Dataset]:  # fmt: skip
    """Connect and load all that rollouts need, which `stack` closes, and the prompts."""
    clients = [EngineClient(conn, role_name("engine", i)) for i, conn in enumerate(engine_conns)]
    deadline = Deadline(config.pipeline.deadline_s, config.pipeline.start_deadline_s)
    engines = stack.enter_context(closing(EnginePool(clients, deadline.wait_for, partial(note, emit))))
    deadline.silent = engines.silent
    emit("phase", {"name": "loading data and models"})
    from transformers import AutoConfig, AutoTokenizer  # takes seconds, so the pipes are open before

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    dataset = load_tasks(config, tokenizer, held_out_only)
    for skipped in dataset.skipped:
        note(emit, skipped.line)
    if not held_out_only:
        write_skipped(Path(config.run_dir), dataset.skipped)
    phrase = tuple(tokenizer.encode(config.engine.interruption.phrase, add_special_tokens=False))
    rewards, shared, environments = dict[str, Rewards](), dict[Any, Scorer](), dict[str, EnvironmentPool]()
    played_by: dict[str, EnvironmentPool] = {}
    if clients:
        positions = getattr(AutoConfig.from_pretrained(model_dir), "max_position_embeddings", None)
        check_lengths(config.engine, dataset.prompts, len(phrase), positions)
        emit("data", {"train": len(dataset.train), "held_out": len(dataset.held_out)})
        for name in dict.fromkeys(config.scorers.values()):
            one = config.scored[name]
            if one.environment.kind:
                played = EnvironmentPool(one.environment, partial(note, emit))
                environments[name] = stack.enter_context(closing(played))
            else:
                judged = Rewards(one.verifier, partial(note, emit), shared)
                rewards[name] = stack.enter_context(closing(judged))
        rewards = {name: rewards[owner] for name, owner in config.scorers.items() if owner in rewards}
        played_by = {n: environments[owner] for n, owner in config.scorers.items() if owner in environments}
    kl, stops, encode = config.objective.kl, stop_ids(tokenizer, config.engine.stop), encoder(tokenizer)
    teacher = Teacher(kl) if clients and kl.by_url and not held_out_only else None
    return RolloutContext(
        config, engines, rewards, decoder(tokenizer), stops, phrase, deadline, played_by, encode, tokenizer,
        teacher,
    ), dataset  # fmt: skip


def note(emit: Emit, text: str) -> None:
    """Send the launcher a line for the user."""
    emit("note", {"text": text})


async def _start(controller: Controller, resume: dict[str, Any] | None) -> None:
    """Return once learner and engines are ready, hold the run's first weights, and agree on them."""
    wait_for, engine = controller.ctx.deadline.wait_for, controller.ctx.engine
    if teacher := controller.ctx.teacher:
        new = controller.config.engine.longest_completion(len(controller.ctx.phrase_ids))
        longest = max(len(p.token_ids) for p in controller.dataset.train) + new
        await wait_for(teacher.start(controller.ctx.tokenizer, longest), "teacher: start")
    ready = {"learner": await wait_for(controller.learner.ready(), "learner: start", start=True)}
    if controller.config.engine.colocate:  # the learner has moved its weights off the engines' GPUs
        engine.resume()
    if infos := await engine.ready():
        ready["engine"] = infos[0]
    controller.emit("ready", ready)
    if resume is not None:
        controller.restore(resume)
    if infos:
        # They have these weights. A way to push that does not work fails here, not at the first step.
        await controller.weights.push(controller.version)
        held_out = controller.dataset.held_out
        lacking = partial(note, controller.emit) if ready["learner"].get("experts") else None
        gate = parity_gate(controller.ctx, controller.learner, controller.weights, held_out, lacking)
        stage = "parity gate: learner and engine on the same tokens"
        controller.emit("parity", await wait_for(gate, stage))


def check_lengths(
    engine: EngineConfig, prompts: Sequence[Prompt], phrase: int, positions: int | None
) -> None:
    """ConfigError if the longest prompt and completion have more tokens than the model has positions."""
    longest, new = max(len(p.token_ids) for p in prompts), engine.longest_completion(phrase)
    interrupted = engine.interruption.enabled
    keys = "engine.interruption.hi or answer_tokens" if interrupted else "engine.max_new_tokens"
    written = max((len(ids) for p in prompts for ids in p.completions), default=0)
    if written > new:
        new, keys = written, "the length of the data's completions"
    if positions is not None and longest + new > positions:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and a completion up to {new}; the model has "
            f"{positions} positions: lower {keys}, or data.max_prompt_tokens"
        )


def send_event(telemetry: Connection, kind: str, data: dict[str, Any], log: IO[str] | None = None) -> None:
    """Send the launcher an event of this moment, and log it first if the run's record is made of it.

    This process outlives a killed launcher by the step under way, which a resume records from the log.
    """
    with _sending:
        event = Event(kind, time.monotonic(), data)
        if log is not None and kind in LOGGED:
            append(log, asdict(event))
        send(telemetry, event)


@contextmanager
def _alive(telemetry: Connection) -> Iterator[None]:
    """Let the launcher know that this process is not frozen: all others wait for it. A thread says so, since
    loading data, or a long journal, may take the event loop's thread for minutes."""
    ended = threading.Event()

    def say() -> None:
        while not ended.wait(ALIVE_EVERY_S):
            send_event(telemetry, "alive", {})

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


async def until_stopped(work: Coroutine[Any, Any, None], telemetry: Connection, engines: EnginePool) -> None:
    """Do the work, until the launcher says to stop or dies; take in the engines that it has restarted."""
    task, loop = asyncio.create_task(work), asyncio.get_running_loop()

    def hear() -> None:
        try:
            message = telemetry.recv()
        except (EOFError, OSError):
            message = None
        if isinstance(message, Replacement):
            replacing = asyncio.ensure_future(engines.replace(EngineClient(message.conn, message.role)))
            task.add_done_callback(lambda _: replacing.cancel())
        else:
            loop.remove_reader(telemetry.fileno())
            task.cancel()

    loop.add_reader(telemetry.fileno(), hear)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def _hear(telemetry: Connection, controller: Controller) -> None:
    """Take in an engine that the launcher has restarted, keep a checkpoint, note the pace, or stop, also
    if it is dead.

    Ctrl-C can still follow the message that the run is complete: then the last weights are not evaluated.
    """
    try:
        message = telemetry.recv()
    except (EOFError, OSError):
        message = Shutdown()
    if isinstance(message, Replacement):
        engine = EngineClient(message.conn, message.role)
        controller.spawn(controller.ctx.engine.replace(engine), f"replace {message.role}")
    elif isinstance(message, Keep):
        controller.keep = message.compute
    elif isinstance(message, Pace):
        controller.pace = message.compute
    else:
        controller.complete_by = message.ended_by
        if not message.ended_by:
            asyncio.get_running_loop().remove_reader(telemetry.fileno())
        controller.stop.set()


def decoder(tokenizer: Any) -> Callable[[list[list[int]]], list[str]]:
    """Texts without special tokens, many at a time."""
    fast = getattr(tokenizer, "backend_tokenizer", None)  # five times as fast as its Python wrapper
    decode = tokenizer.batch_decode if fast is None else fast.decode_batch
    return lambda ids: decode(ids, skip_special_tokens=True)


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Ids of a text, without special tokens of its own."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return partial(tokenizer.encode, add_special_tokens=False)
    fast.no_padding()
    fast.no_truncation()
    return lambda text: list(fast.encode(text, add_special_tokens=False).ids)


def stop_ids(tokenizer: Any, stop: Sequence[str]) -> frozenset[int]:
    """EOS and every token whose text contains one of the stop texts."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if stop:
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        for text in stop:
            matching = {i for i, t in enumerate(texts) if text in t}
            if not matching:
                raise ConfigError(
                    f"engine.stop: no token of this tokenizer contains {text!r}; give a text within one token"
                )
            ids |= matching
    return frozenset(ids)
