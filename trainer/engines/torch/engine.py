"""The embedded engine: continuous batching over slots with a KV cache, for any causal LM of transformers.

    RequestQueue ──admit──> prefill (once per prompt, its KV copied to the slot of each sample)
                               │
    A active slots: one token each per step ──> FP32 logits ──> inverse-CDF sample, log-prob, version
                               │
             a finished slot is overwritten by the last one, so the active slots stay contiguous

Each step is one forward pass over the prompts just admitted and one token of every active sequence. On a GPU
these are two passes: the prompts', and that of `decoder.py`, which a CUDA graph replays. Weights may change
between any two steps: sequences continue, and their KV is kept. It is also kept for a request that continues
another one, of which only the new tokens are prefilled; where another process had it, it is computed again.

In float32 on a CPU a completion's tokens and log-probs depend, bit for bit, on its request and the weights
alone, and not on what is generated beside it: a resumed run then goes on exactly as if nothing had happened.
(Experts of a mixture get several tokens at a time: there only almost.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trainer.config import ConfigError
from trainer.engines.backend import RequestQueue, Samples, divergence_error, kv_shape
from trainer.engines.torch.attention import Prefill, Step
from trainer.engines.torch.decoder import Decoder
from trainer.engines.torch.linear import pack_linears
from trainer.engines.torch.sampling import sample, uniforms
from trainer.engines.torch.slots import Slots
from trainer.models.experts import Routers, replays_experts
from trainer.models.lora import pushed_weights
from trainer.types import PROMPT_SCORE, Completion, FinishReason, Request

KEY_BLOCK = 16  # attended keys are a multiple of this: so a sum's order does not depend on other sequences
INITIAL_LENGTH = 64  # tokens a slot holds at first; doubled when a request needs more
SCORED_TOKENS = 64  # of a prompt that is scored, at a time: bounds the memory of their logits
REPLAYED_TOKENS = 64  # of a turn that was decoded elsewhere, at a time: each has a copy of its keys
PREFILL_TOKENS = 4096  # in one step at most, a longer prompt alone: bounds memory and delay of new weights


@dataclass(frozen=True, slots=True)
class Admitted:
    """Samples that start with this step."""

    samples: Samples
    kv: Tensor | None  # (layers, 2, Hk, cached, D) of the request that they continue
    layout: tuple[int, int]  # tokens of the prompt that are cached, and those to prefill


class TorchEngine:
    """Generates completions for submitted requests; each `step` makes a token of every active sequence."""

    def __init__(
        self,
        model_dir: str,
        dtype: torch.dtype,
        fp32_head: bool,
        slots: int,
        device: str = "cpu",
        decoder: bool = False,
        experts: bool | None = None,
    ) -> None:
        """`decoder`: sequences are decoded as on a GPU, whatever the device; `experts`: the setting
        `model.replay_experts`, under which a mixture's are recorded for requests that ask for them."""
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="slots", use_safetensors=True
        )
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()  # type: ignore[arg-type]  # it loses `self` under a decorator
        self.version = 0
        self.generated = self.prefilled = 0  # tokens since the start
        self.evaluation_share = 0.0  # evaluations among the sequences of the last step
        self.slots = Slots(slots, self.model.config.vocab_size)
        config = self.model.config
        recurrent = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if recurrent or not hasattr(config, "max_position_embeddings"):
            why = f"has {', '.join(recurrent)} layers" if recurrent else "has no max_position_embeddings"
            raise ConfigError(
                f"model.path {model_dir}: a {config.model_type} {why}; the torch engine expects softmax "
                "attention over numbered positions (Llama, Qwen, Mistral, Phi, OLMo, Gemma, GPT-2 ...)"
            )
        self._routers = Routers(self.model) if replays_experts(experts, config) else None
        self._recording = False
        self._queue = RequestQueue(config.max_position_embeddings)
        layers, heads, size = kv_shape(config)
        # FP32 on a CPU: batched products of a few 16-bit rows take several times as long there.
        kv_dtype = torch.float32 if self.device.type == "cpu" else dtype
        shape = layers, 2, slots, heads, INITIAL_LENGTH, size
        self._cache = torch.zeros(shape, dtype=kv_dtype, device=self.device)
        self._kept: dict[str, Tensor] = {}  # KV of requests to be continued, the oldest first
        self._prompt_scores: dict[str, NDArray[np.void]] = {}  # by request, until its completion ends
        self._fp32_logits = fp32_head
        self._head = head = self.model.get_output_embeddings()
        if fp32_head and head.weight.dtype != torch.float32 and self.device.type == "cpu":
            # Products of bf16 values are exact in FP32, so only the dtype changes; on CUDA without a copy.
            self._head = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
        self._decoder: Decoder | None = None
        if decoder or self.device.type == "cuda":
            routed = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
            graphs = self.device.type == "cuda" and not routed  # the host waits to route tokens to experts
            self._decoder = Decoder(slots, self.device, graphs, self._body, self._logits)
        self._pack_weights()

    @property
    def idle(self) -> bool:
        """True if there is nothing to generate."""
        return not self.slots.active and self._queue.next_request is None

    def submit(self, request: Request) -> None:
        """Queue a request; ConfigError if the model cannot serve it."""
        self._queue.add(request)
        self._recording |= self._routers is not None and request.experts_from >= 0

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit waiting samples and make one token of every active sequence; returns the completions that
        ended."""
        decoding = self.slots.active
        admitted = self._admit()
        if not self.slots.active:
            return []
        self.evaluation_share = float(self.slots.column("evaluation").mean())
        first, parts = 0, []
        if self._decoder is not None and decoding:  # first: it writes KV into slots not in use as well
            parts.append(self._decoder.step(self.slots, decoding, self._cache))
            self._record(decoding, (), 0)
            first, decoding = decoding, 0
        if decoding or admitted:
            parts.append(self._sample(self._forward(decoding, admitted), first))
        tokens, logprobs = map(np.concatenate, zip(*parts, strict=True))
        if not np.isfinite(logprobs).all():
            raise divergence_error(self.version)
        self.generated += self.slots.active
        return self._free(self.slots.append(tokens, logprobs, self.version))

    @torch.inference_mode()
    def abort(self, request_ids: frozenset[str]) -> list[Completion]:
        """End these requests, and drop what is kept of them; returns their partial completions, empty for
        waiting samples."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)
        requests = enumerate(request for request, _ in self.slots.requests)
        partial = self._free([(slot, "abort") for slot, r in requests if r.request_id in request_ids])
        return partial + self._queue.abort(request_ids)

    @torch.no_grad()
    def update_weights(self, version: int, path: str) -> None:
        """Copy a file's weights (a model's, or LoRA's) into the parameters of these names, or those of the
        model in a folder, whose files may have other names; an empty path: only a new version."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        if Path(path).is_dir() and path:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=self.model.dtype, use_safetensors=True)
            for name, parameter in model.named_parameters():
                parameters[name].copy_(parameter)
        elif path:
            for name, tensor in pushed_weights(path, self.device):
                if name not in parameters:
                    raise ValueError(f"{path} holds {name!r}, which this model does not have")
                parameters[name].copy_(tensor)
        if path:
            self._pack_weights()
        self.version = version

    @torch.no_grad()
    def _pack_weights(self) -> None:
        """Update everything derived from the parameters: the FP32 head and the packed weights."""
        head = self.model.get_output_embeddings()
        if self._head is not head:
            self._head.load_state_dict(head.state_dict())
        pack_linears(nn.ModuleList([self.model, self._head]), self.slots.capacity)

    def _admit(self) -> list[Admitted]:
        """Move waiting samples to free slots; returns them by prompt, those of one layout together."""
        admitted: list[Admitted] = []
        budget, free = PREFILL_TOKENS, self.slots.capacity - self.slots.active
        while free and (request := self._queue.next_request):
            kv = self._kept.get(request.continues)
            if kv is None and request.continues and request.turns and self.device.type == "cpu":
                kv = self._kept[request.continues] = self._replayed(request)
            cached = 0 if kv is None else kv.shape[3]
            length = len(request.prompt_ids) - cached
            if admitted and length > budget:
                break
            self._kept.pop(request.continues, None)
            admitted.append(Admitted(self._queue.take(free), kv, (cached, length)))
            budget -= length
            free -= admitted[-1].samples.count
        self.prefilled += PREFILL_TOKENS - budget
        admitted.sort(key=attrgetter("layout"))
        requests, length = [x.samples.request for x in admitted], self._cache.shape[4]
        need = max((len(r.prompt_ids) + r.max_tokens for r in requests), default=0)
        if need > length:
            self._cache = F.pad(self._cache, (0, 0, 0, _whole_blocks(max(need, 2 * length)) - length))
        for x in admitted:
            self.slots.add(x.samples)
        return admitted

    def _forward(self, decoding: int, admitted: list[Admitted]) -> Tensor:
        """One forward pass over the first `decoding` slots and the admitted ones; returns the hidden states
        that predict the next token of each of them: (slots, H)."""
        ids: list[int] = []
        positions: list[int] = []
        last_tokens: list[int] = []  # of the prompt of each admitted sample
        prefills = []
        slot = self.slots.active - sum(x.samples.count for x in admitted)
        for (cached, length), alike in groupby(admitted, key=attrgetter("layout")):
            start, first_slot, slots_per_prompt = len(ids), slot, []
            for one in alike:
                samples = one.samples
                if one.kv is not None:  # only now: the decoder writes into slots that are not in use as well
                    self._cache[:, :, slot, :, :cached] = one.kv
                ids += samples.request.prompt_ids[cached:]
                positions += range(cached, cached + length)
                last_tokens += [len(ids) - 1] * samples.count
                slots_per_prompt.append(samples.count)
                slot += samples.count
            tokens, slots = slice(start, len(ids)), slice(first_slot, slot)
            counts = torch.tensor(slots_per_prompt, device=self.device)
            prefills.append(Prefill(cached, length, tokens, slots, slots_per_prompt=counts))
        newest_ids, newest_positions = map(torch.from_numpy, self.slots.newest(decoding))
        longest = _whole_blocks(int(newest_positions.max()) + 1) if decoding else 0
        token_ids = torch.cat([torch.tensor(ids, dtype=torch.long), newest_ids.long()])
        hidden = self._body(
            token_ids.to(self.device),
            torch.cat([torch.tensor(positions, dtype=torch.long), newest_positions]).to(self.device),
            longest,
            tuple(prefills),
        )
        self._record(decoding, prefills, len(ids))
        requests = [x.samples.request for x in admitted for _ in range(x.samples.count)]
        for request, last in zip(requests, last_tokens, strict=True):
            if request.score_prompt:
                before = hidden[last + 1 - len(request.prompt_ids) : last]
                self._prompt_scores[request.request_id] = self._score(before, request.prompt_ids[1:])
        return torch.cat([hidden[len(ids) :], hidden[last_tokens]]) if last_tokens else hidden

    def _record(self, decoding: int, prefills: Sequence[Prefill], prompt_tokens: int) -> None:
        """Note the experts of the last pass: over these prompts, and a token of each of the first slots."""
        if not self._recording or self._routers is None:
            return
        experts = self._routers.recorded()
        for p in prefills:
            of_prompts = experts[p.tokens].reshape(-1, p.length, experts.shape[1])
            of_slots = of_prompts.repeat(p.slots_per_prompt.cpu().numpy(), 0)
            positions = np.arange(p.cached, p.cached + p.length)
            self.slots.record(np.arange(p.slots.start, p.slots.stop)[:, None], positions, of_slots)
        if decoding:
            newest = experts[prompt_tokens : prompt_tokens + decoding]
            self.slots.record(np.arange(decoding), self.slots.newest(decoding)[1], newest)

    def _replayed(self, request: Request) -> Tensor:
        """The KV of the turns in a request's prompt, by the sums that generated them: each turn's prompt is
        prefilled, and its tokens are decoded, some at a time, since they are known."""
        length, cached = _whole_blocks(request.turns[-1]), 0
        cache = F.pad(torch.zeros_like(self._cache[:, :, :1, :, :1]), (0, 0, 0, length - 1))
        for begin, end in zip(request.turns[::2], request.turns[1::2], strict=True):
            while cached < end - 1:  # the newest token's are not there yet
                count, last = max(begin - cached, 0), min(max(begin, cached) + REPLAYED_TOKENS, end - 1)
                one = torch.ones(1, dtype=torch.long)
                prefill = Prefill(cached, count, slice(0, count), slice(0, 1), slots_per_prompt=one)
                ids = torch.tensor(request.prompt_ids[cached:last])
                prefills = (prefill,) if count else ()
                self._body(ids, torch.arange(cached, last), _whole_blocks(last), prefills, cache)
                cached = last
        return cache[:, :, 0, :, :cached]

    def _body(
        self,
        ids: Tensor,
        positions: Tensor,
        longest: int,
        prefills: tuple[Prefill, ...] = (),
        cache: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (tokens, H) of the prompts' tokens, then of one token of each of the first slots.

        These tokens attend to at most `longest` tokens of their slots."""
        cache = self._cache if cache is None else cache
        decoding = positions[prefills[-1].tokens.stop if prefills else 0 :]
        future_keys = torch.arange(longest, device=self.device)[None] > decoding[:, None]
        mask = torch.zeros(future_keys.shape, dtype=cache.dtype, device=self.device)
        mask = mask.masked_fill_(future_keys, float("-inf"))[:, None, None]
        rows = torch.arange(len(decoding), device=self.device).clamp_(max=cache.shape[2] - 1)
        step = Step(cache, prefills, decoding, rows, mask)
        out = self.model.get_decoder()(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, step=step
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits (rows, V) of hidden states (rows, H)."""
        head, bias = self._head, self._head.bias
        if self._fp32_logits and head.weight.dtype != torch.float32:  # on CUDA: exact products, FP32 sums
            logits = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
            return logits if bias is None else logits.add_(bias)
        return head(hidden.to(head.weight.dtype)).float()

    def _score(self, hidden: Tensor, ids: tuple[int, ...]) -> NDArray[np.void]:
        """PROMPT_SCORE (T,) of the tokens `ids` (T,), by the hidden states before them (T, H)."""
        scores = np.zeros(len(ids), PROMPT_SCORE)
        for first in range(0, len(ids), SCORED_TOKENS):
            part = slice(first, first + SCORED_TOKENS)
            logprobs = self._logits(hidden[part]).double().log_softmax(-1)
            tokens = torch.tensor(ids[part], device=self.device)
            scores["logprob"][part] = logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy()
            best, best_ids = logprobs.max(-1)
            scores["best_id"][part], scores["best_logprob"][part] = best_ids.cpu().numpy(), best.cpu().numpy()
        return scores

    def _sample(self, hidden: Tensor, first: int = 0) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """A token of each sequence from slot `first` on, and its log-prob at the request's temperature."""
        temperature, key, count = (self.slots.column(x)[first:] for x in ("temperature", "key", "count"))
        tempered, greedy = bool((temperature != 1).any()), bool((temperature == 0).any())
        t, keys, counts = (
            torch.from_numpy(x).to(self.device) for x in (temperature, key.view(np.int64), count)
        )
        tokens, logprobs = sample(self._logits(hidden), t, uniforms(keys, counts), tempered, greedy)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _free(self, ended: list[tuple[int, FinishReason]]) -> list[Completion]:
        """The completions of these slots; the last slots and their KV move into them.

        KV is kept for a request that is to be continued, unless it ended so long ago that a whole engine's
        requests ended since: its continuation will not come."""
        if not ended:
            return []
        completions = [self.slots.completion(slot, reason) for slot, reason in ended]
        for i, c in enumerate(completions):
            if c.request_id in self._prompt_scores:
                completions[i] = replace(c, prompt_scores=self._prompt_scores.pop(c.request_id))
        cached = self.slots.newest(self.slots.active)[1]  # the newest token's is not there yet
        for slot, reason in ended:
            request, _ = self.slots.requests[slot]
            if reason in request.keep_kv:
                self._kept[request.request_id] = self._cache[:, :, slot, :, : int(cached[slot])].clone()
        # On a CPU none is dropped: a continuation's bits must not depend on what else is generated.
        while self.device.type != "cpu" and len(self._kept) > self.slots.capacity:
            del self._kept[next(iter(self._kept))]
        moves = self.slots.free([slot for slot, _ in ended])
        sources, targets = (torch.from_numpy(x).to(self.device) for x in moves)
        if len(targets):
            longest = int(self.slots.newest(self.slots.active)[1].max())
            self._cache[:, :, targets, :, :longest] = self._cache[:, :, sources, :, :longest]
        return completions


def _whole_blocks(keys: int) -> int:
    return -(-keys // KEY_BLOCK) * KEY_BLOCK
