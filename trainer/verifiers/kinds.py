"""The verifier kinds: which function judges, in the controller's process (quick) or in a worker (slow)."""

import importlib
import re
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from trainer.config import ConfigError
from trainer.types import CORRECT, UNPARSABLE, WRONG, Answer, Prompt, Verdict
from trainer.verifiers.choice import chosen_letter
from trainer.verifiers.code_tests import parse_tests
from trainer.verifiers.math_answer import answer_part, judge_math_quick, judge_math_slow, math_vote
from trainer.verifiers.number import first_number, fold, judge_number, literal_number
from trainer.verifiers.reasoning_gym import decode, may_be_scored

Scorer = Callable[[str, Any, dict[str, Any]], Verdict]  # the answer: text, or a list of accepted ones
_INERT = re.compile(r"[0-9\s+*/^().,%$-]*|[A-Za-z0-9\s+*/^,;!?'%$-]*")


def needs_workers(kind: str) -> bool:
    """Whether some completions of this kind need a worker."""
    return kind not in ("exact", "number", "choice", "code")


def check_answers(kind: str, prompts: Iterable[Prompt]) -> None:
    """ConfigError for gold answers that no completion can match under this kind."""
    for prompt in prompts:
        case = f"the answer to {prompt.text[-60:]!r} is {str(prompt.answer)[:60]!r}"
        if kind == "number" and any(literal_number(answer) is None for answer in accepted(prompt.answer)):
            raise ConfigError(f"verifier.kind number, but {case}, not a literal number; use math or exact")
        if kind == "choice" and "choices" not in prompt.metadata:
            raise ConfigError(f"verifier.kind choice, but {case}, without options; set data.choices_column")
        if kind == "code":
            try:
                parse_tests(prompt.answer, prompt.metadata)
            except Exception as e:  # of many kinds: the tests are the user's data
                case += f", no tests of a known form: {type(e).__name__}: {e}"
                raise ConfigError(f"verifier.kind code, but {case}") from e
        if kind == "reasoning_gym" and "origin" not in prompt.metadata:
            raise ConfigError(f"verifier.kind reasoning_gym, but {case} of another source; use math or exact")
        if kind in ("exact", "math", "number") and str(prompt.answer).startswith(('{"', '[{"')):
            raise ConfigError(f"verifier.kind {kind}, but {case}; expected text, a number or a list of those")
        if kind in ("exact", "math") and not prompt.answer:
            raise ConfigError(f"verifier.kind {kind}, but {case}; use reasoning_gym, the task's own scorer")


def accepted(answer: Answer) -> tuple[str, ...]:
    """The answers that are right."""
    return (answer,) if isinstance(answer, str) else answer


def judge_quick(kind: str, completion: str, answer: Answer) -> Verdict | None:
    """The verdict if comparing text settles it (microseconds), None if a worker must decide."""
    if isinstance(answer, tuple):
        verdicts = [judge_quick(kind, completion, one) for one in answer]
        return next((v for v in (CORRECT, None, WRONG) if v in verdicts), UNPARSABLE)
    if kind == "number":
        return judge_number(completion, answer)
    if kind == "exact":
        return judge_exact(completion, answer)
    if kind == "math":
        return judge_math_quick(completion, answer)
    if kind == "reasoning_gym":
        given = _reasoning_gym_answer(completion)
        if given and given == answer:
            return CORRECT
        if not given or len(given) > max(500, 4 * len(answer)):
            return UNPARSABLE
    return None


def judge_exact(completion: str, answer: str) -> Verdict:
    """Compare as text, except for case, white space and Unicode form."""
    return CORRECT if _plain(completion) == _plain(answer) else WRONG


def _plain(text: str) -> str:
    return " ".join(fold(text).casefold().split())


def vote(kind: str, completion: str, prompt: Prompt) -> Hashable | None:
    """The answer of a completion in maj@k, under a kind of VOTING; equal ones compare equal. None: none."""
    if kind == "number":
        return first_number(completion)
    if kind == "exact":
        return _plain(completion) or None
    if kind == "choice":
        return chosen_letter(completion, prompt.metadata["choices"])
    if kind == "reasoning_gym":
        return _reasoning_gym_answer(completion) or None
    return math_vote(completion)


def may_execute(kind: str, completion: str) -> bool:
    """Whether a scorer that evaluates this text could call or change something; its worker is then replaced.
    Arithmetic, and words without brackets, dots or underscores, cannot."""
    return kind == "reasoning_gym" and not _INERT.fullmatch(_reasoning_gym_answer(completion))


def load_scorer(kind: str) -> Scorer:
    """The function that judges in a worker, with its imports made; ConfigError if they fail."""
    if kind == "math":
        # One judgement before the first fork: all workers share its imports and caches.
        judge_math_slow("\\boxed{(1, \\frac{1}{2})}", "(1, \\frac{2}{4})")
        return _judge_math
    if kind == "reasoning_gym":
        importlib.import_module("reasoning_gym")
        return _judge_reasoning_gym
    module, _, name = kind.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as e:  # the user's module may raise anything
        raise ConfigError(
            f"verifier.kind {kind}: cannot import it: {type(e).__name__}: {e}; the module must be in "
            f"the current folder or on sys.path ({len(sys.path)} entries)"
        ) from e
    if not callable(function):
        raise ConfigError(f"verifier.kind {kind}: {name} is {type(function).__name__}, expected a function")
    return lambda completion, answer, metadata: _user_score(function(completion, answer, metadata))


def _judge_math(completion: str, answer: str | list[str], metadata: dict[str, Any]) -> Verdict:
    """The best verdict on the accepted answers that comparing text has left open."""
    answers = [answer] if isinstance(answer, str) else answer
    left = [one for one in answers if judge_math_quick(completion, one) is None]
    return max(judge_math_slow(completion, one) for one in left)


def _user_score(value: Any) -> Verdict:
    """A score of 1 is correct; a score below is a graded reward that counts as wrong in pass rates."""
    score = float(value)
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"the score is {value!r}, expected a number from 0 to 1")
    return CORRECT if score == 1.0 else Verdict(score, "wrong")


def _reasoning_gym_answer(completion: str) -> str:
    """The content of the last <answer> tag after the thinking, or else all text after the thinking."""
    part = answer_part(completion)
    _, tag, tagged = part.rpartition("<answer>")
    return (tagged.partition("</answer>")[0] if tag else part).strip()


_tasks: dict[str, Any] = {}  # a worker makes each task object once


def _judge_reasoning_gym(completion: str, answer: str, metadata: dict[str, Any]) -> Verdict:
    """The task's own scorer. Partial scores count as wrong: some scorers give .01 to any text."""
    import reasoning_gym

    origin = metadata["origin"]
    key = repr(origin)
    if key not in _tasks:
        _tasks[key] = reasoning_gym.create_dataset(origin["task"], **origin["arguments"])
    item = decode({name: metadata[name] for name in ("question", "answer", "metadata")})
    given = _reasoning_gym_answer(completion)
    try:
        if not may_be_scored(origin["task"], given, item):
            return UNPARSABLE
        score = _tasks[key].score_answer(answer=given, entry=item)
    except Exception:  # some scorers raise on text they cannot parse
        return UNPARSABLE
    return CORRECT if score >= 1.0 else WRONG
