"""Makes the built-in model `tiny` again: `python -m examples.make_tiny FOLDER` (one to two minutes).

The model is trained on two-digit addition just enough to start RL. Three answers of ten in its SFT data are
right and the others close, so that the model learns to add but is uncertain, as a pretrained model may be: RL
then sharpens it. (With correct answers only and as few steps it is certain of wrong answers, and RL does not
improve it.) Its pass rate starts at about one in six: below a tenth RL finds too few correct samples; far
above, little of the sigmoid is left to see.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.models.cache import report_progress
from trainer.models.tiny import SEED, make_model, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PROBLEMS = 6_000
ANSWERS = 4  # in the SFT data, for each problem
RIGHT = 0.3  # share of the answers that are right
ERRORS = (-20, -11, -10, -9, -3, -2, -1, 1, 2, 3, 9, 10, 11, 20)  # of the others
PROBES = 300  # further problems, to measure the pass rate
TARGET = 0.15  # pass rate at which the SFT ends; it jumps by up to .03 between two measurements
BATCH = 128
LR = 3e-3
EVALUATE_EVERY = 20  # steps
MAX_STEPS = 4_000


def make_tiny(folder: Path) -> float:
    """Save the model, in bf16, and its tokenizer; returns its pass rate at T = 1 on unseen problems."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster at this size, and the same bits for any number of cores
    try:
        tokenizer, model = make_tokenizer(), make_model(SEED)
        pass_rate = train(model, tokenizer)
    finally:
        torch.set_num_threads(threads)
    model.bfloat16().save_pretrained(folder)  # half the bytes; the pass rate changes by .0004
    tokenizer.save_pretrained(folder)
    return pass_rate


def problems() -> list[tuple[str, str]]:
    """(prompt, answer) of every two-digit addition as reasoning-gym asks it; the held-out ones come last,
    as controller/data.py holds out the prompts with the smallest hashes."""
    pairs = [(f"Calculate {a} + {b}.", str(a + b)) for a in range(101) for b in range(101)]
    return sorted(pairs, key=lambda p: hashlib.sha256(p[0].encode()).hexdigest(), reverse=True)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """SFT until the pass rate on PROBES other problems reaches TARGET; returns that rate."""
    pairs = problems()
    ids, is_answer = encode(sft_data(pairs[:PROBLEMS]), tokenizer)
    probe_ids, probe_answer = encode(pairs[PROBLEMS : PROBLEMS + PROBES], tokenizer)
    order = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    report_progress("making `tiny`: SFT on two-digit addition (one to two minutes)")
    rate = 0.0
    for step in range(1, MAX_STEPS + 1):
        rows = torch.randint(len(ids), (BATCH,), generator=order)
        loss = -(token_logprobs(model, ids[rows]) * is_answer[rows]).sum() / is_answer[rows].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVALUATE_EVERY == 0:
            rate = pass_rate(model, probe_ids, probe_answer)
            if rate >= TARGET:
                break
    report_progress(f"`tiny` solves {rate:.3f} of unseen additions after {step} steps")
    return rate


def sft_data(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(prompt, a right or a close answer), ANSWERS times each."""
    rng = random.Random(SEED)

    def answer(right: str) -> str:
        if rng.random() < RIGHT:
            return right
        return str(rng.choice([n for n in (int(right) + off for off in ERRORS) if n >= 0]))

    return [(prompt, answer(right)) for _ in range(ANSWERS) for prompt, right in pairs]


def encode(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Prompt + answer + EOS of every pair: ids (n, T), padded on the right, and (n, T−1) 1.0 where the next
    token is EOS or of the answer."""
    rows = [(tokenizer.encode(q), [*tokenizer.encode(a), tokenizer.eos_token_id]) for q, a in pairs]
    width = max(len(q) + len(a) for q, a in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    is_answer = torch.zeros(len(rows), width - 1)
    for i, (q, a) in enumerate(rows):
        ids[i, : len(q) + len(a)] = torch.tensor(q + a)
        is_answer[i, len(q) - 1 : len(q) + len(a) - 1] = 1
    return ids, is_answer


def token_logprobs(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:  # (n, T) -> (n, T−1) nats
    """log p of every token after the first; no token attends to the padding on its right."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def pass_rate(model: Qwen3ForCausalLM, ids: Tensor, is_answer: Tensor) -> float:
    """The pass rate at T = 1: the mean probability of the right answer, computed, not sampled."""
    return float((token_logprobs(model, ids) * is_answer).sum(-1).exp().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the built-in model `tiny` again.")
    parser.add_argument("folder", type=Path, help="folder for the model and its tokenizer")
    make_tiny(parser.parse_args().folder)
