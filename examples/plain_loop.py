"""RL on one page, nothing hidden: a tiny transformer learns from reward alone.

    prompt `7 ×3` ─> completions sampled token by token ─> reward: how much of `7 7 7 end` each has right
         AdamW <─ policy_loss(hidden, head, tokens, …) <─ advantage: reward against the prompt's other ones

Run `python -m examples.plain_loop`: it prints its curve, from chance to right, in a quarter of a minute.
"""

from collections.abc import Iterator

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kernels import CISPO, policy_loss, token_weights

TIMES, END, VOCABULARY = 10, 13, 14  # ids: ten symbols, `×1` `×2` `×3`, the end of a completion
PROMPTS, GROUP, LENGTH = 64, 8, 4  # prompts a step, completions a prompt, tokens a completion at most


def train(steps: int = 100, seed: int = 0) -> Iterator[float]:
    """Yields the mean reward of each step; guessing gets 1/14, the best is 1."""
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=4, head_dim=16)  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
    prompt_of = torch.arange(PROMPTS).repeat_interleave(GROUP)  # (C,) of each completion
    for _ in range(steps):
        symbol, times = (torch.randint(n, (PROMPTS, 1))[prompt_of] for n in (10, 3))  # (C, 1); times - 1
        ids = torch.cat([symbol, TIMES + times], 1)
        logprobs_gen = torch.empty(len(ids), 0)  # the generator's log-prob of each token, kept as it samples
        with torch.no_grad():
            while logprobs_gen.shape[1] < LENGTH:
                log_pi = model(ids).logits[:, -1].log_softmax(-1)
                token = log_pi.exp().multinomial(1)
                ids = torch.cat([ids, token], 1)
                logprobs_gen = torch.cat([logprobs_gen, log_pi.gather(1, token)], 1)
        tokens, place = ids[:, 2:], torch.arange(LENGTH)  # (C, T), (T,)
        mask = (tokens == END).cumsum(1) - (tokens == END).long() == 0  # all before the first END, and that
        answer = torch.where(place <= times, symbol, torch.where(place == times + 1, END, -1))
        right = ((tokens == answer) & mask).sum(1)
        reward = (right / torch.maximum(mask.sum(1), times[:, 0] + 2)).view(PROMPTS, GROUP)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-3)
        hidden = model.model(ids).last_hidden_state[:, 1:-1]  # (C, T, H): the states that predict `tokens`
        out = policy_loss(
            hidden[mask], model.lm_head.weight, tokens[mask], logprobs_gen=logprobs_gen[mask],
            advantages=advantage.view(-1, 1).expand_as(mask)[mask], objective=CISPO(max_ratio=4.0),
            token_weights=token_weights(mask.sum(1), prompt_of, "prompt"),
        )  # fmt: skip
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        yield float(reward.mean())


if __name__ == "__main__":
    torch.set_num_threads(1)  # at this size threads wait for each other
    for step, reward in enumerate(train(), 1):
        if step % 5 == 0:
            print(f"step {step:3d}  reward {reward:.2f}  {'█' * round(40 * reward)}", flush=True)
