"""The curves of a sweep, kept in small files: its results are made from them again, and a later one goes on.

FOLDER/curves.csv.gz  every evaluation of every run, and what runs must share to be compared
FOLDER/ledger.json    of each run: compute, wall time, seconds in each state, scheme, dtype, how it ended
FOLDER/sweep.yaml     the sweep's options; status.json: its errors, and the recipes that halving stopped
"""

import csv
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from trainer.accounting.run_account import ledger_of
from trainer.cli import to_yaml
from trainer.config import Config, ConfigError
from trainer.jsonl import read_lines, write_atomic
from trainer.run_folder import end_of, record_end
from trainer.scaling.reading.settings import of_config
from trainer.scaling.reading.tables import read_tables
from trainer.sweep.spec import ASKED, STATUS, Sweep, load, load_status

CURVES, LEDGER, METRICS = "curves.csv.gz", "ledger.json", "metrics.jsonl"
COLUMNS = re.compile(r"step|compute/.+|eval/(.+/)?(pass_rate|pass_rate_se|prompts|samples)")
TOTALS = ("devices_total", "wall_s", "compute")  # of a ledger


def keep_curves(sweep: Sweep, out: Path) -> None:
    """Write what the results need into a folder of its own, in which `table` works as in the sweep's.

    Paths of this machine, in configurations and errors, are not kept.
    """
    _check_free(out, sweep)
    sweep.check_whole()
    out.mkdir(parents=True, exist_ok=True)
    asked = _without_machine(yaml.safe_load((sweep.folder / ASKED).read_text())) | {"curves_only": True}
    (out / ASKED).write_text(yaml.safe_dump(asked, sort_keys=False, allow_unicode=True))
    if (sweep.folder / STATUS).is_file():
        replace(load_status(sweep.folder), folder=out, errors={}).write()
    rows, ledgers, unit = list[dict[str, Any]](), dict[str, dict[str, Any]](), ""
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
        settings_of = {"scheme": config["pipeline"]["scheme"], "dtype": config["model"]["dtype"]}
        ended = {"ended": end_of(run.folder)}
        ledgers[run.name] = {key: ledger[key] for key in TOTALS} | settings_of | ended | {"roles": roles}
        unit = ledger["unit"]
    table = StringIO()
    columns = dict.fromkeys(["run", *(column for row in rows for column in row)])
    writer = csv.DictWriter(table, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    (out / CURVES).write_bytes(gzip.compress(table.getvalue().encode(), mtime=0))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(ledger)}" for name, ledger in ledgers.items())
    (out / LEDGER).write_text(f'{{"unit": {json.dumps(unit)}, "runs": {{\n{lines}\n}}}}\n')


def go_on_from(curves: Path, sweep: Sweep, configs: Mapping[str, Config]) -> None:
    """Give the sweep the runs that ended in an earlier sitting, and what halving decided, from their curves.

    Their folders hold evaluations, ledger and configuration, but no checkpoint: a run that ended at a rung
    before the budget, and is to go on, begins again. A run that has a folder is left alone. ConfigError if
    the curves are of another sweep, or of other models, data or verifiers.
    """
    _check_free(curves, sweep)
    if not (curves / CURVES).is_file():
        return
    sweep.check_extends(load(curves), _without_machine)
    if not (sweep.folder / STATUS).exists():
        replace(load_status(curves), folder=sweep.folder).write()
    tables, ledgers = read_tables(curves / CURVES / "*")[1], json.loads((curves / LEDGER).read_text())
    stopped = load_status(sweep.folder).stopped
    for seed, run in ((seed, run) for runs in sweep.groups.values() for seed, run in enumerate(runs)):
        ledger = ledgers["runs"].get(run.name, {})
        ended = ledger.get("ended")
        early = ended and ended["by"] == "compute" and ended["max_compute"] < sweep.budget
        if run.folder.exists() or not ended or (early and run.recipe not in stopped):
            continue
        config = replace(configs[run.recipe], run_dir=str(run.folder), seed=seed)
        settings = of_config(_without_machine(yaml.safe_load(to_yaml(config))), "eval/pass_rate")
        for key, value in settings.items():
            if (before := str(tables[run.name][0].get(key, value))) != value:
                raise ConfigError(
                    f"{curves}: {run.name} was trained with {key} {before}, not {value}; "
                    "give another --keep-curves"
                )
        run.folder.mkdir(parents=True)
        measured = [
            {k: json.loads(cell) for k, cell in row.items() if COLUMNS.fullmatch(k) and cell != ""}
            for row in tables[run.name]
        ]
        write_atomic(run.folder / METRICS, "".join(f"{json.dumps(row)}\n" for row in measured))
        for role in ledger["roles"].values():
            role["states"] = {state: s * role["devices"] for state, s in role["seconds"].items()}
        write_atomic(run.folder / LEDGER, json.dumps(ledger | {"unit": ledgers["unit"]}))
        write_atomic(run.folder / "config.yaml", to_yaml(config))
        record_end(run.folder, **ended)


def _check_free(out: Path, sweep: Sweep) -> None:
    """ConfigError if curves cannot be put into this folder."""
    if out.exists() and not (out / ASKED).is_file() and any(map(Path.is_file, out.iterdir())):
        raise ConfigError(f"--keep-curves {out} is in use already, and not by a sweep; give another folder")
    if out.resolve() == sweep.folder.resolve():
        raise ConfigError(f"--keep-curves {out} is the folder of the sweep; give another")


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
