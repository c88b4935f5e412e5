"""The numbers of a step: what decides the update, and how far learner and generator differ (ρ = π / π_gen).

The kernels' statistics are means over one micro-batch; here are sums, which add up over micro-batches and
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.learner.critic import Sums
from trainer.learner.packing import MicroBatch
from trainer.learner.policy_model import PolicyOutput
from trainer.learner.schedule import DUMMY
from trainer.mismatch import RANGES, means_by_position, sums_by_position
from trainer.types import TrainBatch


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Sums over some tokens, in float64."""

    tokens: int
    ratio: float
    ratio_squared: float
    log_ratio: float
    k3: float  # Schulman's estimate of KL(generator || learner): ρ − 1 − log ρ
    entropy: float
    min_ratio: float
    max_ratio: float

    def __add__(self, other: RatioStats) -> RatioStats:
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        total["min_ratio"] = min(self.min_ratio, other.min_ratio)
        total["max_ratio"] = max(self.max_ratio, other.max_ratio)
        return RatioStats(**total)

    @property
    def ess(self) -> float:
        """Effective sample size, as a share."""
        return self.ratio**2 / (self.tokens * self.ratio_squared)


def stats_by_lag(
    logprobs: NDArray[np.float32],  # (N,), as are the others
    logprobs_gen: NDArray[np.float32],
    entropy: NDArray[np.float32],
    lags: NDArray[np.int32],
) -> dict[int, RatioStats]:
    """The sums over the tokens of each lag."""
    log_ratio = (logprobs - logprobs_gen).astype(np.float64)
    ratio = np.exp(log_ratio)
    by_lag = {}
    for lag in np.unique(lags).tolist():
        mask = lags == lag
        r, log_r = ratio[mask], log_ratio[mask]
        by_lag[lag] = RatioStats(
            len(r), r.sum(), (r**2).sum(), log_r.sum(), (r - 1 - log_r).sum(),
            entropy[mask].sum(dtype=np.float64), r.min(), r.max(),
        )  # fmt: skip
    return by_lag


def merge(by_lag: Iterable[dict[int, RatioStats]]) -> dict[int, RatioStats]:
    """The sums of all micro-batches or ranks together, by ascending lag."""
    total: dict[int, RatioStats] = {}
    for stats in by_lag:
        for lag, s in stats.items():
            total[lag] = total[lag] + s if lag in total else s
    return dict(sorted(total.items()))


def ratio_metrics(by_lag: dict[int, RatioStats]) -> dict[str, Any]:
    """Metrics of the whole batch, and under lag/ by lag. Needs at least one token."""
    s = reduce(lambda a, b: a + b, by_lag.values())
    return {
        "ratio/mean": float(s.ratio / s.tokens),
        "ratio/min": float(s.min_ratio),
        "ratio/max": float(s.max_ratio),
        "ratio/ess": float(s.ess),
        "kl/k1": float(-s.log_ratio / s.tokens),  # estimates of KL(generator || learner), in nats
        "kl/k3": float(s.k3 / s.tokens),
        "learner/entropy": float(s.entropy / s.tokens),
        "lag/ratio": {str(lag): float(x.ratio / x.tokens) for lag, x in by_lag.items()},
        "lag/kl": {str(lag): float(x.k3 / x.tokens) for lag, x in by_lag.items()},
        "lag/ess": {str(lag): float(x.ess) for lag, x in by_lag.items()},
    }


@dataclass(frozen=True, slots=True)
class BatchStats:
    """The sums of a step over one rank's tokens, or over the whole batch's."""

    loss: float
    squared_norm: float  # of the gradient
    by_lag: dict[int, RatioStats]
    reported: dict[str, float]  # sums over tokens of the loss's own statistics
    problem: str  # why the numbers are missing, if they are
    critic: Sums  # zeros where there is none
    by_position: NDArray[np.float64]  # how far learner and generator lie apart
    # (2, N) log ratio to the generator and entropy, nats, of each sequence's loss tokens, by its index.
    tokens: dict[int, NDArray[np.float16]]

    @property
    def norm(self) -> float:
        """The gradient's norm; over the whole batch only."""
        return math.sqrt(self.squared_norm)

    @property
    def overflowed(self) -> bool:
        """True if the gradient alone is not finite, as where float16's loss scale is too high."""
        return math.isfinite(self.loss) and not self.problem and not math.isfinite(self.squared_norm)


def rank_stats(
    outputs: Sequence[tuple[MicroBatch, PolicyOutput]], version: int, replicas: int, squared_norm: float,
    critic: Sums, has_kl: bool,
) -> BatchStats:  # fmt: skip
    """The sums over a rank's micro-batches, each of whose losses is counted by `replicas` ranks."""
    by_lag, loss, by_position = [], 0.0, np.zeros((len(RANGES), 2))
    tokens = dict[int, NDArray[np.float16]]()
    # These are of the objective's own ratio, which is not to the generator where the anchor is recomputed.
    reported = dict.fromkeys(("ratio/truncated", "kl/ref")[: 1 + has_kl], 0.0)
    for m, out in outputs:
        loss += float(out.loss) / replicas  # type: ignore[arg-type]  # never None here
        if m is not DUMMY and not out.problem:
            logprobs, entropy = out.logprobs.cpu().numpy(), out.entropy.cpu().numpy()
            positions = m.position_ids[m.rows] + 1
            by_position += sums_by_position(np.abs(logprobs - m.logprobs_gen), positions)
            tokens |= _by_owner(np.stack([logprobs - m.logprobs_gen, entropy]), m.owners)
            by_lag.append(stats_by_lag(logprobs, m.logprobs_gen, entropy, version - m.versions))
            for name in reported:
                reported[name] += len(logprobs) * float(out.stats[name])
    problem = next((out.problem for _, out in outputs if out.problem), "")
    return BatchStats(loss, squared_norm, merge(by_lag), reported, problem, critic, by_position, tokens)


def _by_owner(values: NDArray[np.float32], owners: NDArray[np.int64]) -> dict[int, NDArray[np.float16]]:
    """(2, N) values by the sequence that owns them, whose tokens are consecutive."""
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    return dict(zip(owners[starts].tolist(), np.split(values.astype(np.float16), starts[1:], 1), strict=True))


def total(stats: Sequence[BatchStats]) -> BatchStats:
    """The whole batch's sums from those of the ranks."""
    return BatchStats(
        sum(s.loss for s in stats),
        sum(s.squared_norm for s in stats),
        merge(s.by_lag for s in stats),
        {name: sum(s.reported[name] for s in stats) for name in stats[0].reported},
        next((s.problem for s in stats if s.problem), ""),
        np.sum([s.critic for s in stats], 0),
        np.sum([s.by_position for s in stats], 0),
        {owner: tokens for s in stats for owner, tokens in s.tokens.items()},
    )


def batch_metrics(stats: BatchStats) -> dict[str, Any]:
    """The metrics of the whole batch's tokens. Needs at least one token."""
    tokens = sum(s.tokens for s in stats.by_lag.values())
    means = {name: x / tokens for name, x in stats.reported.items()}
    position = {"mismatch/by_position": means_by_position(stats.by_position)}
    return {"learner/tokens": float(tokens)} | means | position | ratio_metrics(stats.by_lag)


def lag_histogram(batch: TrainBatch, version: int) -> dict[int, int]:
    """Loss tokens by lag: the learner's version minus the token's."""
    by_sequence = [version - s.versions[s.token_weights != 0] for s in batch.sequences]
    lags, tokens = np.unique(np.concatenate([np.zeros(0, np.int32), *by_sequence]), return_counts=True)
    return dict(zip(lags.tolist(), tokens.tolist(), strict=True))
