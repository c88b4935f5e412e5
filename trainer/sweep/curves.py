"""Keeps the curves of a sweep, a few kB a run, from which its results can be made again."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from trainer.config import ConfigError
from trainer.jsonl import read_lines
from trainer.sweep.spec import ASKED, STATUS, Sweep

CONFIG, ENDED = "config.yaml", "ended.json"
METRICS = re.compile(r"step|compute/.+|eval/(.+/)?(pass_rate|pass_rate_se|prompts|samples)")
TOTALS = ("unit", "devices_total", "wall_s", "compute")  # of the ledger


def keep_curves(sweep: Sweep, out: Path) -> None:
    """Copy what the results need into a folder of its own, in which `table` works as in the sweep's.

    Paths of this machine, in configurations and errors, are not copied.
    """
    if out.exists() and not (out / ASKED).is_file() and any(out.iterdir()):
        raise ConfigError(f"--keep-curves {out} is in use already, and not by a sweep; give another folder")
    if out.resolve() == sweep.folder.resolve():
        raise ConfigError(f"--keep-curves {out} is the folder of the sweep; give another")
    out.mkdir(parents=True, exist_ok=True)
    asked = _without_machine(yaml.safe_load((sweep.folder / ASKED).read_text())) | {"curves_only": True}
    (out / ASKED).write_text(yaml.safe_dump(asked, sort_keys=False, allow_unicode=True))
    if (sweep.folder / STATUS).is_file():
        status = json.loads((sweep.folder / STATUS).read_text()) | {"errors": {}}
        (out / STATUS).write_text(json.dumps(status, indent=1))
    for run in sweep.runs:
        metrics, ledger = run.folder / "metrics.jsonl", run.folder / "ledger.json"
        if not metrics.is_file() or not ledger.is_file():
            continue
        copy = out / run.name
        copy.mkdir(exist_ok=True)
        rows = [row for row in read_lines(metrics) if "eval/pass_rate" in row]
        kept = [{k: v for k, v in row.items() if METRICS.fullmatch(k)} for row in rows]
        (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        books = json.loads(ledger.read_text())
        roles = {name: role for name, role in books["roles"].items() if role["devices"]}
        totals = {key: books[key] for key in TOTALS} | {"roles": roles}
        (copy / "ledger.json").write_text(json.dumps(totals) + "\n")
        config = _without_machine(yaml.safe_load((run.folder / CONFIG).read_text())) | {"run_dir": run.name}
        (copy / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        if (run.folder / ENDED).is_file():
            shutil.copy(run.folder / ENDED, copy / ENDED)


def _without_machine(x: Any) -> Any:
    """The same, with absolute paths relative to the working directory, or by their last part if elsewhere."""
    match x:
        case dict():
            return {key: _without_machine(value) for key, value in x.items()}
        case list():
            return [_without_machine(value) for value in x]
        case str() if x.startswith("--") and "=" in x:
            key, _, value = x.partition("=")
            return f"{key}={_without_machine(value)}"
        case str() if Path(x).is_absolute():
            path = Path(x)
            return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    return x
