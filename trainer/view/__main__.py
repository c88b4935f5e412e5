"""Shows runs in a browser while they train: the curve, metrics, warnings, processes, and every rollout.

  sigmoid-rl view runs/demo-0                          one run; the address with its token is printed
  sigmoid-rl view runs/a runs/b --port 8010            two runs side by side, on a port of your choice
  sigmoid-rl view runs/demo-0 --export demo.html       one file with the curve and 200 groups, to send

The page is on 127.0.0.1 and needs the token in the printed address. From another machine:
ssh -L PORT:127.0.0.1:PORT HOST, and then the same address here. It reads the run's files and writes none.
"""

import argparse
import asyncio
import importlib.util
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from trainer.cli import Parser, fail
from trainer.config import ConfigError
from trainer.scaling.layout import short_names
from trainer.view.state import RunState, open_run

TOKEN = "SIGMOID_RL_TOKEN"  # environment variable, as for `sigmoid-rl serve`
NICE = 10  # the cores belong to the training


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: ended by Ctrl-C, or the file is written. 2: wrong input. 1: a failure."""
    try:
        args = _parser().parse_args(argv)
        names = short_names([str(Path(run)) for run in args.runs])
        runs = [open_run(Path(run), name) for run, name in zip(args.runs, names, strict=True)]
        if args.export:
            return _export(runs, Path(args.export))
        return _serve(runs, args.port)
    except ConfigError as e:
        return fail(str(e), 2)
    except OSError as e:
        return fail(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", 1)


def _parser() -> Parser:
    parser = Parser(
        prog="sigmoid-rl view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1 (default: a free one)")
    parser.add_argument("--export", metavar="FILE", help="write one self-contained HTML file instead")
    return parser


def _export(runs: Sequence[RunState], out: Path) -> int:
    from trainer.view.page import export

    written, total = export(runs, out)
    print(f"{out}: {written} of {total} groups, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def _serve(runs: Sequence[RunState], port: int) -> int:
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("aiohttp is missing: pip install '.[train]'")
    from trainer.view.server import View, serve

    os.nice(NICE)
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as e:
        raise ConfigError(f"--port {port}: {getattr(e, 'strerror', e)}; give another one, or none") from e
    token, port = os.environ.get(TOKEN) or secrets.token_urlsafe(24), listener.getsockname()[1]
    print(f"http://127.0.0.1:{port}/?token={quote(token, safe='')}", flush=True)
    print("Ctrl-C ends it; the runs go on", file=sys.stderr)
    with suppress(KeyboardInterrupt), listener:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        asyncio.run(serve(View(runs, token, port), listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
