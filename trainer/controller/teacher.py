"""A teacher behind a URL (`objective.kl.to: http://...`): it scores the tokens of a group when the group is
complete, so the learner never waits for it. The scores stand in the journal, and are not asked for again.

The server is one with OpenAI's /v1/completions: vLLM, or `python -m trainer.serve`. Token ids go in; `echo`
with `logprobs` makes it answer with the log-prob of each of them, at temperature 1.
"""

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError, KLConfig
from trainer.types import Group
from trainer.verifiers.http_client import Cache, NoScoreError, ScoringClient, ServerFailedError

CACHED = 4096  # completions whose scores are kept; the least recently used is dropped
PROBED = 64  # tokens whose texts are compared at the start
CLAMPED = -9999.0  # vLLM writes a log-prob of minus infinity so


class Teacher:
    """The teacher, for one event loop. ConfigError if its settings are wrong."""

    def __init__(self, config: KLConfig) -> None:
        server = config.to, config.api_key_env, config.deadline_s
        self._client = ScoringClient("teacher", *server, "objective.kl.to", "the URL or the key")
        self._model, self._cached = "", Cache(self._ask, CACHED)

    async def start(self, tokenizer: Any, longest: int) -> None:
        """Ask for the model, and compare texts of tokens by their ids; ConfigError if they are others, or if
        `longest` tokens and the one that is generated are too many for it."""
        try:
            (model, *_) = (await self._client.call("GET", "/v1/models"))["data"]
            self._model, most = model["id"], model.get("max_model_len") or math.inf
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise ServerFailedError(f"{self._client.name}: /v1/models lists no model: {e!r}") from e
        if longest >= most:
            raise ConfigError(
                f"{self._client.name} takes {most} tokens, and prompt and completion have up to {longest}, "
                "with one that it generates: give it a larger max_model_len, or lower engine.max_new_tokens"
            )
        ids = np.unique(np.linspace(0, len(tokenizer) - 1, PROBED).astype(int)).tolist()
        try:
            texts = (await self._completion(ids))["tokens"]
        except NoScoreError as e:
            raise ConfigError(f"{self._client.name} refuses token ids of the policy: {e}; {EXPECTED}") from e
        known = [x for x in (texts or ())[: len(ids)] if isinstance(x, str)]
        if len(known) < len(ids):
            said = f"{self._client.name} gave {str(texts)[:60]} as the texts of {len(ids)} tokens"
            raise ServerFailedError(f"{said}; expected one for each, as `tokens` of logprobs")
        pairs = [(tokenizer.decode([i]).strip(), text.strip()) for i, text in zip(ids, texts, strict=False)]
        # A token that is a part of a character has no text of its own.
        wrong = [(i, *pair) for i, pair in zip(ids, pairs, strict=False) if "\ufffd" not in "".join(pair)]
        if wrong := [x for x in wrong if x[1] != x[2]]:
            i, ours, other = wrong[0]
            raise ConfigError(
                f"{self._client.name}: its tokens differ from the policy's in {len(wrong)} of {len(ids)} "
                f"compared: {i} is {other!r}, and the policy's {ours!r}; {EXPECTED}"
            )

    async def score(self, group: Group) -> Group:
        """The group with the teacher's log-probs; ServerFailedError if the teacher does not give them."""
        prompt = list(group.prompt.token_ids)
        rows = await asyncio.gather(*(self._cached([*prompt, *r.token_ids.tolist()]) for r in group.rollouts))
        return replace(group, logprobs_ref=tuple(row[len(prompt) :] for row in rows))

    async def _ask(self, ids: list[int]) -> NDArray[np.float32]:
        """(N,) the log-prob of each token; 0 for the first."""
        try:
            values = (await self._completion(ids))["token_logprobs"]
            scores = np.array([0.0, *values[1 : len(ids)]], np.float32)  # None becomes NaN
        except NoScoreError as e:
            raise ServerFailedError(f"{self._client.name} refuses a completion: {e}") from e
        except (LookupError, TypeError, ValueError) as e:
            raise ServerFailedError(f"{self._client.name}: its answer has no log-probs: {e!r}") from e
        if len(scores) != len(ids) or len(values) > len(ids) + 1:
            raise ServerFailedError(
                f"{self._client.name} gave {len(values)} log-probs for {len(ids)} tokens; expected one for "
                "each, and for the one that it generates"
            )
        if wrong := np.flatnonzero(~(scores > CLAMPED) | (scores > 1e-3)).tolist():
            raise ServerFailedError(
                f"{self._client.name} gave the log-prob {scores[wrong[0]]} for token {wrong[0] + 1} of "
                f"{len(ids)}; expected a finite number up to 0"
            )
        return scores

    async def _completion(self, ids: list[int]) -> dict[str, Any]:
        """OpenAI's `logprobs` of these tokens and one more. ServerFailedError if they are of other tokens."""
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body |= {"echo": True, "logprobs": 1, "return_token_ids": True}
        expected, name = "expected OpenAI's /v1/completions with echo and logprobs", self._client.name
        try:
            (choice,) = (await self._client.call("POST", "/v1/completions", body))["choices"]
            logprobs, scored = choice["logprobs"], choice.get("prompt_token_ids") or ids
            _ = logprobs["tokens"], logprobs["token_logprobs"]
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise ServerFailedError(f"{name}: its answer has no log-probs ({e!r}); {expected}") from e
        if scored != ids:
            raise ServerFailedError(f"{name} scored other tokens than it was given: {scored[:9]}")
        return dict(logprobs)


EXPECTED = "expected a model with the same token ids, such as a larger one of the same family"
