"""How far learner and generator are apart, over a batch's loss tokens and by their lag; ρ = π / π_gen.

Each rank adds up its tokens by lag; sums of sums are exact, so the metrics are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sums:
    """Over some tokens, in float64."""

    tokens: int
    ratio: float
    ratio_squared: float
    log_ratio: float
    k3: float  # Schulman's estimate of KL(generator || learner): ρ − 1 − log ρ
    truncated: int  # tokens with ρ above the objective's bound
    entropy: float
    least: float  # ratio
    greatest: float

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.tokens + other.tokens, self.ratio + other.ratio, self.ratio_squared + other.ratio_squared,
            self.log_ratio + other.log_ratio, self.k3 + other.k3, self.truncated + other.truncated,
            self.entropy + other.entropy, min(self.least, other.least), max(self.greatest, other.greatest),
        )  # fmt: skip

    @property
    def ess(self) -> float:
        """Effective sample size, as a share."""
        return self.ratio**2 / (self.tokens * self.ratio_squared)


def sums_by_lag(
    logprobs: NDArray[np.float32],
    logprobs_gen: NDArray[np.float32],
    entropy: NDArray[np.float32],
    lags: NDArray[np.int32],
    max_ratio: float,
) -> dict[int, Sums]:
    """Of N tokens; every argument is (N,)."""
    log_ratio = (logprobs - logprobs_gen).astype(np.float64)
    ratio = np.exp(log_ratio)
    found = {}
    for lag in np.unique(lags).tolist():
        of = lags == lag
        r, log_r = ratio[of], log_ratio[of]
        found[lag] = Sums(
            len(r), r.sum(), (r**2).sum(), log_r.sum(), (r - 1 - log_r).sum(), int((r > max_ratio).sum()),
            entropy[of].sum(dtype=np.float64), r.min(), r.max(),
        )  # fmt: skip
    return found


def merged(parts: Iterable[dict[int, Sums]]) -> dict[int, Sums]:
    """Of all the tokens that the parts are of."""
    total: dict[int, Sums] = {}
    for part in parts:
        for lag, sums in part.items():
            total[lag] = total[lag] + sums if lag in total else sums
    return dict(sorted(total.items()))


def ratio_metrics(by_lag: dict[int, Sums]) -> dict[str, Any]:
    """Numbers of the whole batch, and under lag/ numbers by lag. At least one token."""
    s = reduce(lambda a, b: a + b, by_lag.values())
    return {
        "ratio/mean": float(s.ratio / s.tokens),
        "ratio/min": float(s.least),
        "ratio/max": float(s.greatest),
        "ratio/truncated": s.truncated / s.tokens,
        "ratio/ess": float(s.ess),
        "kl/k1": float(-s.log_ratio / s.tokens),  # estimates of KL(generator || learner), in nats
        "kl/k3": float(s.k3 / s.tokens),
        "learner/entropy": float(s.entropy / s.tokens),
        "lag/ratio": {str(lag): float(x.ratio / x.tokens) for lag, x in by_lag.items()},
        "lag/kl": {str(lag): float(x.k3 / x.tokens) for lag, x in by_lag.items()},
        "lag/ess": {str(lag): float(x.ess) for lag, x in by_lag.items()},
    }
