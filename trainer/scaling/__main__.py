"""The scaling curve of any trainer's runs: how high they end, which is better, and what more would give.

Every COMMAND has its own --help, with an example. docs/curve.md explains what the commands print, and
docs/logs.md how to get the file out of TRL, verl, prime-rl, OpenRLHF, NeMo-RL, W&B and TensorBoard.

examples:
  python -m trainer.scaling fit run.csv
  python -m trainer.scaling compare ours=seed1.csv,seed2.csv baseline=seed3.csv
  python -m trainer.scaling predict run.csv --at 24000 --reach 0.6
  python -m trainer.scaling across 1B=a.csv 3B=b.csv 8B=c.csv --size 30B
  python -m trainer.scaling allocate 8=a.csv 16=b.csv 32=c.csv --axis group_size
  python -m trainer.scaling inference runs/demo-0 --plot inference.png
  python -m trainer.scaling plan --c-mid 2500 --r0 0.3
  python -m trainer.scaling backtest run-*.csv
  python -m trainer.scaling report run.csv --out report.html
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from trainer.config import ConfigError
from trainer.scaling.reading.options import Parser

COMMANDS = {  # the module of each command is imported only to run it or to show its help
    "fit": "the sigmoid of each run: its ceiling with an interval, or why the data do not determine it",
    "compare": "do recipes differ in ceiling, efficiency or midpoint, and which is best at which budget",
    "predict": "the reward at a budget and the budget for a reward, also in money",
    "across": "what a size of model not trained yet would do, from the curves of three or more sizes",
    "allocate": "which value of an axis, such as the group size, is best at which budget",
    "inference": "how much training doubling the completions of a question is worth",
    "plan": "how long a pilot must be, and how often evaluated, to identify the ceiling",
    "backtest": "were finished runs forecast rightly from their beginnings",
    "report": "one HTML page for one or many runs, complete in itself; pictures for papers",
}


def as_process() -> None:
    """Have `| head` end this process without a traceback, and its workers end with it where a signal does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.excepthook = lambda kind, *e: None if kind is KeyboardInterrupt else sys.__excepthook__(kind, *e)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: success, also if the data do not identify the ceiling. 2: wrong input."""

    argv = sys.argv[1:] if argv is None else argv
    style = argparse.RawDescriptionHelpFormatter
    about, mark, examples = (__doc__ or "").partition("examples:")
    parser = Parser(
        prog="python -m trainer.scaling", description=about, epilog=mark + examples, formatter_class=style
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    chosen = next((arg for arg in argv if arg in COMMANDS), None)
    for name, about in COMMANDS.items():
        text = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=text, allow_abbrev=False)
        if name == chosen:
            options, of_chosen = import_module(f"trainer.scaling.commands.{chosen}").Command, command
            options.add_to(command)
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            of_chosen.error(f"{chosen} has no {' '.join(unknown)}")
        options.from_arguments(args).run(args.inputs)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    as_process()
    sys.exit(main())
