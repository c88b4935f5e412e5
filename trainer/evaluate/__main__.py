"""Scores a model, or the checkpoints of a run, on held-out prompts, without training.

  python -m trainer.evaluate runs/demo-0          every checkpoint that is there: the run's curve again
  python -m trainer.evaluate runs/demo-0 --task my_task.yaml             the run on other prompts
  python -m trainer.evaluate runs/demo-0@48 --evaluation.samples 64 --evaluation.pass_at [1,8,64] --name many
  python -m trainer.evaluate ./my-llm --recipe scalerl --task my_task.yaml     a model before any training
  python -m trainer.evaluate ./my-llm --task my_task.yaml --dry-run            what would be asked, and where

A run is asked as it was in training: its held-out prompts, lengths, interruption, temperature and stop texts,
which the command line can change. --task replaces data, verifier and `evaluation`. A model is asked what
`python -m trainer.main` with the same flags would ask it before step 1. At most data.held_out prompts of a
set are asked: all, if the source has no more.

Results are in RUN/evaluations/NAME, else in runs/evaluate/MODEL-NAME: results.jsonl, samples.jsonl with all
completions, and report.html. Those of a run are a curve of it, over its compute:

  python -m trainer.scaling fit runs/demo-0 --reward-column eval/NAME/pass_rate

The same command goes on where a broken-off one ended, and with checkpoints that have come since.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from trainer import cli
from trainer.config import Config, ConfigError
from trainer.config.layers import flat
from trainer.config.typed import fields
from trainer.controller.examine import examine
from trainer.evaluate.page import write_page
from trainer.evaluate.question import ASKED, Checkpoint, Question, check_same, question_of
from trainer.evaluate.record import Record, results
from trainer.evaluate.view import View, show, table
from trainer.gpus import cpu_cores, number_as_listed, smallest_gpu_memory, usable_gpus
from trainer.launcher import placement
from trainer.launcher.memory_estimate import known_size, stays_on_cpu, with_slots
from trainer.launcher.placement import Devices
from trainer.launcher.supervisor import EVALUATION, RoleDied, Supervisor
from trainer.main import check_packages
from trainer.run_folder import lock_folder
from trainer.scaling.report.page import write_report

OF_TRAINING = (  # keys, or how they begin, that change no score
    "run_dir", "model.path", "pipeline.", "learner.", "objective.", "curriculum.", "forecast.", "guard.",
    "logging.",
)  # fmt: skip
FLAGS = {
    "--recipe": ("NAME_OR_FILE", "for a model that is no run's: the recipe whose engine settings hold"),
    "--task": ("NAME_OR_FILE", "the prompts, and how they are verified"),
    "--name": ("NAME", "of the results (default: that of the task, or held_out)"),
    "--out": ("FOLDER", "of the results"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every checkpoint is scored. 2: wrong input. 1: a failure. 130: Ctrl-C."""
    try:
        flags = {key: raw for key, raw in vars(_parser().parse_args(argv)).items() if raw is not None}
        number_as_listed()
        only_said = flags.pop("dry_run")
        question = question_of(flags.pop("what"), flags)
        check_packages(question.config)
        config, devices = decided(question.config, question.slots_are_set)
        return (dry_run if only_said else evaluate)(replace(question, config=config), devices)
    except ConfigError as e:
        return cli.fail(str(e), 2)
    except OSError as e:
        return cli.fail(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", 1)
    except KeyboardInterrupt:
        return cli.fail("ended by Ctrl-C; the same command goes on", 130)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m trainer.evaluate",
        usage="%(prog)s WHAT [--task NAME_OR_FILE] [--name NAME] [--out FOLDER] [--dry-run] "
        "[--SECTION.KEY VALUE ...]",
        formatter_class=argparse.RawTextHelpFormatter,
        description=__doc__,
    )
    what = "RUN, RUN@STEP, the folder of a checkpoint or of a model, a hub name, or a built-in model"
    parser.add_argument("what", metavar="WHAT", help=what)
    for flag, (metavar, text) in FLAGS.items():
        parser.add_argument(flag, metavar=metavar, help=text)
    text = "print what would be asked of which checkpoints, and where; start nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    cli.add_keys(parser, hidden=OF_TRAINING)
    return parser


def decided(config: Config, slots_are_set: bool) -> tuple[Config, Devices]:
    """The config with what `auto` stands for on this machine, for engines without a learner."""
    gpus = () if stays_on_cpu(config) else placement.without_judges(config, usable_gpus())
    config = placement.with_engine(placement.with_dtype(config, len(gpus)), len(gpus))
    config = replace(config, engine=replace(config.engine, colocate=False, weight_push="file"))
    if config.engine.kind == "vllm" and not config.engine.urls:
        from trainer.engines.vllm.engine import check_installed

        check_installed()
    devices = placement.engines_alone(config, gpus, len(cpu_cores()))
    if slow := placement.slow_dtype(config, devices):
        raise ConfigError(slow)
    if not slots_are_set:
        config = with_slots(config, known_size(config.model.path), devices, smallest_gpu_memory())
    return config, devices


def dry_run(question: Question, devices: Devices) -> int:
    """Print the checkpoints, the data, the devices, and the keys that decide the scores where they are no
    defaults; start nothing."""
    check_same(question)
    for notice in question.notices:
        print(f"note: {notice}", file=sys.stderr)
    done = {row["step"] for row in results(Path(question.config.run_dir))}
    for checkpoint in question.checkpoints:
        print(f"step {checkpoint.step}: {checkpoint.folder}{', done' * (checkpoint.step in done)}")
    keys, values = cli.differing(fields(), question.config, Config()), dict(flat(asdict(question.config)))
    print("\n".join(f"{key}: {values[key]}" for key in keys if key.startswith(ASKED)))
    print("\n".join(examine(question.config)[0]))
    print(f"{devices.describe()}\nresults: {question.config.run_dir}")
    return 0


def evaluate(question: Question, devices: Devices) -> int:
    """Score what has no results yet, and show all that there are."""
    folder, problem = Path(question.config.run_dir), ""
    with lock_folder(folder, "--out"):
        check_same(question)
        done = {row["step"] for row in results(folder)}
        if remaining := [checkpoint for checkpoint in question.checkpoints if checkpoint.step not in done]:
            problem = _score(question, devices, remaining)
        if rows := results(folder):
            show(table(rows, question.name, question.unit))
            print(write_page(question))
            if question.run and (question.run / "report.html").is_file():
                write_report(question.run)
    if problem:
        return cli.fail(f"{problem}; what is done is kept in {folder}, and the same command goes on", 1)
    done = {row["step"] for row in rows}
    missing = [str(c.step) for c in remaining if c.step not in done and Path(c.folder).is_dir()]
    if missing:
        return cli.fail(f"stopped before steps {', '.join(missing)}; the same command goes on", 130)
    return 0


def _score(question: Question, devices: Devices, checkpoints: Sequence[Checkpoint]) -> str:
    """Score these with one start of the engines; returns what went wrong, if anything did."""
    folders = [checkpoint.folder for checkpoint in checkpoints]
    start = {"path": folders[0], "checkpoints": [(c.step, c.folder) for c in checkpoints]}
    with View(len(checkpoints)) as view, closing(Record(question, devices, view)) as record:
        for notice in (*question.notices, devices.describe()):
            view.log(notice)
        try:
            Supervisor(question.config, folders[0], devices, start, record.handle, EVALUATION).run()
        except RoleDied as e:
            gone = [folder for folder in folders if not Path(folder).is_dir()]
            return f"{gone[0]} was deleted meanwhile (logging.keep_at keeps checkpoints)" if gone else str(e)
    return ""


if __name__ == "__main__":
    sys.exit(main())
