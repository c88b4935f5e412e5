"""Log-prob, entropy and the coefficients of the logits' gradient from a row's softmax statistics.

For the logits u of C rows (capped and divided by the temperature) a backend returns a (4, C) tensor. Per
row, with any anchor m near the maximum, it holds:

    anchor m,   others = Σ_{j≠y} e^{u_j − m},   target = u_y,   dot = Σ_{j≠y} e^{u_j − m} (u_j − m)

Statistics over parts of the vocabulary (tiles, ranks) are merged by converting them to a common anchor.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax of C rows of logits; each tensor is (C,)."""

    logp: Tensor  # log π(target)
    entropy: Tensor
    anchor: Tensor
    total: Tensor  # Σ_j e^{u_j − anchor}
    others: Tensor  # the same without the target


def softmax(stats: Tensor) -> Softmax:
    """log π(target) and entropy from (4, C) statistics.

    log π = −log1p(Σ_{j≠y} e^{u_j − u_y}) keeps its relative precision as log π → 0; where the target is so
    unlikely that e^{u_y − m} loses digits, log π = u_y − m − log Σ.
    """
    anchor, others, target, dot = stats
    d = target - anchor
    exp_y = d.exp()
    total = others + exp_y
    log_total = torch.where(d == 0, torch.log1p(others), total.log())
    logp = torch.where(d > -20, -torch.log1p(others / exp_y.clamp(min=1e-30)), d - log_total)
    entropy = log_total - (dot + exp_y * d) / total
    return Softmax(logp, entropy, anchor, total, others)


@dataclass(frozen=True, slots=True)
class Gradient:
    """dz_j = e^v (a + b (v + k)) with v = u_j − anchor for j ≠ y, and dz_y; (C,) each."""

    anchor: Tensor
    a: Tensor
    b: Tensor | None  # None, like k, if the loss contains no entropy
    k: Tensor | None
    dz_y: Tensor

    def __getitem__(self, rows: slice) -> "Gradient":
        """The coefficients of some of the rows."""
        b, k = (None if x is None else x[rows] for x in (self.b, self.k))
        return Gradient(self.anchor[rows], self.a[rows], b, k, self.dz_y[rows])

    def bound(self) -> Tensor:
        """() at least every |dz_j|, and 1e-20. No logit may lie above its anchor."""
        bound = self.dz_y.abs()  # without entropy the others have the other sign, and sum to it
        if self.b is not None and self.k is not None:  # e^v ≤ 1, |v e^v| < 1
            bound = bound + self.a.abs() + self.b.abs() * (1 + self.k.abs())
        return bound.amax().clamp(min=1e-20)

    def over(self, unit: Tensor) -> "Gradient":
        """The gradient divided by unit ()."""
        b = None if self.b is None else self.b / unit
        return replace(self, a=self.a / unit, b=b, dz_y=self.dz_y / unit)


def gradient(rows: Softmax, c: Tensor, e: Tensor | None, inverse_temperature: Tensor) -> Gradient:
    """The logits' gradient, given per row c = dL/dlog π and e = dL/dentropy (None: no entropy in the loss).

    dz_j = −c π_j − e π_j (log π_j + H), dz_y = c (1 − π_y) − e π_y (log π_y + H), over the temperature.
    c (1 − π_y) = c · others / total keeps its precision as π_y → 1.
    """
    scale = inverse_temperature / rows.total
    dz_y = c * rows.others * scale
    if e is None:
        return Gradient(rows.anchor, -c * scale, None, None, dz_y)
    dz_y = dz_y - e * rows.logp.exp() * (rows.logp + rows.entropy) * inverse_temperature
    return Gradient(rows.anchor, -c * scale, -e * scale, rows.entropy - rows.total.log(), dz_y)


def merge_over(group: dist.ProcessGroup, stats: Tensor) -> Tensor:
    """Statistics over the whole vocabulary from those of each rank's shard, bitwise equal on every rank.

    A rank whose shard does not contain a row's target must pass 0 as `target`.
    """
    anchor, others, target, dot = stats
    highest = anchor.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    shift = anchor - highest
    shrink = shift.exp()
    sums = torch.stack([others * shrink, target, shrink * (dot + shift * others)])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return torch.cat([highest[None], sums])
