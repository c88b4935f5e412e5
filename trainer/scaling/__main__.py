"""The scaling curve of any trainer's runs: `python -m trainer.scaling COMMAND --help`."""

import argparse
import signal
import sys
from collections.abc import Sequence

from trainer.config import ConfigError
from trainer.scaling.commands import compare, fit, plan, predict, report

COMMANDS = {"fit": fit, "compare": compare, "predict": predict, "plan": plan, "report": report}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: success, also if the data do not identify the ceiling. 2: wrong input."""
    parser = argparse.ArgumentParser(prog="python -m trainer.scaling", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        about = (module.__doc__ or "").partition(": ")[2]
        command = commands.add_parser(name, help=about.split("\n")[0], description=about)
        module.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        COMMANDS[args.command].run(args)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit(main())
