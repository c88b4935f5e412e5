"""Keeps the curves of a sweep, a few kB a run, from which its results can be made again."""

import json
import re
import shutil
from pathlib import Path

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
    asked = yaml.safe_load((sweep.folder / ASKED).read_text()) | {"curves_only": True}
    asked["task"] = _without_machine(asked["task"])
    for several in ("recipes", "overrides"):
        asked[several] = [_without_machine(text) for text in asked[several]]
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
        config = yaml.safe_load((run.folder / CONFIG).read_text()) | {"run_dir": run.name}
        for section, key in (("model", "path"), ("data", "source")):
            if key in config.get(section, {}):
                config[section][key] = _without_machine(config[section][key])
        (copy / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        if (run.folder / ENDED).is_file():
            shutil.copy(run.folder / ENDED, copy / ENDED)


def _without_machine(text: str) -> str:
    """A file's absolute path relative to the working directory, or its name alone if it is elsewhere."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
