"""Secrets in a configuration, which config.yaml, the report and W&B would keep: they are refused unseen."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from trainer.config import Config, ConfigError

_KIND = r"token|secret|password|passwd|credential|(?:api_?)?key|sig(?:nature)?|auth(?:orization)?"
_NAME = rf"(?:[\w-]*[_-])?(?:{_KIND})s?"
_IN_URL = re.compile(rf"(?i)://[^/\s@]*@|[?&]{_NAME}=")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_secrets(config: Config) -> None:
    """ConfigError, without the value, for a URL with a password or a key, and for options that are secrets."""
    for key, value in _leaves(asdict(config)):
        name = key.rpartition(".")[2]
        if isinstance(value, str) and _IN_URL.search(value):
            advice = "expected a URL without a name, password or key: a run writes its settings into files"
        elif ".options." in f".{key}" and re.fullmatch(f"(?i){_NAME}", name) and isinstance(value, str):
            advice = "a run writes its settings into files; give the hub's token as $HF_TOKEN"
        elif name == "api_key_env" and value and not _VARIABLE.fullmatch(value):
            advice = "expected the name of an environment variable that holds the key, not the key"
        else:
            continue
        raise ConfigError(f"{key}: {advice}")


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its dotted key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
