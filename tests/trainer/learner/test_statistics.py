"""Promises of the ratio metrics: those of the whole batch, however it is split, and by lag."""

import json

import numpy as np
import pytest

from trainer.learner.statistics import merge, ratio_metrics, stats_by_lag

RNG = np.random.default_rng(1)
LOGP = RNG.normal(-2, 1, 500).astype(np.float32)
GEN = (LOGP + RNG.normal(0, 0.4, 500)).astype(np.float32)
ENTROPY = RNG.uniform(0, 3, 500).astype(np.float32)
LAGS = RNG.choice([0, 1, 3], 500).astype(np.int32)


def expected(mask: np.ndarray) -> dict[str, float]:
    log_ratio = (LOGP - GEN).astype(np.float64)[mask]
    ratio = np.exp(log_ratio)
    return {
        "mean": ratio.mean(), "kl": (ratio - 1 - log_ratio).mean(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_metrics_are_those_of_all_tokens_and_of_each_lag(ranks: int) -> None:
    split = [slice(i * 500 // ranks, (i + 1) * 500 // ranks) for i in range(ranks)]
    by_lag = merge(stats_by_lag(LOGP[s], GEN[s], ENTROPY[s], LAGS[s]) for s in split)
    metrics = ratio_metrics(by_lag)
    whole, ratio = expected(np.ones(500, bool)), np.exp((LOGP - GEN).astype(np.float64))
    assert metrics["ratio/mean"] == pytest.approx(whole["mean"])
    assert metrics["ratio/ess"] == pytest.approx(whole["ess"])
    assert metrics["kl/k3"] == pytest.approx(whole["kl"])
    assert metrics["kl/k1"] == pytest.approx((GEN - LOGP).astype(np.float64).mean())
    assert (metrics["ratio/min"], metrics["ratio/max"]) == (ratio.min(), ratio.max())
    assert metrics["learner/entropy"] == pytest.approx(ENTROPY.mean(), rel=1e-6)
    for lag in (0, 1, 3):
        own = expected(lag == LAGS)
        assert metrics["lag/ratio"][str(lag)] == pytest.approx(own["mean"])
        assert metrics["lag/kl"][str(lag)] == pytest.approx(own["kl"])
        assert metrics["lag/ess"][str(lag)] == pytest.approx(own["ess"])
        assert by_lag[lag].tokens == (lag == LAGS).sum()
    assert json.loads(json.dumps(metrics)) == metrics
