"""A scorer's worker, which the fork server forks."""

from typing import Any

from trainer.types import Outcome
from trainer.verifiers.code_runner import Channel
from trainer.verifiers.fork_server import Serve
from trainer.verifiers.sandbox import limit, lock_down
from trainer.verifiers.verifier import Verifier, find


def judging(kind: str, cpu_seconds: int) -> Serve:
    """Import the scorer; returns the work of its workers, each of so many CPU seconds at most."""
    verifier = find(kind)
    verifier.load()

    def serve(pool: Channel) -> None:
        limit(cpu_seconds)
        lock_down()
        while True:
            pool.send(_judge(verifier, *pool.receive()))

    return serve


def _judge(verifier: Verifier, completion: str, answer: Any, metadata: Any) -> tuple[float, Outcome, str]:
    """Score, outcome and error: a built-in kind raises on text that it cannot parse, an own one on a bug."""
    try:
        return *verifier.slow(completion, answer, metadata), ""
    except Exception as e:
        return 0.0, verifier.error, f"{type(e).__name__}: {e}"[:300]
