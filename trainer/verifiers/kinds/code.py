"""Kind `code`: programs that a model wrote, on unit tests in a sandbox (`code_sandbox.py`)."""

from trainer.config import VerifierConfig
from trainer.types import Prompt
from trainer.verifiers.code_tests import parse_tests
from trainer.verifiers.verifier import Judgement, Verifier


class Code(Verifier, kind="code"):
    """A program that passes all tests."""

    extra = "code", "verifier.kind code (or Debian's bubblewrap)"

    def problem(self, prompt: Prompt) -> str:
        try:
            parse_tests(prompt.answer, prompt.metadata)
        except Exception as e:  # any: the tests are the user's data
            return f", no tests of a known form: {type(e).__name__}: {e}"
        return ""

    def start(self, settings: VerifierConfig) -> Judgement:
        from trainer.verifiers.code_sandbox import CodeSandbox

        return CodeSandbox(settings.code).judge
