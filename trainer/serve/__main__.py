"""Serves a model, a checkpoint or a run over HTTP: token ids in, ids and log-probs out, and OpenAI's routes.

  python -m trainer.serve runs/demo-0        the run's newest weights, and each new checkpoint when it comes
  python -m trainer.serve runs/demo-0@48     the weights of step 48
  python -m trainer.serve ./my-llm           a model; also a hub name, a built-in model, a checkpoint's folder
  python -m trainer.serve runs/demo-0 --name arc --score ./arc.sh    each checkpoint's score by a command

Every request needs the header `Authorization: Bearer TOKEN`: $SIGMOID_RL_TOKEN, or a new one that is printed.
The engines are those of the run's config, else the defaults, under --engine.KEY VALUE.
A prompt and its completion together have at most data.max_prompt_tokens + engine.max_new_tokens tokens.
"""

import argparse
import importlib.util
import os
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trainer import cli
from trainer.config import ConfigError
from trainer.config.typed import fields
from trainer.evaluate.__main__ import decided
from trainer.gpus import number_as_listed
from trainer.launcher.supervisor import SERVER, RoleDied, Supervisor
from trainer.launcher.terminal_plot import printable
from trainer.main import check_packages
from trainer.messages import Event
from trainer.run_folder import RESULTS, lock_folder
from trainer.serve.endpoint import KEYS, Endpoint, Plan, plan

TOKEN = "SIGMOID_RL_TOKEN"  # environment variable: what every request must bring
SCORE = "score a run's checkpoints by this shell command, which asks the server and prints JSON"
FLAGS = {
    "--host": ("ADDRESS", "127.0.0.1", "address to listen on; any but loopback is seen by other machines"),
    "--port": ("PORT", 8000, "port to listen on; 0: a free one, which is printed"),
    "--score": ("COMMAND", "", SCORE),
    "--name": ("NAME", "", "with --score: of the curve, eval/NAME/…"),
    "--out": ("FOLDER", "", "of the logs (default: RUN/serve, else runs/serve/NAME)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: ended by Ctrl-C, or all is scored. 2: wrong input. 1: a failure. 130: a second Ctrl-C."""
    try:
        flags = {key: raw for key, raw in vars(_parser().parse_args(argv)).items() if raw is not None}
        number_as_listed()
        what, host, port, out = (flags.pop(name) for name in ("what", "host", "port", "out"))
        command, name = flags.pop("score"), flags.pop("name")
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError("aiohttp is missing: pip install '.[train]'")
        endpoint = Endpoint(host, port, os.environ.get(TOKEN) or secrets.token_urlsafe(24))
        serve(plan(what, flags, out, endpoint, command, name))
        return 0
    except ConfigError as e:
        return cli.fail(str(e), 2)
    except (RoleDied, OSError) as e:
        return cli.fail(str(e), 1)
    except KeyboardInterrupt:
        return cli.fail("ended by a second Ctrl-C", 130)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m trainer.serve",
        usage="%(prog)s WHAT [--score COMMAND --name NAME] [--host ADDRESS] [--port PORT] [--out FOLDER] "
        "[--SECTION.KEY VALUE ...]",
        formatter_class=argparse.RawTextHelpFormatter,
        description=__doc__,
    )
    parser.add_argument("what", metavar="WHAT", help="a run, RUN@STEP, or a model")
    for flag, (metavar, default, text) in FLAGS.items():
        parser.add_argument(flag, metavar=metavar, default=default, type=type(default), help=text)
    cli.add_keys(parser, hidden=tuple(key for key in fields() if key not in KEYS))
    return parser


def serve(plan: Plan) -> None:
    """Start the engines and the server, and return when Ctrl-C has ended them."""
    check_packages(plan.config)
    config, devices = decided(plan.config, plan.slots_are_set)
    with lock_folder(Path(config.run_dir), "--out"):
        print(devices.describe(), file=sys.stderr)
        run = plan.endpoint.run or config.run_dir
        start = {"path": plan.model, "endpoint": plan.endpoint, "served_run": run}
        Supervisor(config, plan.model, devices, start, partial(_show, plan.endpoint), SERVER).run()
    if scoring := plan.endpoint.scoring:
        print(f"the scores are in {scoring.folder / RESULTS}, as eval/{scoring.name}/…", file=sys.stderr)


def _show(endpoint: Endpoint, role: str, message: object) -> None:
    """Print a note of a role; with the one that the server listens, the token, if it is new."""
    if isinstance(message, Event) and message.kind == "note":
        if message.data["text"].startswith(f"serving {endpoint.name} at ") and not os.environ.get(TOKEN):
            print(f"token {endpoint.token} (${TOKEN} is not set)", file=sys.stderr)
        print(printable(message.data["text"]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
