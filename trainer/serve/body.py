"""The JSON of an HTTP request, checked, and as Requests to the engines.

Parameters are OpenAI's and vLLM's. One that this server does not have is refused, never left out silently.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import count
from typing import Annotated, Any, Literal, TypeVar

from trainer.config import ConfigError
from trainer.config.typed import build
from trainer.config.values import NonNegativeFloat, PositiveInt, Range
from trainer.engines.pool import EnginePool
from trainer.types import Request

MAX_SAMPLES = 1024  # completions of one HTTP request, over all its prompts
NEUTRAL = {  # parameters with the only value that is taken
    "stream": False, "top_p": 1, "top_k": -1, "min_p": 0, "top_logprobs": 0, "frequency_penalty": 0,
    "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "tools": [],
}  # fmt: skip
# They change no token. A salt is not needed, since no engine's prefix cache outlives the weights of its keys.
NO_EFFECT = {
    "user", "metadata", "store", "request_id", "priority", "cache_salt", "skip_special_tokens",
    "routed_experts_prompt_start",
}  # fmt: skip
_numbers = count()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served, and its engines."""

    name: str
    engines: EnginePool
    tokenizer: Any
    texts: tuple[str, ...]  # of each token of the model's vocabulary, by itself
    tokens_with: Callable[[str], frozenset[int]]  # the tokens that contain a text
    max_length: int  # tokens of a prompt and its completion
    chat_options: dict[str, Any]  # further arguments of the chat template


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Parameters of every route that generates."""

    model: str = ""
    n: PositiveInt = 1
    max_tokens: PositiveInt | None = None  # None: as many as there is room for
    max_completion_tokens: PositiveInt | None = None  # OpenAI's newer name of it
    temperature: NonNegativeFloat = 1.0
    seed: Annotated[int, Range(0, most=2**63 - 1)] | None = None
    stop: tuple[str, ...] = ()  # texts before which the answer ends
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate(Sampling):
    """POST /inference/v1/generate, with `sampling_params` beside the rest."""

    token_ids: list[Any]
    logprobs: Literal[0, 1] = 1  # the sampled tokens' own are always in the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions(Sampling):
    """POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: PositiveInt = 16
    logprobs: Literal[0, 1] | None = None
    echo: bool = False  # the prompt comes before the answer, with its tokens' log-probs
    return_token_ids: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Any]
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def read(kind: type[T], values: Any) -> T:
    """The JSON as this dataclass; ConfigError for a value of the wrong type, or an unknown parameter."""
    if not isinstance(values, dict):
        raise ConfigError(f"expected a JSON object, given {values!r}")
    if kind is Generate and isinstance(parameters := values.get("sampling_params", {}), dict):
        values = {key: value for key, value in values.items() if key != "sampling_params"} | parameters
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass
    wanted = {key: value for key, value in values.items() if value is not None and key not in NO_EFFECT}
    for key in wanted.keys() - known:
        if key not in NEUTRAL or wanted[key] != NEUTRAL[key]:
            only = f"; expected {NEUTRAL[key]!r}, or nothing" if key in NEUTRAL else "; leave it out"
            raise ConfigError(f"this server has no parameter {key} = {wanted[key]!r}{only}")
    return build({key: value for key, value in wanted.items() if key in known}, kind, "the request")


def requests_of(prompts: Iterable[Sequence[Any]], sampling: Sampling, served: Served) -> list[Request]:
    """A Request for each prompt of token ids; ConfigError for other ids, and where there is no room."""
    vocabulary, eos, requests = len(served.texts), served.tokenizer.eos_token_id, []
    stops = frozenset(sampling.stop_token_ids).union(*map(served.tokens_with, sampling.stop))
    stops |= set() if sampling.ignore_eos or eos is None else {eos}
    scored = isinstance(sampling, Completions) and sampling.echo and sampling.logprobs is not None
    if scored and sampling.n > 1:
        raise ConfigError(f"echo with logprobs: expected n = 1, given {sampling.n}")
    if "" in sampling.stop or (sampling.stop and isinstance(sampling, Generate)):
        raise ConfigError(f"stop: expected texts, or for token ids stop_token_ids, given {sampling.stop}")
    seed = random.getrandbits(62) if sampling.seed is None else sampling.seed
    for prompt in prompts:
        if wrong := [i for i in (*prompt, *stops) if type(i) is not int or not 0 <= i < vocabulary]:
            raise ConfigError(f"expected token ids from 0 to {vocabulary - 1}, given {wrong[0]!r}")
        room = served.max_length - len(prompt)
        new = sampling.max_completion_tokens or sampling.max_tokens or max(room, 1)
        if not prompt or new > room:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and {new} new ones; expected 1 of each at least, and "
                f"together at most {served.max_length}, which is max_model_len"
            )
        name, ids = f"http-{next(_numbers)}", tuple(prompt)
        request = Request(name, ids, sampling.n, new, sampling.temperature, stops, seed)
        requests.append(dataclasses.replace(request, score_prompt=scored))
    if not 0 < len(requests) * sampling.n <= MAX_SAMPLES:
        problem = f"{len(requests)} prompts with n = {sampling.n}"
        raise ConfigError(f"{problem}; expected 1 to {MAX_SAMPLES} completions in all")
    return requests


def id_prompts(body: Generate, served: Served) -> list[Sequence[Any]]:
    """The prompt of /inference/v1/generate."""
    return [body.token_ids]


def text_prompts(body: Completions, served: Served) -> list[Sequence[Any]]:
    """The prompts of /v1/completions: a text or token ids, or a list of them."""
    several = isinstance(body.prompt, list) and isinstance((body.prompt or [0])[0], str | list)
    prompts = body.prompt if several else [body.prompt]
    if wrong := [one for one in prompts if not isinstance(one, str | list)]:
        raise ConfigError(f"prompt: expected texts, or lists of token ids, given {wrong[0]!r}")
    return [served.tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]


def chat_prompts(body: Chat, served: Served) -> list[Sequence[Any]]:
    """The conversation in the model's chat template, up to where the assistant begins to speak."""
    if not getattr(served.tokenizer, "chat_template", None):
        raise ConfigError(f"{served.name} has no chat template; use /v1/completions")
    render, turns = served.tokenizer.apply_chat_template, [_turn(message) for message in body.messages]
    if names := body.chat_template_kwargs.keys() & signature(render).parameters.keys():
        raise ConfigError(f"chat_template_kwargs: {min(names)!r}; expected variables of the model's template")
    options = served.chat_options | body.chat_template_kwargs
    try:
        text = render(turns, tokenize=False, add_generation_prompt=True, **options)
    except Exception as e:  # the template's own, such as jinja2's
        raise ConfigError(f"the chat template refuses: {' '.join(str(e).split())}") from e
    return [served.tokenizer.encode(text, add_special_tokens=False)]  # the template contains them


def _turn(message: Any) -> dict[str, Any]:
    """A message whose content is text; OpenAI's list of parts of text becomes one."""
    turn: dict[str, Any] = message if isinstance(message, dict) else {}
    parts = turn.get("content")
    if isinstance(parts, list):
        parts = "".join(part["text"] for part in parts) if all(map(_is_text, parts)) else None
    if not (isinstance(parts, str) and isinstance(turn.get("role"), str)):
        raise ConfigError(f"messages: expected role and content, both text, given {message!r}")
    return turn | {"content": parts}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
