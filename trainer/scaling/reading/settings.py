"""The settings that runs must share to be compared, as far as their files say: keys of SETTINGS."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.run_folder import EVALUATIONS
from trainer.scaling.reading.columns import AT
from trainer.scaling.reading.values import Row, is_known

SETTINGS = ("model", "data", "held-out set", "samples per prompt", "scorer")
GROUPS = {"set": "held-out set", "k": "samples per prompt"}
SET = r"(?P<set>[^/]+)"
NAMED = (  # rewards whose names say what was evaluated
    rf"(?:.+/)?val-core/(?:.+/)?{SET}/[^/]+/mean{AT}(?P<k>\d+)",  # verl: source, variable
    rf"(?:eval|val|validation|test)/(?:.+/)?{SET}/(?:avg|mean){AT}(?P<k>\d+)",  # prime-rl
    r"(?:eval/)?eval_(?P<set>(?!default_).+)_pass1",  # OpenRLHF
    rf"val/test_score/(?:.+/)?{SET}",  # verl, before 0.2
)


def settings_of(path: Path, reward: str, row: Row) -> dict[str, str]:
    """The settings in the config of our run folders, else in columns of these names or the reward's name."""
    config = path.parent / "config.yaml"
    if evaluated := re.fullmatch(r"eval/([^/]+)/(.+)", reward):
        later = path.parent / EVALUATIONS / evaluated[1] / "config.yaml"
        config, reward = (later, f"eval/{evaluated[2]}") if later.is_file() else (config, reward)
    if path.name == "metrics.jsonl" and config.is_file():
        import yaml

        content = yaml.safe_load(config.read_text(encoding="utf-8"))
        return of_config(content, reward) if isinstance(content, dict) else {}
    if known := {key: str(row[key]) for key in SETTINGS if is_known(row.get(key))}:
        return known
    for pattern in NAMED:
        if match := re.fullmatch(pattern, reward):
            named = match.groupdict()
            return {name: named[key] for key, name in GROUPS.items() if key in named}
    return {}


def of_config(config: Mapping[str, Any], reward: str) -> dict[str, str]:
    """The settings of one of our runs."""
    tasks, evaluation = config.get("mixture") or {"": config}, config.get("evaluation", {})
    named = {**tasks, **evaluation.get("sets", {})}  # a further held-out set may be a source alone
    name = max((n for n in named if n and reward.startswith(f"eval/{n}/")), key=len, default="")
    one = named.get(name)
    chosen = [one] if name and isinstance(one, Mapping) else list(tasks.values())
    trained = chosen if name in tasks else tasks.values()
    datas = [task.get("data", {}) for task in chosen]
    sets = (
        d.get("held_out_source") or f"{d.get('held_out') or 'all'} prompts of {_source(d)}" for d in datas
    )
    settings = {
        "model": config.get("model", {}).get("path"),
        "data": " + ".join(_source(task.get("data", {})) for task in trained),
        "held-out set": one if isinstance(one, str) else " + ".join(sets),
        "samples per prompt": chosen[0].get("samples") or evaluation.get("samples"),
        "scorer": " + ".join(str(task.get("verifier", {}).get("kind", "")) for task in chosen),
    }
    return {key: str(value) for key, value in settings.items() if value}


def _source(data: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in (data.get("options") or {}).items())
    return f"{data.get('source')}" + (f" ({options})" if options else "")
