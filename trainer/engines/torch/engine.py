"""The embedded engine: continuous batching over slots with a KV cache, for any causal LM of transformers.

    waiting requests ──admit──> prefill (once a prompt, its KV copied to each sample's slot)
                                   │
    slots 0..A−1:  one token each per step ──> FP32 logits ──> inverse-CDF sample, log-prob, version
                                   │
             a finished slot is filled by the last one, so the active slots stay dense

Each step is one forward over the prompts just admitted and one token of every active sequence. Weights may
change between any two steps: sequences go on, their KV stays as it was.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from trainer.config import ConfigError
from trainer.engines.torch.linear import pack_linears
from trainer.engines.torch.slots import Slots
from trainer.types import Completion, FinishReason, Request

FIRST_LENGTH = 64  # tokens a slot holds at first; doubled when a request needs more
PREFILL_TOKENS = (
    4096  # prompt tokens in one step, beyond the first prompt: bounds memory and the wait for a swap
)
SAMPLE_NUMBERS = 800_000  # logits sampled from at a time: they stay in the CPU's cache between the passes
BLOCK = 128  # tokens of the vocabulary summed at once when sampling


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts of one length just admitted: `count` of them from token `start` on, in slots first..last−1."""

    start: int
    count: int
    length: int
    samples: Tensor  # (count,) slots of each prompt
    first: int
    last: int

    @property
    def tokens(self) -> slice:
        """Where they stand among the step's tokens."""
        return slice(self.start, self.start + self.count * self.length)


@dataclass(frozen=True, slots=True)
class Step:
    """Where one forward's tokens stand: the prompts' tokens first, then one of each decoding slot."""

    cache: Tensor  # (layers, 2, slots, Hk, L, D)
    prefills: tuple[Prefill, ...]
    decoding: Tensor  # (n,) the slots that decode: 0..n−1
    position: Tensor  # (n,) where their new token stands
    longest: int  # KV length of the longest of them
    mask: Tensor  # (n, 1, 1, longest) additive


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
    """What transformers calls in each layer; returns (1, T, Hq, D). No mask is registered, so none comes."""
    longest = max(step.longest, *(p.length for p in step.prefills), 0)
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux")) or (
        sliding_window is not None and sliding_window < longest
    ):
        raise ValueError("the torch engine knows no sliding window, soft cap or attention sinks; use vLLM")
    kv_cache = step.cache[module.layer_idx]  # type: ignore[index]  # every HF attention has layer_idx
    parts = []
    for p in step.prefills:
        # (count, heads, length, D)
        q, k, v = (
            x[0, :, p.tokens].unflatten(1, (p.count, p.length)).transpose(0, 1) for x in (query, key, value)
        )
        for cache, new in zip(kv_cache, (k, v), strict=True):
            cache[p.first : p.last, :, : p.length] = new.repeat_interleave(p.samples, 0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    if n := len(step.decoding):
        hq, hk, d = query.shape[1], key.shape[1], query.shape[3]
        # The query heads of one KV head become query rows: nothing of the cache is copied.
        q = query[0, :, -n:].transpose(0, 1).reshape(n, hk, hq // hk, d)
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache[step.decoding, :, step.position] = new[0, :, -n:].transpose(0, 1)
        k, v = kv_cache[:, :n, :, : step.longest]
        # By hand: for a few query rows a sequence, SDPA's CPU kernel takes twice as long.
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scaling).add_(step.mask)
        out = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
        parts.append(out.reshape(n, hq, d))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


AttentionInterface.register("slots", slots_attention)


class TorchEngine:
    """Generates for submitted requests, one token of every active sequence per `step`."""

    def __init__(
        self, model_dir: str, dtype: torch.dtype, fp32_head: bool, slots: int, version: int = 0
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="slots"
        ).eval()
        self.version = version
        self.generated = self.prefilled = 0  # tokens so far
        self.evaluation_share = 0.0  # of the last step's sequences
        self.slots = Slots(slots, self.model.config.vocab_size)
        self._waiting: deque[tuple[Request, int]] = deque()  # request and its first sample not yet admitted
        self._evaluations: deque[tuple[Request, int]] = deque()
        config = self.model.config
        recurrent = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if recurrent or not hasattr(config, "max_position_embeddings"):
            why = f"has {', '.join(recurrent)} layers" if recurrent else "has no max_position_embeddings"
            raise ConfigError(
                f"model.path {model_dir}: a {config.model_type} {why}; the torch engine expects softmax "
                "attention over numbered positions (Llama, Qwen, Mistral, Phi, OLMo, Gemma, GPT-2 ...)"
            )
        self._shape = (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )
        self._cache = self._new_cache(FIRST_LENGTH)
        self._head = self._fp32_head() if fp32_head else self.model.get_output_embeddings()
        self._lay_out_weights()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to generate."""
        return not (self.slots.active or self._waiting or self._evaluations)

    def submit(self, request: Request) -> None:
        """Queue a request; evaluations go before training."""
        need, limit = len(request.prompt_ids) + request.max_tokens, self.model.config.max_position_embeddings
        if not request.prompt_ids or request.max_tokens < 1:
            raise ConfigError(
                f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens and max_tokens "
                f"{request.max_tokens}; neither may be empty"
            )
        if need > limit:
            raise ConfigError(
                f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and "
                f"{request.max_tokens} new ones; the model holds {limit} positions. Lower "
                "engine.max_new_tokens or data.max_prompt_tokens"
            )
        (self._evaluations if request.evaluation else self._waiting).append((request, 0))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, make one token of every active sequence; returns the completions that ended."""
        decoding = self.slots.active
        prefills = self._admit()
        if not self.slots.active:
            return []
        self.evaluation_share = float(self.slots.column("evaluation").mean())
        tokens, logprobs = self._sample(self._forward(decoding, prefills))
        self.generated += self.slots.active
        return self._take_out(self.slots.append(tokens, logprobs, self.version))

    def abort(self, request_ids: frozenset[str] | None = None) -> list[Completion]:
        """End these requests (None: all); what was generated of them comes back, also of those waiting."""
        partial = self._take_out([
            (slot, "abort")
            for slot, (request, _) in enumerate(self.slots.requests)
            if request_ids is None or request.request_id in request_ids
        ])  # fmt: skip
        for queue in (self._evaluations, self._waiting):
            for request, first in [queue.popleft() for _ in range(len(queue))]:
                if request_ids is None or request.request_id in request_ids:
                    partial += [_nothing_yet(request, i) for i in range(first, request.n)]
                else:
                    queue.append((request, first))
        return partial

    @torch.no_grad()
    def update_weights(self, version: int, path: str) -> None:
        """Copy the file's tensors into the parameters of these names; an empty path: only the version."""
        if path:
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            with safe_open(path, "pt") as file:
                missing = set(file.keys()) - parameters.keys()
                if missing:
                    raise ValueError(f"{path} holds {sorted(missing)[0]!r}, which this model does not have")
                for name in file.keys():  # noqa: SIM118  # safe_open is no mapping
                    parameters[name].copy_(file.get_tensor(name))
            self._lay_out_weights()
        self.version = version

    def _fp32_head(self) -> nn.Linear:
        """The head as FP32 logits need it: bf16 products are exact in FP32, so only its type changes."""
        own = self.model.get_output_embeddings()
        if own.weight.dtype == torch.float32:
            return own
        return nn.Linear(own.in_features, own.out_features, bias=own.bias is not None)

    @torch.no_grad()
    def _lay_out_weights(self) -> None:
        """Bring what is derived from the parameters up to date."""
        own = self.model.get_output_embeddings()
        if self._head is not own:
            self._head.load_state_dict(own.state_dict())
        pack_linears(nn.ModuleList([self.model, self._head]), self.slots.capacity)

    def _new_cache(self, length: int) -> Tensor:
        layers, (heads, dim) = self.model.config.num_hidden_layers, self._shape
        return torch.zeros(layers, 2, self.slots.capacity, heads, length, dim, dtype=self.model.dtype)

    def _admit(self) -> list[tuple[Request, int]]:
        """Give free slots to waiting samples: each prompt to prefill with its number of new slots,
        prompts of one length together."""
        admitted: list[tuple[Request, int, int]] = []
        budget, free = PREFILL_TOKENS, self.slots.free
        while (queue := self._evaluations or self._waiting) and free:
            request, first = queue[0]
            if admitted and len(request.prompt_ids) > budget:
                break
            queue.popleft()
            budget -= len(request.prompt_ids)
            count = min(request.n - first, free)
            free -= count
            admitted.append((request, first, count))
            if first + count < request.n:
                queue.appendleft((request, first + count))
        self.prefilled += PREFILL_TOKENS - budget
        admitted.sort(key=lambda a: len(a[0].prompt_ids))
        for request, first, count in admitted:
            self.slots.add(request, first, count)
        need = max((len(r.prompt_ids) + r.max_tokens for r, _, _ in admitted), default=0)
        if need > self._cache.shape[4]:
            old = self._cache
            self._cache = self._new_cache(max(need, 2 * old.shape[4]))
            self._cache[..., : old.shape[4], :] = old
        return [(request, count) for request, _, count in admitted]

    def _forward(self, decoding: int, admitted: list[tuple[Request, int]]) -> Tensor:
        """One forward; returns, by slot, the hidden state that predicts its next token: (active, H)."""
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        prefills = []
        slot = decoding
        for length, run in groupby(admitted, key=lambda a: len(a[0].prompt_ids)):
            start, first, samples = len(ids), slot, []
            for request, count in run:
                ids += request.prompt_ids
                positions += range(length)
                rows += [len(ids) - 1] * count
                samples.append(count)
                slot += count
            prefills.append(Prefill(start, len(samples), length, torch.tensor(samples), first, slot))
        decoded, place = map(torch.from_numpy, self.slots.last(decoding))
        longest = int(place.max()) + 1 if decoding else 0
        unseen = torch.arange(longest)[None] > place[:, None]
        mask = torch.zeros(unseen.shape, dtype=self.model.dtype).masked_fill_(unseen, float("-inf"))
        step = Step(self._cache, tuple(prefills), torch.arange(decoding), place, longest, mask[:, None, None])
        out = self.model.get_decoder()(
            input_ids=torch.cat([torch.tensor(ids, dtype=torch.long), decoded.long()])[None],
            position_ids=torch.cat([torch.tensor(positions, dtype=torch.long), place])[None],
            use_cache=False,
            step=step,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return torch.cat([hidden[len(ids) :], hidden[rows]]) if rows else hidden

    def _sample(self, hidden: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A token per active sequence by inverse CDF of one uniform, and its log-prob at the temperature."""
        logits = self._head(hidden.to(self._head.weight.dtype)).float()
        temperature = torch.from_numpy(self.slots.column("temperature"))
        uniforms = torch.from_numpy(self.slots.uniforms())
        tokens, logprobs = [], []
        rows = max(1, SAMPLE_NUMBERS // logits.shape[1])
        for z, t, u in zip(logits.split(rows), temperature.split(rows), uniforms.split(rows), strict=True):
            greedy = t == 0
            if (t != 1).any():
                z.div_(t.where(~greedy, 1)[:, None])
            best = z.argmax(1) if greedy.any() else None
            p = z.sub_(z.amax(1, keepdim=True)).exp_()
            token, total = draw(p, u)
            if not torch.isfinite(total).all():
                raise ConfigError(
                    f"the logits of weights version {self.version} are not finite: training has diverged. "
                    "Lower learner.lr, then --resume from an earlier checkpoint"
                )
            if best is not None:
                token = token.where(~greedy, best)
            tokens.append(token)
            logprobs.append(p.gather(1, token[:, None])[:, 0].double().log() - total.log())
        return torch.cat(tokens).numpy(), torch.cat(logprobs).float().numpy()

    def _take_out(self, ended: list[tuple[int, FinishReason]]) -> list[Completion]:
        """The completions of these slots, which are filled by the last ones, KV and all."""
        if not ended:
            return []
        completions = [self.slots.completion(slot, reason) for slot, reason in ended]
        old, new = (torch.from_numpy(x) for x in self.slots.take_out([slot for slot, _ in ended]))
        if len(new):
            longest = int(self.slots.last(self.slots.active)[1].max())
            self._cache[:, :, new, :, :longest] = self._cache[:, :, old, :, :longest]
        return completions


def _nothing_yet(request: Request, index: int) -> Completion:
    """Of a sample that never got a slot."""
    none = np.zeros(0, np.int32)
    return Completion(request.request_id, index, none, none.astype(np.float32), none, "abort")


def draw(
    p: Tensor,  # (B, V) FP32, not normalised
    uniforms: Tensor,  # (B,) FP64 in [0, 1)
) -> tuple[Tensor, Tensor]:
    """Inverse CDF: tokens (B,) and sums of p (B,), FP64. First the block is found, then its token."""
    rows, vocab = torch.arange(len(p)), p.shape[1]
    blocks = F.pad(p, (0, -vocab % BLOCK)).view(len(p), -1, BLOCK)
    sums = blocks.sum(2).double()
    cdf = sums.cumsum(1)
    total = cdf[:, -1]
    target = uniforms * total
    block = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)
    inside = blocks[rows, block].double().cumsum(1)
    share = (target - cdf[rows, block] + sums[rows, block]) / sums[rows, block]  # of the block's own sum
    token = torch.searchsorted(inside, (share * inside[:, -1])[:, None], right=True)[:, 0]
    return (block * BLOCK + token).clamp_(max=vocab - 1), total
