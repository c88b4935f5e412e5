"""Promises of the built-in `tiny`: its size, its tokenizer, its shipped weights, a pass rate for RL."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import make_tiny as tiny
from trainer.config import DataConfig
from trainer.controller.data import Reader, load_prompts
from trainer.models.resolve import resolve_model

ADDITION = DataConfig(
    options=dict.fromkeys(["min_terms", "max_terms", "min_digits", "max_digits"], 2)
    | {"operators": ["+"], "allow_parentheses": False, "allow_negation": False},
    size=2000,
    held_out=200,
)


def test_the_folder_loads_as_any_causal_lm(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = "Calculate 37 + 85.\n122"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert 140_000 < sum(p.numel() for p in model.parameters()) < 170_000


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = tiny.make_model(5).state_dict()
    torch.manual_seed(2)
    again, other = tiny.make_model(5).state_dict(), tiny.make_model(6).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first[name], other[name])


def test_sft_never_sees_a_held_out_prompt_nor_the_probes() -> None:
    data = load_prompts(Reader(ADDITION, tiny.make_tokenizer()))
    trained = [q for q, _ in tiny.problems()[: tiny.PROBLEMS]]
    probed = [q for q, _ in tiny.problems()[tiny.PROBLEMS : tiny.PROBLEMS + tiny.PROBES]]
    held_out = {p.text for p in data.held_out}
    assert len(held_out) == 200 and held_out <= {q for q, _ in tiny.problems()}
    assert not held_out & {*trained, *probed}
    assert not set(trained) & set(probed)


def rate_of_held_out(folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [(p.text, p.answer) for p in load_prompts(Reader(ADDITION, tokenizer)).held_out]
    return float(np.mean([probability(model, tokenizer, *pair) for pair in pairs]))


@torch.no_grad()
def probability(model: Any, tokenizer: Any, prompt: str, answer: Any) -> float:
    """That of the right answer and EOS at T = 1, computed and not sampled."""
    context, target = tokenizer.encode(prompt), [*tokenizer.encode(str(answer)), tokenizer.eos_token_id]
    logits = model(input_ids=torch.tensor([context + target])).logits[0, len(context) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None]).sum().exp())


def test_the_weights_in_the_package_are_small_and_start_where_rl_can_begin(tmp_path: Path) -> None:
    folder = Path(resolve_model("tiny", cache=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()  # nothing is made or copied
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 400_000
    assert rate_of_held_out(folder) == pytest.approx(0.149, abs=0.02)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny.make_tokenizer().get_vocab()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sft_ends_where_rl_can_begin(tmp_path: Path) -> None:
    reached = tiny.make_tiny(tmp_path)
    assert 0.12 <= reached <= 0.18
    assert 0.12 <= rate_of_held_out(tmp_path) <= 0.22


def test_sft_answers_are_right_at_their_rate_and_close_otherwise() -> None:
    pairs = tiny.problems()[:2000]
    answers = tiny.sft_data(pairs)
    assert [(q, a) for q, a, _ in answers] == pairs
    assert all(len(c) == tiny.ANSWERS for *_, c in answers)
    off = [abs(int(c) - int(a)) for _, a, completions in answers for c in completions]
    assert abs(off.count(0) / len(off) - tiny.RIGHT) < 0.02
    assert max(off) <= max(tiny.ERRORS)
