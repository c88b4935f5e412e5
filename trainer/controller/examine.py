"""A look at the data of a run for `--dry-run`: without a tokenizer, and at the files that are here alone."""

import math
from dataclasses import replace
from typing import Any

from trainer.config import Config, SetConfig, TaskConfig
from trainer.controller.conversation import Turn
from trainer.controller.data import read
from trainer.controller.mixture import load_tasks, reader_of
from trainer.controller.sources import FUNCTION, GENERATED, HUB, is_here, sources_of
from trainer.verifiers.pool import VerifierPool


class NoTokenizer:
    """Stands in where the model is not there: a prompt without tokens, whatever the chat template."""

    chat_template, eos_token_id = "unknown", 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []

    def apply_chat_template(self, turns: list[Turn], **options: Any) -> str:
        return ""


def examine(config: Config) -> tuple[list[str], int]:
    """Lines about the data, and the number of training prompts, 0 if it is not known. ConfigError if a file
    here is wrong, or is missing while its folder is here, or a scorer cannot be imported."""
    for name in dict.fromkeys(config.scorers.values()):
        one = config.scored[name]
        if not one.environment.kind and ":" in one.verifier.kind:  # a function of the user's
            VerifierPool(replace(one.verifier, workers=1)).close()
    sources = sources_of(config)
    if all(is_here(source) for source, _ in sources):
        data, lines = load_tasks(config, NoTokenizer()), list[str]()
        for name, task in config.tasks.items():
            train, held_out = (sum(p.task == name for p in x) for x in (data.train, data.held_out))
            files = " and ".join(filter(None, (task.data.source, task.data.held_out_source)))
            lines.append(f"data: {train} different training prompts and {held_out} held out, in {files}")
            first = next(p for p in data.train if p.task == name)
            lines.append(f"data: the first prompt is {first.text[:600]!r}, its answer {first.answer!r:.200}")
        lines += (
            f"data: {len(prompts)} held out for evaluation.sets.{n}" for n, prompts in data.sets.items()
        )
        return [*lines, *(skipped.line for skipped in data.skipped)], len(data.train)
    supervised = config.objective.supervised
    return [line for source, one in sources for line in _lines(source, one, supervised)], 0


def _lines(source: str, one: TaskConfig | SetConfig, supervised: bool) -> list[str]:
    """Lines about a source by itself."""
    if is_here(source):
        learned = supervised and isinstance(one, TaskConfig) and source == one.data.source
        data = read(source, reader_of("", one, NoTokenizer(), learned), math.inf, 0)
        n = len(data.train)
        return [f"data: {n} different prompt{'s' * (n != 1)} in {source}", *(s.line for s in data.skipped)]
    if source.startswith((GENERATED, HUB)) or FUNCTION.fullmatch(source):
        return [f"data: {source}, which only a run reads"]
    return [f"data: {source} is not on this machine, so it is not checked"]
