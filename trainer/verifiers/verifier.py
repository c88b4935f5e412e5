"""The base class of all kinds of verifiers, and their registry.

A kind is a class in a module of `kinds/`; the methods that it defines are what it can do:

    completion -> quick: compares text, in the controller's process
                    | None: not settled
                    v
                  slow: may evaluate the text, in a worker that can be killed; or what `start` returns
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol

from trainer.config import Config, ConfigError, VerifierConfig
from trainer.types import CORRECT, UNPARSABLE, WRONG, Answer, Outcome, Prompt, Verdict
from trainer.verifiers import kinds

OWN = "module:function"  # the kind of a user's function, whose name is its import path
_classes: dict[str, type[Verifier]] = {}  # by name, as the modules of kinds/ are imported
Note = Callable[[str], None]  # takes a line for the user
Judgement = Callable[[str, Answer, dict[str, Any]], Awaitable[Verdict]]  # of completion, answer and columns


class Scorer(Protocol):
    """Scores completions during a run, until it is closed."""

    async def score(self, prompt: Prompt, completion: str) -> Verdict: ...

    @property
    def close(self) -> Callable[[], None]: ...


class Verifier:
    """A kind. The docstring of a subclass says what is right, in `--help`."""

    error: Outcome = "unparsable"  # the outcome where `slow` raises
    extra: tuple[str, str] | None = None  # an optional dependency in setup.py, and what needs it

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __init_subclass__(cls, *, kind: str) -> None:
        _classes[kind] = cls

    def check(self, settings: VerifierConfig, config: Config) -> None:
        """Raise ConfigError for settings that this kind cannot have."""

    def problem(self, prompt: Prompt) -> str:
        """Say why no completion can match the gold answer, after "the answer is ..."; empty if one can."""
        return ""

    def compare(self, completion: str, answer: str, metadata: dict[str, Any]) -> Verdict | None:
        """Judge by one gold answer, in microseconds; None if a worker must decide."""
        return None

    def slow(self, completion: str, answer: Any, metadata: dict[str, Any]) -> Verdict:
        """Judge in a worker. Several gold answers come as a list."""
        raise NotImplementedError

    def load(self) -> None:
        """Import what `slow` needs, before the workers are forked."""

    def may_execute(self, completion: str) -> bool:
        """True if `slow` may have executed text that changed its worker, which is then replaced."""
        return False

    def vote(self, completion: str, prompt: Prompt) -> Hashable | None:
        """The completion's answer for maj@k: equal ones compare equal; None if it has none."""
        raise NotImplementedError

    def start(self, settings: VerifierConfig) -> Judgement | None:
        """Return a function that judges instead of a worker, such as one that starts sandboxes."""
        return None

    def open(self, settings: VerifierConfig, note: Note, shared: dict[Any, Scorer]) -> Scorer | None:
        """Start a scorer that is no pool, if the kind has one; `shared`: those that several tasks use."""
        return None

    @property
    def needs_worker(self) -> bool:
        """True if some completions are judged by `slow`."""
        return type(self).slow is not Verifier.slow

    @property
    def votes(self) -> bool:
        """True if this kind has answers to compare."""
        return type(self).vote is not Verifier.vote

    def quick(self, completion: str, answer: Answer, metadata: dict[str, Any]) -> Verdict | None:
        """Judge by comparing text: any of several gold answers is right; None if a worker must decide."""
        verdicts = [self.compare(completion, one, metadata) for one in accepted(answer)]
        return next((v for v in (CORRECT, None, WRONG) if v in verdicts), UNPARSABLE)


def registry() -> dict[str, type[Verifier]]:
    """The class of every kind by its name, a user's function last."""
    _import_kinds()
    return dict(sorted(_classes.items(), key=lambda item: (item[0] == OWN, item[0])))


@cache
def _import_kinds() -> None:
    for module in iter_modules(kinds.__path__):
        import_module(f"{kinds.__name__}.{module.name}")


def find(kind: str) -> Verifier:
    """The verifier of a kind; ConfigError if there is none of this name."""
    module, _, function = kind.partition(":")
    name = OWN if module and function.isidentifier() else kind
    if name not in registry():
        raise ConfigError(f"verifier.kind {kind!r}: expected {', '.join(built_in())}, or {OWN}")
    return registry()[name](kind)


def built_in() -> list[str]:
    """The names of the kinds that come with the trainer."""
    return [kind for kind in registry() if kind != OWN]


def kinds_help() -> str:
    """Say what is right under each kind, for `--help`."""
    return " ".join(f"`{kind}`: {verifier.__doc__}" for kind, verifier in registry().items())


def accepted(answer: Answer) -> tuple[str, ...]:
    """The gold answers, each of which is right."""
    return (answer,) if isinstance(answer, str) else answer


def check_verifiers(config: Config) -> None:
    """Raise ConfigError for scorers that cannot be meant, and for maj@k or best@k without what they need."""
    for name, one in config.scored.items():
        settings = one.verifier
        try:
            for kind in settings.kinds:
                find(kind).check(settings, config)
                if settings.kinds.count(kind) > 1:
                    raise ConfigError(f"verifier.extra: {kind} is given twice; expected different kinds")
            if {} in [settings.weight, *(scorer.weight for scorer in settings.extra)]:
                raise ConfigError("verifier.weight is empty; expected a number, or {step: number}")
        except ConfigError as e:
            key = f"evaluation.sets.{name}" if name in config.sets else f"mixture.{name}"
            raise ConfigError(f"{key}: {e}" if name else str(e)) from e
    verifiers = [one.verifier for one in config.scored.values()]
    if config.evaluation.best_at and not any("judge" in v.kinds for v in verifiers):
        raise ConfigError("evaluation.best_at needs a judge: give verifier.extra [{kind: judge, weight: 0}]")
    if config.evaluation.maj_at and not any(find(v.kind).votes for v in verifiers):
        voting = ", ".join(kind for kind in built_in() if find(kind).votes)
        raise ConfigError(f"evaluation.maj_at needs answers to compare: a verifier.kind of {voting}")
