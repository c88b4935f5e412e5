"""`python -m trainer.main`: trains a model, keeps the ledger, fits the curve. `--help` explains every key."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cli import Launch, parse, to_yaml
from trainer.config import Config, ConfigError
from trainer.run_folder import claim, write_atomic


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: trained (or stopped by Ctrl-C and saved). 2: wrong input. 1: a fault, named."""
    try:
        launch = parse(sys.argv[1:] if argv is None else argv)
        return dry_run(launch) if launch.dry_run else train(launch)
    except ConfigError as e:
        return _fail(str(e), 2)
    except OSError as e:
        return _fail(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", 1)
    except KeyboardInterrupt:
        return _fail(
            "ended by Ctrl-C before a checkpoint was written; --resume goes on from the last one", 130
        )


def train(launch: Launch) -> int:
    """One run, and what is told at its end."""
    from trainer.finish import finish
    from trainer.launcher import (
        Launcher,
        RoleDied,
    )  # imports that take a second wait until --help is answered
    from trainer.models import resolve_model
    from trainer.ui import make_view

    config = launch.config
    lock = claim(config.run_dir, launch.resume)
    resume = checkpoint_state(config) if launch.resume else None
    write_atomic(Path(config.run_dir) / "config.yaml", to_yaml(config))
    with lock, make_view(config) as view:
        view.phase("preparing the model")
        model = resolve_model(config.model.path, seed=config.seed)
        launcher = Launcher(config, resume["path"] if resume else model.folder, view, resume)
        try:
            launcher.run()
        except RoleDied as e:
            from trainer.checkpoint import latest

            saved = latest(config.run_dir)
            advice = f"go on from {saved.name} with --resume" if saved else "no checkpoint was written yet"
            return _fail(f"{e}; {advice}, and what was done so far is in {config.run_dir}", 1)
        view.finish(finish(config, launcher.points, launcher.fit, launcher.ledger))
    return 0


def checkpoint_state(config: Config) -> dict[str, Any]:
    """The controller's state in the newest checkpoint, with the checkpoint's 'path'."""
    from trainer.checkpoint import latest

    path = latest(config.run_dir)
    if path is None:
        raise ConfigError(
            f"--resume: {config.run_dir} holds no checkpoint; start again with another --run-dir"
        )
    return json.loads((Path(path) / "controller.json").read_text()) | {"path": str(path)}


def dry_run(launch: Launch) -> int:
    """Print what would run; start nothing."""
    from trainer.memory import describe

    print(to_yaml(launch.config))
    print(describe(launch.config))
    return 0


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
