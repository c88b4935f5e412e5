"""Promises of packing and its attention: nothing lost, twice or leaked; exact to plain transformers."""

import importlib
import inspect
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training import VOCABULARY, sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.config import ModelConfig
from trainer.learner import attention
from trainer.learner.inputs import make_inputs
from trainer.learner.packing import pack
from trainer.learner.policy_model import PolicyModel, hidden_states
from trainer.types import TrainSequence


def some(groups: int, prompt: int, lengths: list[int], alphabet: int = VOCABULARY) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, prompt + g).tolist() for g in range(groups)]
    return [sequence(p, rng.integers(0, alphabet, n).tolist()) for p in prompts for n in lengths]


def test_the_documented_example_is_laid_out_as_drawn() -> None:
    a, b, c, w, u, v, x, y, z = range(9)
    (m,) = pack([sequence([a, b, c], [x, w, v, u]), sequence([a, b, c], [x, y, z])], 100)
    first, second = (0, 1) if m.input_ids[4] == w else (1, 0)
    assert m.input_ids.tolist() == [a, b, c, x, w, v, y]  # sorted: w before y
    assert m.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4]
    assert m.owners.tolist() == [first] * 4 + [second] * 3
    assert m.rows.tolist() == [2, 3, 4, 5, 2, 3, 6]
    assert m.targets.tolist() == [x, w, v, u, x, y, z]
    paths = [[0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6]]
    assert [b.path.tolist() for b in m.segments[0].branches] == paths


def test_unweighted_tokens_and_completions_cost_nothing() -> None:
    kept = sequence([1, 2], [3, 4, 5, 6], weights=[1, 0, 1, 0])
    (m,) = pack([kept, sequence([1, 2], [7, 8], weights=[0, 0])], 100)
    assert m.input_ids.tolist() == [1, 2, 3, 4]  # neither 5, the last weighted, nor 6, which nothing needs
    assert m.targets.tolist() == [3, 5] and m.rows.tolist() == [1, 3]
    assert pack([sequence([1, 2], [7, 8], weights=[0, 0])], 100) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(4, 60),
    st.integers(0, 99),
)
def test_every_weighted_token_is_in_exactly_one_micro_batch_with_its_own_context(
    lengths: list[list[int]], budget: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    everything = [
        sequence([g, *rng.integers(0, 9, 2)], rng.integers(0, 3, n), weights=rng.integers(0, 2, n))
        for g, group in enumerate(lengths)
        for n in group
    ]
    seen: dict[int, list[tuple[int, ...]]] = {}
    for m in pack(everything, budget):
        alone = len(set(m.owners.tolist())) == 1
        assert len(m.input_ids) <= budget or alone
        starts = np.cumsum([0, *(s.length for s in m.segments)])
        paths = {
            start + row: start + b.path[: len(b.path) - b.own_rows + k + 1]
            for start, s in zip(starts, m.segments, strict=False)
            for b in s.branches
            for k, row in enumerate(b.path[-b.own_rows :])
        }
        assert sorted(paths) == list(range(len(m.input_ids)))
        for row, target, owner in zip(m.rows, m.targets, m.owners, strict=True):
            context = m.input_ids[paths[row]].tolist()
            assert m.position_ids[paths[row]].tolist() == list(range(len(context)))
            seen.setdefault(int(owner), []).append((*context, int(target)))
    for i, s in enumerate(everything):
        full = [*s.prompt_ids.tolist(), *s.token_ids.tolist()]
        expected = [tuple(full[: len(s.prompt_ids) + k + 1]) for k in np.flatnonzero(s.token_weights)]
        assert seen.get(i, []) == expected


def hidden(model: PolicyModel, sequences: list[TrainSequence]) -> list[torch.Tensor]:
    """Hidden states at each sequence's loss tokens, packed together."""
    (m,) = pack(sequences, 10**6)
    with torch.no_grad():
        states = hidden_states(model.lm.base_model, make_inputs(m, model.dtype, model.lm.device), model.dtype)
    return [states[torch.from_numpy(m.owners == i)] for i in range(len(sequences))]


LENGTHS = {"short": [3, 1, 7, 7], "long": [150, 90, 40], "blocks": [600, 2, 257]}


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_one_by_one_by_transformers(model_dir: str, kind: str, checkpointing: bool) -> None:
    model = PolicyModel(model_dir, ModelConfig(dtype="float32"), checkpointing)
    sequences = some(3, 5, LENGTHS[kind], alphabet=3)  # few symbols: completions share prefixes
    layouts = [attention.layout(m.segments) for m in pack(sequences, 10**6)]
    assert bool(layouts[0].blocks) == (kind != "short")
    for implementation in ("eager", "sdpa"):
        plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, attn_implementation=implementation, dtype=torch.float32
        )
        for s, ours in zip(sequences, hidden(model, sequences), strict=True):
            ids = torch.tensor([[*s.prompt_ids.tolist(), *s.token_ids.tolist()]])
            with torch.no_grad():
                theirs = plain.base_model(ids).last_hidden_state[0, len(s.prompt_ids) - 1 : -1]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", LENGTHS)
def test_changing_one_completion_leaves_all_others_bitwise_equal(model_dir: str, kind: str) -> None:
    model = PolicyModel(model_dir, ModelConfig(dtype="float32"))
    rng = np.random.default_rng(0)
    # First tokens differ and stay, so that no prefix is shared and the layout stays the same.
    sequences = [
        sequence([g, 30, 2, 3], [i, *rng.integers(0, 30, n).tolist()])
        for g in range(3)
        for i, n in enumerate(LENGTHS[kind])
    ]
    before = hidden(model, sequences)
    changed = sequence(sequences[2].prompt_ids.tolist(), [2, *(29 - sequences[2].token_ids[1:]).tolist()])
    after = hidden(model, [*sequences[:2], changed, *sequences[3:]])
    equal = [torch.equal(b, a) for b, a in zip(before, after, strict=True)]
    assert equal == [i != 2 for i in range(len(sequences))]


def test_prefixes_are_computed_once() -> None:
    (m,) = pack([sequence(list(range(14)), [1, 2, 3, 4])] * 7 + [sequence(list(range(14)), [1, 2, 9])], 4096)
    assert len(m.input_ids) == 14 + 3 and len(m.rows) == 7 * 4 + 3


def varlen_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: attention.Lengths, scaling: float,
    window: int = attention.NO_WINDOW,
) -> torch.Tensor:  # fmt: skip
    """What flash-attn's variable-length kernel computes: causal, aligned at the bottom right."""
    ends_q, ends_k, longest_q, longest_k = lengths
    assert ends_q.dtype == ends_k.dtype == torch.int32 and len(ends_q) == len(ends_k)
    counts_q, counts_k = ends_q.diff().tolist(), ends_k.diff().tolist()
    assert sum(counts_q) == len(q) and sum(counts_k) == len(k) == len(v)
    assert (max(counts_q), max(counts_k)) == (longest_q, longest_k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = []
    for qb, kb, vb in zip(q.split(counts_q), k.split(counts_k), v.split(counts_k), strict=True):
        scores = torch.einsum("ihd,jhd->hij", qb, kb) * scaling
        shift = len(kb) - len(qb)
        seen = torch.ones(len(qb), len(kb)).tril(shift).triu(shift + 1 - window).bool()
        out.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), vb))
    return torch.cat(out)


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 6, 130])
def test_what_a_flash_kernel_is_given_is_the_same_attention(kind: str, window: int | None) -> None:
    """On CUDA one call takes all branches; here a reference implementation of that call replaces it."""
    (m,) = pack(some(3, 5, LENGTHS[kind], alphabet=3), 10**6)
    g = torch.Generator().manual_seed(0)
    options: Any = {"dtype": torch.float64, "generator": g, "requires_grad": True}
    q, k, v = (torch.randn(1, heads, len(m.input_ids), 8, **options) for heads in (4, 2, 2))
    mixed = torch.randn(1, len(m.input_ids), 4, 8, dtype=torch.float64, generator=g)
    plain = attention.layout(m.segments)
    options = {"packed": plain, "sliding_window": window}
    ours, _ = attention.packed_attention(torch.nn.Identity(), q, k, v, None, 0.3, **options)
    flash = attention.layout(m.segments, flash=True)
    assert not flash.batches and flash.restore is None
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    theirs = attention.by_flash(varlen_reference, *rows, flash, 0.3, window or attention.NO_WINDOW)[None]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad((x * mixed).sum(), (q, k, v)) for x in (ours, theirs))
    for a, b in zip(*gradients, strict=True):  # rows taken many times are summed in FP32 or above
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


Q, K = torch.randn(7, 4, 8), torch.randn(9, 2, 8)  # four heads of queries share two of keys
ENDS = attention.Lengths(*torch.tensor([[0, 3, 7], [0, 4, 9]], dtype=torch.int32), 4, 5)


def chosen(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, types.ModuleType | None]
) -> tuple[attention.Flash | None, str]:
    """What is chosen where these packages are installed; one that is None is not."""
    for _, module, *_ in attention.KERNELS[:3]:
        monkeypatch.setitem(sys.modules, module, packages.get(module))
    for name in {"flash_attn", "torch.nn.attention.varlen"} & packages.keys():
        monkeypatch.setitem(sys.modules, name, packages[name])
    attention.flash_kernel.cache_clear()
    try:
        return attention.flash_kernel()
    finally:
        attention.flash_kernel.cache_clear()


def flash_attn(returns_pair: bool = False) -> types.ModuleType:
    """A module with the function that the three generations of FlashAttention share."""

    def flash_attn_varlen_func(q, k, v, softmax_scale, causal, window_size=(-1, -1), **lengths):  # type: ignore[no-untyped-def]  # as in the package
        assert causal and k.shape[1] == 2
        rest = attention.Lengths(**lengths), softmax_scale, window_size[0] + 1 or attention.NO_WINDOW
        out = varlen_reference(q, k, v, *rest)
        return (out, None) if returns_pair else out

    module = types.ModuleType("fake")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]  # a module made here
    return module


def test_flash_kernels_are_tried_in_order_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch.nn.attention.varlen")  # before a module is broken: its import looks at all
    three, four, two = "flash_attn_interface", "flash_attn.cute", "flash_attn"
    alone = types.ModuleType("flash_attn")  # a package of the fourth generation's files only
    broken = types.ModuleType("broken")
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(OSError("undefined symbol: x\nmore"))  # type: ignore[method-assign]  # a module that fails
    torchs = "torch.nn.attention.varlen"
    cases: list[tuple[dict[str, types.ModuleType | None], str]] = [
        ({three: flash_attn(), four: flash_attn(True), two: flash_attn()}, "attention by FlashAttention 3"),
        ({four: flash_attn(True), two: alone}, "attention by FlashAttention 4"),
        ({two: flash_attn()}, "attention by FlashAttention 2"),
        ({three: broken, two: flash_attn()}, "attention by FlashAttention 2; FlashAttention 3 cannot be "
         "imported: undefined symbol: x"),
        ({four: broken, two: alone}, f"attention by {torchs}; FlashAttention 4 cannot be imported: undefined "
         "symbol: x; FlashAttention 2 cannot be imported: module 'flash_attn' has no attribute "
         "'flash_attn_varlen_func'"),
        ({}, f"attention by {torchs}"),
    ]  # fmt: skip
    for packages, expected in cases:
        kernel, line = chosen(monkeypatch, packages)
        assert line == expected and kernel is not None
        if torchs not in line:
            for window in (2, attention.NO_WINDOW):
                rest = Q, K, K, ENDS, 0.3, window
                assert torch.equal(kernel(*rest), varlen_reference(*rest))
    kernel, line = chosen(monkeypatch, {torchs: None})
    assert kernel is None and line == "attention by blocks of masked SDPA, for want of a flash kernel"


@pytest.mark.parametrize("newer", [True, False])
def test_torchs_varlen_attention_is_called_as_its_signature_has_it(
    newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.13 takes an argument for fewer KV heads than query heads, torch 2.11 none; neither wants them
    repeated."""
    from torch.nn.attention import varlen

    real = list(inspect.signature(varlen.varlen_attn).parameters)
    assert real[:3] == ["query", "key", "value"] and {"scale", "window_size"} < set(real)
    assert real[3:7] == ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]

    def of_2_13(q, k, v, *rest, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]  # as in torch
        assert window_size[1] == 0 and enable_gqa and k.shape[1] == v.shape[1] == 2
        lengths = attention.Lengths(*rest)
        return varlen_reference(q, k, v, lengths, scale, window_size[0] + 1 or attention.NO_WINDOW)

    def of_2_11(*tensors, scale, window_size):  # type: ignore[no-untyped-def]  # as in torch
        return of_2_13(*tensors, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(varlen, "varlen_attn", of_2_13 if newer else of_2_11)
    kernel, _ = chosen(monkeypatch, {})
    assert kernel is not None
    for window in (2, attention.NO_WINDOW):
        rest = Q, K, K, ENDS, 0.3, window
        torch.testing.assert_close(kernel(*rest), varlen_reference(*rest))


def test_attention_it_cannot_do_is_refused() -> None:
    (m,) = pack(some(1, 5, [9, 3]), 100)
    x, packed = torch.zeros(1, 2, len(m.input_ids), 4), attention.layout(m.segments)
    with pytest.raises(ValueError, match="packed attention supports neither softcap nor s_aux"):
        attention.packed_attention(torch.nn.Identity(), x, x, x, None, 1.0, packed=packed, softcap=30.0)


@pytest.mark.parametrize(
    ("major", "name"), [(8, "FlashAttention 2"), (9, "FlashAttention 4"), (10, "FlashAttention 4")]
)
def test_a_card_gets_a_kernel_made_for_it(major: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    packages = {"flash_attn.cute": flash_attn(), "flash_attn": flash_attn()}
    assert chosen(monkeypatch, packages)[1].startswith(f"attention by {name}")
