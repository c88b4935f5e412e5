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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from trainer.config import ConfigError
from trainer.engines.packed_linear import pack_linears
from trainer.types import Completion, FinishReason, Request

FIRST_LENGTH = 64  # tokens a slot holds at first; doubled when a request needs more
PREFILL_TOKENS = (
    4096  # prompt tokens in one step, beyond the first prompt: bounds memory and the wait for a swap
)
SAMPLE_ROWS = 16  # rows sampled at a time: their logits stay in the cache between the passes
BLOCK = 128  # tokens of the vocabulary summed at once when sampling


@dataclass(slots=True)
class Sequence:
    """A completion in the making; it lives in one slot."""

    request: Request
    index: int
    uniforms: NDArray[np.float64]  # one random number a token, drawn up front
    length: int  # tokens whose KV is in the slot, once the present step is done
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: FinishReason) -> Completion:
        """What has been generated, as the controller takes it."""
        return Completion(
            self.request.request_id,
            self.index,
            np.array(self.token_ids, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            reason,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """Where one forward's tokens stand: the prompts' tokens first, then one of each decoding slot."""

    cache: Tensor  # (layers, 2, slots, Hk, L, D)
    prompts: tuple[tuple[int, int], ...]  # start and length of each prompt among the tokens
    source: Tensor  # tokens to write ...
    slot: Tensor  # ... into these slots (a prompt's tokens go to each of its samples)
    position: Tensor  # ... at these positions
    decoding: int  # slots 0..decoding−1 decode
    longest: int  # KV length of the longest of them
    mask: Tensor  # (decoding, 1, 1, longest) additive


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
    longest = max(step.longest, *(n for _, n in step.prompts), 0)
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux")) or (
        sliding_window is not None and sliding_window < longest
    ):
        raise ValueError("the torch engine knows no sliding window, soft cap or attention sinks; use vLLM")
    k_cache, v_cache = step.cache[module.layer_idx]  # type: ignore[index]  # every HF attention has layer_idx
    k_cache[step.slot, :, step.position] = key[0].transpose(0, 1)[step.source]
    v_cache[step.slot, :, step.position] = value[0].transpose(0, 1)[step.source]
    parts = []
    for start, length in step.prompts:
        q, k, v = (x[:, :, start : start + length] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    if n := step.decoding:
        hq, hk, d = query.shape[1], key.shape[1], query.shape[3]
        # The query heads of one KV head become query rows: nothing of the cache is copied.
        q = query[0, :, -n:].transpose(0, 1).reshape(n, hk, hq // hk, d)
        k, v = k_cache[:n, :, : step.longest], v_cache[:n, :, : step.longest]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=step.mask, scale=scaling)
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
        self.slots, self.version, self.fp32_head = slots, version, fp32_head
        self.generated = self.prefilled = 0  # tokens so far
        self.evaluation_share = 0.0  # of the last step's sequences
        self._waiting: deque[tuple[Request, int]] = deque()  # request and its first sample not yet admitted
        self._evaluations: deque[tuple[Request, int]] = deque()
        self._active: list[Sequence] = []  # by slot
        config = self.model.config
        self._shape = (
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )
        self._cache = self._new_cache(FIRST_LENGTH)
        self._head = self._fp32_head() if fp32_head else self.model.get_output_embeddings()
        self._lay_out_weights()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to generate."""
        return not (self._active or self._waiting or self._evaluations)

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
        decoding = len(self._active)
        admitted = self._admit()
        if not self._active:
            return []
        self.evaluation_share = sum(s.request.evaluation for s in self._active) / len(self._active)
        hidden, rows = self._forward(decoding, admitted)
        tokens, logprobs = self._sample(hidden[rows])
        self.generated += len(self._active)
        ended: list[Completion] = []
        kept: list[tuple[int, Sequence]] = []
        for slot, (sequence, token, logprob) in enumerate(zip(self._active, tokens, logprobs, strict=True)):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if token in sequence.request.stop_ids:
                ended.append(sequence.completion("stop"))
            elif len(sequence.token_ids) == sequence.request.max_tokens:
                ended.append(sequence.completion("length"))
            else:
                kept.append((slot, sequence))
        self._keep(kept)
        return ended

    def abort(self, request_ids: frozenset[str] | None = None) -> list[Completion]:
        """End these requests (None: all); what was generated of them comes back, also of those waiting."""
        partial, kept = [], []
        for slot, sequence in enumerate(self._active):
            if request_ids is None or sequence.request.request_id in request_ids:
                partial.append(sequence.completion("abort"))
            else:
                kept.append((slot, sequence))
        self._keep(kept)
        for queue in (self._evaluations, self._waiting):
            for request, first in [queue.popleft() for _ in range(len(queue))]:
                if request_ids is None or request.request_id in request_ids:
                    partial += [
                        self._sequence(request, i).completion("abort") for i in range(first, request.n)
                    ]
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
        pack_linears(nn.ModuleList([self.model, self._head]), self.slots)

    def _new_cache(self, length: int) -> Tensor:
        layers, (heads, dim) = self.model.config.num_hidden_layers, self._shape
        return torch.zeros(layers, 2, self.slots, heads, length, dim, dtype=self.model.dtype)

    def _sequence(self, request: Request, index: int) -> Sequence:
        uniforms = np.random.default_rng([request.seed, index]).random(request.max_tokens)
        return Sequence(request, index, uniforms, len(request.prompt_ids))

    def _admit(self) -> list[tuple[Request, list[int]]]:
        """Give free slots to waiting samples: (request, its new slots) for each prompt to prefill."""
        admitted: list[tuple[Request, list[int]]] = []
        budget = PREFILL_TOKENS
        while (queue := self._evaluations or self._waiting) and (free := self.slots - len(self._active)):
            request, first = queue[0]
            if admitted and len(request.prompt_ids) > budget:
                break
            queue.popleft()
            budget -= len(request.prompt_ids)
            new = [self._sequence(request, i) for i in range(first, min(request.n, first + free))]
            admitted.append((request, list(range(len(self._active), len(self._active) + len(new)))))
            self._active += new
            if first + len(new) < request.n:
                queue.appendleft((request, first + len(new)))
        self.prefilled += PREFILL_TOKENS - budget
        need = max((len(r.prompt_ids) + r.max_tokens for r, _ in admitted), default=0)
        if need > self._cache.shape[4]:
            old = self._cache
            self._cache = self._new_cache(max(need, 2 * old.shape[4]))
            self._cache[..., : old.shape[4], :] = old
        return admitted

    def _forward(self, decoding: int, admitted: list[tuple[Request, list[int]]]) -> tuple[Tensor, Tensor]:
        """One forward; returns hidden states (T, H) and, by slot, the row that predicts its next token."""
        ids: list[int] = []
        positions: list[int] = []
        source: list[int] = []
        slot: list[int] = []
        rows: list[int] = []
        prompts = []
        for request, slots in admitted:
            n, start = len(request.prompt_ids), len(ids)
            prompts.append((start, n))
            ids += request.prompt_ids
            positions += range(n)
            for one in slots:
                source += range(start, start + n)
                slot += [one] * n
            rows += [start + n - 1] * len(slots)
        place = [positions[i] for i in source]
        old = self._active[:decoding]
        source += range(len(ids), len(ids) + decoding)
        slot += range(decoding)
        place += [s.length for s in old]
        rows = [*range(len(ids), len(ids) + decoding), *rows]
        ids += [s.token_ids[-1] for s in old]
        positions += [s.length for s in old]
        for s in old:
            s.length += 1
        lengths = torch.tensor([s.length for s in old])
        longest = int(lengths.max()) if old else 0
        hidden_part = (
            torch.arange(longest)[None] >= lengths[:, None] if old else torch.zeros(0, 0, dtype=torch.bool)
        )
        mask = torch.zeros(hidden_part.shape, dtype=self.model.dtype).masked_fill_(hidden_part, float("-inf"))
        step = Step(
            self._cache, tuple(prompts), torch.tensor(source), torch.tensor(slot), torch.tensor(place),
            decoding, longest, mask[:, None, None],
        )  # fmt: skip
        out = self.model.get_decoder()(
            input_ids=torch.tensor(ids)[None],
            position_ids=torch.tensor(positions)[None],
            use_cache=False,
            step=step,
        )
        return out.last_hidden_state[0], torch.tensor(rows)

    def _sample(self, hidden: Tensor) -> tuple[list[int], list[float]]:
        """A token per active sequence by inverse CDF of one uniform, and its log-prob at the temperature."""
        logits = self._head(hidden.to(self._head.weight.dtype)).float()
        tokens, logprobs = [], []
        for start in range(0, len(logits), SAMPLE_ROWS):
            z, active = logits[start : start + SAMPLE_ROWS], self._active[start : start + SAMPLE_ROWS]
            temperatures = [s.request.temperature or 1.0 for s in active]
            if any(t != 1.0 for t in temperatures):
                z.div_(torch.tensor(temperatures)[:, None])
            greedy = {i: int(z[i].argmax()) for i, s in enumerate(active) if s.request.temperature == 0}
            p = z.sub_(z.amax(1, keepdim=True)).exp_()
            token, total = draw(p, torch.tensor([s.uniforms[len(s.token_ids)] for s in active]))
            if not torch.isfinite(total).all():
                raise ConfigError(
                    f"the logits of weights version {self.version} are not finite: training has diverged. "
                    "Lower "
                    "learner.lr, then --resume from an earlier checkpoint"
                )
            for i, best in greedy.items():
                token[i] = best
            tokens += token.tolist()
            logprobs += (p.gather(1, token[:, None])[:, 0].double().log() - total.log()).tolist()
        return tokens, logprobs

    def _keep(self, kept: list[tuple[int, Sequence]]) -> None:
        """Keep these slots, moving the last ones into the gaps, so that active slots stay dense."""
        n = len(kept)
        stay = {slot: sequence for slot, sequence in kept if slot < n}
        gaps = (slot for slot in range(n) if slot not in stay)
        for slot, sequence in kept[len(stay) :]:
            gap = next(gaps)
            self._cache[:, :, gap, :, : sequence.length] = self._cache[:, :, slot, :, : sequence.length]
            stay[gap] = sequence
        self._active = [stay[slot] for slot in range(n)]


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
