"""The attention of the torch engine: prompts that are prefilled, and slots that decode a token each."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

FEWEST_QUERIES = 4  # under a mask; with several threads the sums of fewer depend on the thread


@dataclass(frozen=True, slots=True)
class Prefill:
    """Admitted prompts of one layout."""

    cached: int
    length: int  # of what is not
    tokens: slice  # of the prompts, among the tokens of the step
    slots: slice  # of their samples
    slots_per_prompt: Tensor  # (prompts,)


@dataclass(frozen=True, slots=True)
class Step:
    """The layout of one forward pass: the prompts' tokens first, then one token of each decoding slot."""

    cache: Tensor  # (layers, 2, slots, Hk, L, D)
    prefills: tuple[Prefill, ...]
    positions: Tensor  # (n,) of the new tokens of the decoding slots 0 .. n − 1
    rows: Tensor  # (n,) these slots in the cache
    mask: Tensor  # (n, 1, 1, longest) additive; longest is the KV length of the longest decoding slot


def slots_attention(
    module: nn.Module,
    query: Tensor,  # (1, Hq, T, D)
    key: Tensor,  # (1, Hk, T, D)
    value: Tensor,  # (1, Hk, T, D)
    attention_mask: Tensor | None,
    scaling: float,
    *,
    step: Step,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer; returns (1, T, Hq, D).

    `attention_mask` is None, since no mask function is registered for it."""
    n, longest = step.mask.shape[0], step.mask.shape[3]  # decoding slots, KV length of the longest
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux")):
        raise ValueError("the torch engine supports no soft cap or attention sinks; set engine.kind vllm")
    kv_cache = step.cache[module.layer_idx]  # type: ignore[index]  # every HF attention has layer_idx
    outputs = []
    for p in step.prefills:
        # (prompts, heads, length, D)
        q, k, v = (
            x[0, :, p.tokens].unflatten(1, (-1, p.length)).transpose(0, 1) for x in (query, key, value)
        )
        for cache, new in zip(kv_cache, (k, v), strict=True):
            count, new_tokens = p.slots.stop - p.slots.start, slice(p.cached, p.cached + p.length)
            cache[p.slots, :, new_tokens] = new.repeat_interleave(p.slots_per_prompt, 0, output_size=count)
        seen = None  # the keys that each query attends to, if there are more than the new ones
        if p.cached:  # such a request has one sample
            k, v = kv_cache[:, p.slots, :, : p.cached + p.length].to(q.dtype)
        window = min(sliding_window or k.shape[2], k.shape[2])
        if p.cached or window < k.shape[2]:
            q = F.pad(q, (0, 0, 0, max(0, FEWEST_QUERIES - p.length)))
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            seen.tril_(p.cached).triu_(p.cached + 1 - window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True
        )
        outputs.append(out[:, :, : p.length].transpose(1, 2).flatten(0, 1))
    if n:
        hq, hk, d = query.shape[1], key.shape[1], query.shape[3]
        # The query heads of one KV head become query rows, so the cache is not copied.
        q = query[0, :, -n:].transpose(0, 1).reshape(n, hk, hq // hk, d)
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache[step.rows, :, step.positions] = new[0, :, -n:].transpose(0, 1).to(cache.dtype)
        k, v = kv_cache[:, :n, :, :longest]
        if len(k) < n:  # rows of one slot; copied, since the layout decides about the order of a sum
            k, v = k.repeat(n, 1, 1, 1), v.repeat(n, 1, 1, 1)
        # Not SDPA: its CPU kernel takes twice as long for a few query rows per sequence.
        scores = torch.matmul(q.to(k.dtype), k.transpose(-1, -2)).mul_(scaling).add_(step.mask)
        if sliding_window is not None and sliding_window < longest:
            keys = torch.arange(longest, device=k.device)
            outside = step.positions[:, None] - keys >= sliding_window
            scores.masked_fill_(outside[:, None, None], float("-inf"))
        out = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
        outputs.append(out.reshape(n, hq, d).to(query.dtype))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


AttentionInterface.register("slots", slots_attention)
