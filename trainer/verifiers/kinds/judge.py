"""Kind `judge`: a reward model or a language model scores the completion (`judge.py` of the folder above)."""

from typing import Any

from trainer.config import Config, ConfigError, VerifierConfig
from trainer.verifiers.verifier import Note, Scorer, Verifier


class JudgeKind(Verifier, kind="judge"):
    """A model's score, see `verifier.judge`."""

    def check(self, settings: VerifierConfig, config: Config) -> None:
        judge, deadline_s = settings.judge, config.pipeline.deadline_s
        if bool(judge.path) == bool(judge.url):
            raise ConfigError("kind judge: expected either verifier.judge.path or verifier.judge.url")
        if judge.url and judge.deadline_s >= deadline_s:
            raise ConfigError(
                f"verifier.judge.deadline_s is {judge.deadline_s:g}; expected less than pipeline.deadline_s "
                f"{deadline_s:g}, which would end the run without naming the judge"
            )

    def open(self, settings: VerifierConfig, note: Note, shared: dict[Any, Scorer]) -> Scorer:
        """Start the judge; tasks whose settings are equal have one in common."""
        from trainer.verifiers.judge import Judge

        if settings.judge not in shared:
            shared[settings.judge] = Judge(settings.judge, note)
        return shared[settings.judge]
