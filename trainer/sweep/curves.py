"""Keeps the curves of a sweep in three small files, from which its results can be made again.

FOLDER/curves.csv.gz  every evaluation of every run, and what runs must share to be compared
FOLDER/ledger.json    of each run: its compute, wall time, seconds in each state and pipeline scheme
FOLDER/sweep.yaml     what was asked for; with status.json, what came of it
"""

import csv
import gzip
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from trainer.accounting.run_account import ledger_of
from trainer.config import ConfigError
from trainer.jsonl import read_lines
from trainer.scaling.reading.settings import of_config
from trainer.sweep.spec import ASKED, STATUS, Sweep

CURVES, LEDGER, METRICS = "curves.csv.gz", "ledger.json", "metrics.jsonl"
COLUMNS = re.compile(r"step|compute/.+|eval/(.+/)?(pass_rate|pass_rate_se|prompts|samples)")
TOTALS = ("devices_total", "wall_s", "compute")  # of a ledger


def keep_curves(sweep: Sweep, out: Path) -> None:
    """Write what the results need into a folder of its own, in which `table` works as in the sweep's.

    Paths of this machine, in configurations and errors, are not kept.
    """
    if out.exists() and not (out / ASKED).is_file() and any(out.iterdir()):
        raise ConfigError(f"--keep-curves {out} is in use already, and not by a sweep; give another folder")
    if out.resolve() == sweep.folder.resolve():
        raise ConfigError(f"--keep-curves {out} is the folder of the sweep; give another")
    sweep.check_whole()
    out.mkdir(parents=True, exist_ok=True)
    asked = _without_machine(yaml.safe_load((sweep.folder / ASKED).read_text())) | {"curves_only": True}
    (out / ASKED).write_text(yaml.safe_dump(asked, sort_keys=False, allow_unicode=True))
    if (sweep.folder / STATUS).is_file():
        status = json.loads((sweep.folder / STATUS).read_text()) | {"errors": {}}
        (out / STATUS).write_text(json.dumps(status, indent=1))
    rows: list[dict[str, Any]] = []
    ledgers: dict[str, dict[str, Any]] = {}
    unit = ""
    for run in sweep.runs:
        metrics, ledger = run.folder / METRICS, ledger_of(run.folder)
        if not metrics.is_file() or ledger is None:
            continue
        config = _without_machine(yaml.safe_load((run.folder / "config.yaml").read_text()))
        settings = of_config(config, "eval/pass_rate")
        for row in read_lines(metrics):
            if "eval/pass_rate" in row:
                measured = {k: v for k, v in row.items() if COLUMNS.fullmatch(k)}
                rows.append({"run": run.name} | measured | settings)
        roles = {
            name: {"devices": role["devices"], "seconds": role["seconds"]}
            for name, role in ledger["roles"].items()
            if role["devices"]
        }
        scheme = config["pipeline"]["scheme"]
        ledgers[run.name] = {key: ledger[key] for key in TOTALS} | {"scheme": scheme, "roles": roles}
        unit = ledger["unit"]
    (out / CURVES).write_bytes(gzip.compress(_table(rows).encode(), mtime=0))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(ledger)}" for name, ledger in ledgers.items())
    (out / LEDGER).write_text(f'{{"unit": {json.dumps(unit)}, "runs": {{\n{lines}\n}}}}\n')


def _table(rows: list[dict[str, Any]]) -> str:
    text = StringIO()
    columns = dict.fromkeys(["run", *(column for row in rows for column in row)])
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
