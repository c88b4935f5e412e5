"""Token weights, so that the loss is Σ weight · term: by token, by completion or by prompt."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token", "sample", "prompt", "sum"]


def token_weights(
    lengths: Sequence[int] | Tensor,  # (C,) number of loss tokens of each completion
    prompts: Sequence[int] | Tensor,  # (C,) id of the prompt of each completion: any integers
    aggregation: Aggregation = "prompt",
) -> Tensor:
    """(Σ lengths,) FP32 weights, completion after completion, for a whole optimizer batch.

    token: 1 / tokens, the mean over all tokens (DAPO). sample: mean over completions of the mean over their
    tokens (GRPO). prompt: mean over prompts of the mean over all tokens of a prompt (ScaleRL, arXiv
    2510.13786). sum: 1. Completions and prompts without a loss token are not counted.
    """
    n, group = (torch.as_tensor(x) for x in (lengths, prompts))
    for name, x in {"lengths": n, "prompts": group}.items():
        if x.is_floating_point() and bool((x != x.round()).any()):
            raise ValueError(f"{name}: expected whole numbers, given {x[x != x.round()][0].item()}")
    if n.dim() != 1 or n.shape != group.shape or bool((n < 0).any()):
        least = f", least length {int(n.min())}" if n.numel() else ""
        shapes = f"given shapes {tuple(n.shape)} and {tuple(group.shape)}{least}"
        raise ValueError(f"expected lengths ≥ 0 and prompts, one of each per completion, {shapes}")
    if aggregation not in (known := get_args(Aggregation)):
        raise ValueError(f"aggregation is {aggregation!r}; expected one of {', '.join(known)}")
    n, group = n.long(), group.long()
    share = {  # index of the unit to which each completion belongs; all units have the same weight
        "token": torch.zeros_like(n),
        "sample": torch.arange(len(n), device=n.device),
        "prompt": group.unique(return_inverse=True)[1],
    }.get(aggregation)
    if share is None:
        return torch.ones(int(n.sum()), dtype=torch.float32, device=n.device)
    tokens = torch.zeros_like(n).index_add_(0, share, n)  # of each unit
    weight = 1.0 / ((tokens > 0).sum() * tokens[share]).double()
    return weight.repeat_interleave(n).float()
