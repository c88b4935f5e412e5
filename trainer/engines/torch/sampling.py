"""Sampling of tokens from logits by the inverse CDF; the random numbers depend on the sample alone.

Nothing here waits for the device, so that a CUDA graph can hold it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLED_LOGITS = 800_000  # logits sampled from at a time on a CPU, few enough to stay in its cache
SAMPLE_BLOCK = 128  # tokens of the vocabulary whose probabilities are summed before searching inside a block


def sample(
    logits: Tensor,  # (B, V) FP32; overwritten
    temperature: Tensor,  # (B,) FP32; 0: greedy
    random: Tensor,  # (B,) FP64 in [0, 1)
    tempered: bool,  # a temperature is not 1
    greedy: bool,  # a temperature is 0
) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probs (B,) in FP64: NaN for a row of logits that are not finite."""
    rows = max(1, SAMPLED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    tokens, logprobs = [], []
    for z, t, u in zip(logits.split(rows), temperature.split(rows), random.split(rows), strict=True):
        if tempered:
            z.div_(t.where(t != 0, 1)[:, None])
        best = z.argmax(1) if greedy else None
        p = z.sub_(z.amax(1, keepdim=True)).exp_()
        token, total = sample_inverse_cdf(p, u)
        if best is not None:
            token = token.where(t != 0, best)
        tokens.append(token)
        logprobs.append(p.gather(1, token[:, None])[:, 0].double().log() - total.log())
    return torch.cat(tokens), torch.cat(logprobs)


def sample_inverse_cdf(
    p: Tensor,  # (B, V) FP32, not normalised
    uniforms: Tensor,  # (B,) FP64 in [0, 1)
) -> tuple[Tensor, Tensor]:
    """Tokens (B,) drawn by inverse CDF and sums of p (B,), FP64: a block is chosen, then a token in it."""
    rows, vocab = torch.arange(len(p), device=p.device), p.shape[1]
    blocks = F.pad(p, (0, -vocab % SAMPLE_BLOCK)).view(len(p), -1, SAMPLE_BLOCK)
    sums = blocks.sum(2).double()
    cdf = sums.cumsum(1)
    total = cdf[:, -1]
    target = uniforms * total
    block = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)
    block_cdf = blocks[rows, block].double().cumsum(1)
    share = (target - cdf[rows, block] + sums[rows, block]) / sums[rows, block]  # of the block's sum
    token = torch.searchsorted(block_cdf, (share * block_cdf[:, -1])[:, None], right=True)[:, 0]
    return (block * SAMPLE_BLOCK + token).clamp_(max=vocab - 1), total


def uniforms(
    key: Tensor,  # (B,) int64, the bits of an unsigned number
    position: Tensor,  # (B,) int64
) -> Tensor:
    """Numbers (B,) FP64 in [0, 1) for tokens at these positions, of the SplitMix64 sequence from `key` on."""
    z = key + (position + 1) * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 modulo 2^64
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    z ^= _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits of unsigned numbers, whose bits the int64 tensor holds."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
