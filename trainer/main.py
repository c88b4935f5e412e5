"""`python -m trainer.main`: trains a model, keeps the ledger, fits the curve. `--help` explains every key."""

import importlib.util
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from trainer.beginning import begin, source_of, starting_checkpoint
from trainer.cli import Launch, fail, parse, to_yaml
from trainer.config import Config, ConfigError
from trainer.controller.sources import check_sources
from trainer.gpus import cpu_cores, number_as_listed, smallest_gpu_memory, usable_gpus
from trainer.launcher import memory_estimate, placement, room
from trainer.launcher.memory_estimate import ModelSize, known_size
from trainer.launcher.notices import notices
from trainer.launcher.placement import Devices, slow_dtype, torchrun_ranks, without_judges
from trainer.roles import STOPS
from trainer.run_folder import claim, copy_tokenizer, devices_by_role, latest


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: trained (or stopped by Ctrl-C and saved). 2: wrong input. 1: a failure, with its cause."""
    launch = None
    try:
        launch = parse(sys.argv[1:] if argv is None else argv)
        check_packages(launch.config)
        launch = decided(launch)
        if launch.dry_run and argv is None:  # this is the process's own work
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
        return dry_run(launch) if launch.dry_run else train(launch)
    except ConfigError as e:
        return fail(str(e), 2)
    except OSError as e:
        where = e.filename or (launch and f"while writing to {launch.config.run_dir}")
        return fail(f"{e.strerror or e}{f': {where}' if where else ''}", 1)
    except KeyboardInterrupt:
        return fail("ended by Ctrl-C", 130)


def check_packages(config: Config) -> None:
    """ConfigError without a package that the run or its data need: `pip install .` brings the curve alone."""
    check_sources(config)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is missing: pip install '.[train]'")


def decided(launch: Launch) -> Launch:
    """The launch with what `auto` stands for on this machine, and a notice of it."""
    number_as_listed()
    gpus = len(without_judges(launch.config, usable_gpus()))
    if launch.replay:  # no engine that the learner would have to make room for
        engine = replace(launch.config.engine, kind="torch", urls=(), colocate=False, weight_push="auto")
        launch = replace(launch, config=replace(launch.config, engine=engine))
    config, notes = launch.config, launch.notices
    if not any("engine.colocate" in keys for keys in launch.origins.values()):
        config = replace(config, engine=replace(config.engine, colocate=False))  # chosen for other GPUs
    used = 0 if memory_estimate.stays_on_cpu(config) else gpus
    if "recipe own" in launch.origins:
        notes += ("recipe own: ScaleRL with the sizes of a first run; --recipe chooses another",)
    if config.model.dtype == "auto" and used:
        notes += ("model.dtype bfloat16, as there are GPUs; master weights and LM head stay FP32",)
    config = placement.with_engine(placement.with_dtype(config, used), gpus)
    return replace(launch, config=config, notices=notes)


def train(launch: Launch) -> int:
    """Train, and print the summary of the run."""
    from trainer.controller.examine import NoTokenizer
    from trainer.controller.mixture import load_tasks
    from trainer.engines.vllm.engine import check_installed
    from trainer.launcher.recorder import Recorder  # takes a second, which --help need not wait for
    from trainer.launcher.summary import finish
    from trainer.launcher.supervisor import CONTROLLER, REPLAY, RoleDied, Supervisor
    from trainer.launcher.terminal import make_view
    from trainer.models.resolve import resolve_model

    config = launch.config
    if config.engine.kind == "vllm" and not config.engine.urls:
        check_installed()
    devices = split(launch)
    if slow := slow_dtype(config, devices):
        raise ConfigError(slow)
    if devices.world and int(os.environ["RANK"]) > 0:
        return follow(launch, devices)
    if launch.config.pipeline.epochs_of_data:
        launch = with_steps(launch, len(load_tasks(config, NoTokenizer()).train))
        config = launch.config
    source = source_of(launch)
    with claim(config.run_dir, launch.resume), make_view(config, devices.unit) as view:
        beginning = begin(launch, source, devices.unit)
        for note in (*notices(launch), *beginning.notes):
            view.log(note)
        view.phase("preparing the model")
        model = beginning.start["path"] if beginning.start else resolve_model(config.model.path)
        copy_tokenizer(model, config.run_dir)
        view.log(f"curve, metrics and rollouts in a browser: sigmoid-rl view {config.run_dir}")
        size = memory_estimate.size_of(model)
        config, devices, fixed = planned(launch, size)
        view.log(devices.describe())
        gpu, devices_of = smallest_gpu_memory(), partial(split, launch)
        if plan := room.plan(config, size, devices, gpu, launch.config, fixed, devices_of):
            view.log(plan)
        rank, unchecked = memory_estimate.check_fits(config, size, devices, gpu)
        if unchecked:
            view.log(unchecked)
        recorder = Recorder(config, devices, view, beginning.resume, rank / 1e9)
        controller = REPLAY if beginning.recorded else CONTROLLER
        supervisor = Supervisor(config, model, devices, beginning.start, recorder.handle, controller)
        recorder.ask = supervisor.send_controller
        try:
            with closing(recorder):
                supervisor.run()
        except (RoleDied, KeyboardInterrupt) as e:
            view.close()  # the error line comes last
            cause, code = (str(e), 1) if isinstance(e, RoleDied) else ("ended by Ctrl-C", 130)
            saved = latest(config.run_dir)
            advice = f"continue from {saved.name} with --resume" if saved else "no checkpoint was written yet"
            return fail(f"{cause}; {advice}; the results so far are in {config.run_dir}", code)
        memory = recorder.peak_gb, recorder.estimated_gb
        view.finish(finish(config, recorder.points, recorder.fit, recorder.ledger, memory))
    return 0


def follow(launch: Launch, devices: Devices) -> int:
    """A learner rank that torchrun started: it follows rank 0 until the run ends.

    torchrun sends a signal to stop to every rank; only rank 0 handles it."""
    from trainer.launcher.supervisor import learner_environment
    from trainer.models.resolve import resolve_model

    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
    config = placement.for_roles(launch.config, devices)
    os.environ |= {name: str(value) for name, value in learner_environment(config).items()}
    from trainer.learner.process import learner_main  # torch: it may read them when it is imported

    resume = starting_checkpoint(launch)
    threads = devices.threads(config.learner.threads, len(devices.learner))
    learner_main(config, resume or resolve_model(config.model.path), None, threads, resume, None)
    return 0


def dry_run(launch: Launch) -> int:
    """Print the config, the assignment of devices, the memory and the advice; start nothing."""
    from trainer.controller.examine import examine
    from trainer.launcher.advice import plan

    lines, prompts = examine(launch.config)
    if launch.config.pipeline.epochs_of_data:
        launch = with_steps(launch, prompts)
    size = known_size(launch.config.model.path)
    config, devices, fixed = planned(launch, size)
    lacks = ""
    if config.engine.kind == "vllm" and not config.engine.urls and importlib.util.find_spec("vllm") is None:
        lacks = "vLLM is not installed here: the run would be refused; --engine.kind torch does without"
    for notice in filter(None, (*notices(launch), slow_dtype(config, devices), lacks)):
        print(f"note: {notice}", file=sys.stderr)
    print(to_yaml(config))
    for source, keys in launch.origins.items():
        print(f"set by {source}: {', '.join(keys)}")
    for line in lines:
        print(line)
    gpu, devices_of = smallest_gpu_memory(), partial(split, launch)
    print(memory_estimate.describe(config, devices, size, gpu))
    if size is not None:
        if text := room.plan(config, size, devices, gpu, launch.config, fixed, devices_of):
            print(text)
        if config.engine.colocate:  # what leaves the GPUs must fit the host
            memory_estimate.check_fits(config, size, devices, gpu)
        others = room.fitting(launch.config, size, gpu, fixed, devices_of)
        print(plan(config, size, devices.split(), [(on.split(), c) for c, on in others]).text)
    return 0


def with_steps(launch: Launch, prompts: int) -> Launch:
    """The launch with the steps of pipeline.epochs_of_data, and a notice of it; 0 `prompts`: not known yet.

    ConfigError if the same file, or the command line, asks for other steps."""
    pipeline = launch.config.pipeline
    epochs, batch = pipeline.epochs_of_data, pipeline.prompts_per_step
    if not prompts:
        note = f"pipeline.steps follow from epochs_of_data {epochs:g} once the data are read"
        return replace(launch, notices=(*launch.notices, note))
    steps = math.ceil(epochs * prompts / batch)
    setters = {key: name for name, keys in launch.origins.items() for key in keys}
    goes_on = launch.resume or launch.branch or launch.replay  # from a config.yaml that holds both
    mine = {"the command line", "" if goes_on else setters["pipeline.epochs_of_data"]}
    if setters.get("pipeline.steps") in mine and pipeline.steps != steps:
        raise ConfigError(
            f"pipeline.steps is {pipeline.steps}, and pipeline.epochs_of_data {epochs:g} comes to {steps} "
            f"({prompts} training prompts, {batch} a step); expected one of the two"
        )
    old = f", not {pipeline.steps}" * ("pipeline.steps" in setters and pipeline.steps != steps)
    note = f"pipeline.steps {steps}{old}: {epochs:g} epochs of {prompts} training prompts, {batch} a step"
    config = replace(launch.config, pipeline=replace(pipeline, steps=steps))
    return replace(launch, config=config, notices=(*launch.notices, note))


def planned(launch: Launch, size: ModelSize | None) -> tuple[Config, Devices, set[str]]:
    """The config with what nobody has set chosen by the GPUs' memory, the devices, and the keys that are set.

    Of several GPUs the learner gets as many as make the shortest step."""
    config, gpu = launch.config, smallest_gpu_memory()
    fixed = {key for keys in launch.origins.values() for key in keys}
    if torchrun_ranks()[1]:  # ranks on other machines plan by themselves, and all need the same
        fixed |= {"learner.micro_batch_tokens", "learner.checkpoint_activations"}
    if size is None:
        return config, split(launch), fixed
    if 0 < size.positions <= (new := config.engine.longest_completion(0)):
        raise ConfigError(
            f"a completion has up to {new} tokens; the model has {size.positions} positions, which prompts "
            "need, too: lower engine.max_new_tokens, or engine.interruption.hi or answer_tokens"
        )
    before = 0 if "learner.ranks" in fixed else ranks_before(launch)
    return *room.fitted(config, size, gpu, fixed, partial(split, launch), before), fixed


def ranks_before(launch: Launch) -> int:
    """The learner ranks of a run that goes on, if with them each role has as many devices as before; or 0."""
    had = devices_by_role(launch.config.run_dir if launch.resume else launch.branch.rpartition("@")[0])
    ranks = round(had.get("learner", 0))
    with suppress(ConfigError):
        again = split(launch, room.with_ranks(launch.config, ranks)).by_role()
        return ranks if had == {role: n for role, n in again.items() if n} else 0
    return 0


def split(launch: Launch, config: Config | None = None, count: int = 0) -> Devices:
    """The devices, assigned to the roles as `config` says: this machine's, or `count` GPUs."""
    config = config or launch.config
    gpus = () if memory_estimate.stays_on_cpu(launch.config) else without_judges(config, usable_gpus())
    gpus = tuple(map(str, range(count))) or gpus
    devices = placement.assign(config, gpus, len(cpu_cores()), torchrun_ranks())
    return replace(devices, engines=()) if launch.replay else devices


if __name__ == "__main__":
    sys.exit(main())
