"""The engines' completions as the JSON of an answer, in OpenAI's formats, and in vLLM's for token ids."""

import time
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

from trainer.serve.body import Chat, Completions, Generate, Served
from trainer.types import Completion, Request

Generated = Sequence[tuple[Request, Sequence[Completion]]]  # completions by index


def answer(kind: str, choices: list[dict[str, Any]], generated: Generated, name: str) -> dict[str, Any]:
    """The fields that all answers have, around the choices. `system_fingerprint` names the newest weights."""
    completions = [c for _, of_prompt in generated for c in of_prompt]
    prompt = sum(len(request.prompt_ids) for request, _ in generated)
    new = sum(len(c.token_ids) for c in completions)
    request_id, version = generated[0][0].request_id, max(c.versions.max(initial=0) for c in completions)
    return {
        "id": request_id,
        "request_id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": f"step-{version}",
        "choices": [{"index": i} | choice for i, choice in enumerate(choices)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
    }


def id_choice(c: Completion, request: Request, body: Generate, served: Served) -> dict[str, Any]:
    """A choice of /inference/v1/generate. `weight_versions`: of tokens start .. end − 1, as vLLM has them."""
    ids, spans, start = c.token_ids.tolist(), [], 0
    for version, tokens in groupby(c.versions.tolist()):
        spans.append({"start": start, "end": (start := start + len(list(tokens))), "version": str(version)})
    logprobs = chat_logprobs([f"token_id:{i}" for i in ids], c.logprobs_gen.tolist())
    reason = {"finish_reason": c.finish_reason}
    return {"token_ids": ids, "logprobs": logprobs, "weight_versions": spans} | reason


def chat_choice(c: Completion, request: Request, body: Chat, served: Served) -> dict[str, Any]:
    """A choice of /v1/chat/completions."""
    text, length, reason = cut(c, body.stop, served)
    tokens = [served.texts[i] for i in c.token_ids[:length]]
    scores = chat_logprobs(tokens, c.logprobs_gen[:length].tolist()) if body.logprobs else None
    message = {"role": "assistant", "content": text}
    return {"message": message, "logprobs": scores, "finish_reason": reason}


def chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Log-probs in the format of chat completions."""
    pairs = zip(tokens, logprobs, strict=True)
    return {"content": [{"token": t, "logprob": x, "bytes": None, "top_logprobs": []} for t, x in pairs]}


def text_choice(c: Completion, request: Request, body: Completions, served: Served) -> dict[str, Any]:
    """A choice of /v1/completions."""
    text, length, reason = cut(c, body.stop, served)
    ids, prompt = c.token_ids.tolist(), list(request.prompt_ids)
    choice: dict[str, Any] = {"text": text, "logprobs": None, "finish_reason": reason}
    rows: list[tuple[Any, ...]] = []  # token, log-prob, the likeliest token and its log-prob if it is known
    if body.echo:
        choice["text"] = served.tokenizer.decode(prompt) + text
        scores = zip(prompt[1:], c.prompt_scores.tolist(), strict=False)
        rows = [(prompt[0], None, None, None), *((i, *score) for i, score in scores)]
    if body.logprobs is not None:
        greedy, sampled = request.temperature == 0, zip(ids[:length], c.logprobs_gen.tolist(), strict=False)
        rows += [(i, x, i if greedy else None, x) for i, x in sampled]
        tokens = [served.texts[i] for i, *_ in rows]
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": [x for _, x, *_ in rows],
            "top_logprobs": [_top(served.texts, *row) for row in rows],
            "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
        }
    return choice | ({"prompt_token_ids": prompt, "token_ids": ids} if body.return_token_ids else {})


def _top(
    texts: Sequence[str], token: int, logprob: float, best: int | None, best_logprob: float
) -> dict[str, float] | None:
    """A token and the likeliest in its place, which may have the same text; None if that is not known."""
    if best is None:
        return None
    same = best != token and texts[best] == texts[token]
    return {f"token_id:{best}" if same else texts[best]: best_logprob, texts[token]: logprob}


def cut(c: Completion, stops: Sequence[str], served: Served) -> tuple[str, int, str]:
    """The completion's text before the first of `stops`, the number of its tokens, and why it ended."""
    text: str = served.tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True)
    end = min((place for stop in stops if (place := text.find(stop)) >= 0), default=-1)
    if end < 0:
        return text, len(c.token_ids), c.finish_reason
    starts = list(accumulate((len(served.texts[i]) for i in c.token_ids), initial=0))[:-1]
    return text[:end], sum(start < end for start in starts), "stop"
