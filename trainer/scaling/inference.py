"""Training against inference: how much training is worth as much as more completions of a question?

R_N(C) is the worth of N completions after training for C: the mean over the held-out prompts of pass@N, maj@N
or best@N. Doubling N is worth the further training ΔC after which N completions are as good as 2N are now:

    R_N(C + ΔC) = R_2N(C)

Each R_N is a smoothing spline over √C that never falls: where one N follows the sigmoid, another does not.
Nothing is extrapolated: a ΔC beyond the last evaluation is infinite. Intervals are from a bootstrap of the
prompts, in which a prompt brings its outcomes at every N and C along: they include the choice of prompts and
the sampling of completions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.interpolate import make_smoothing_spline

from trainer.scaling.curve.sigmoid import Array, Estimate, estimate
from trainer.scaling.reading.held_out import Worth

Curves = dict[str, list[tuple[float, Estimate]]]  # by N: C, and R_N(C)
RESAMPLES = 200  # of the prompts: an end of a 90% interval is then known to about a tenth of its width
CELLS = 2000  # of the compute on which a spline is inverted


@dataclass(frozen=True, slots=True)
class Doubling:
    """The training that doubling N is worth."""

    n: int  # before
    compute: float  # C
    worth: Estimate  # ΔC; 0: 2N are no better than N; infinite: more than the run had left


def doublings(worth: Worth, at: Sequence[float], confidence: float) -> list[Doubling]:
    """Each doubling of N at each compute, which is within the data: of five evaluations or more."""
    values = _worth(worth.compute, worth.by_prompt.mean(2), at)
    draws = np.array([_worth(worth.compute, means, at) for means in _resampled(worth)])
    return [
        Doubling(n, c, estimate(float(values[i, j]), draws[:, i, j], confidence))
        for i, n in enumerate(worth.ns[:-1])
        for j, c in enumerate(at)
    ]


def rewards(worth: Worth, confidence: float) -> Curves:
    """R_N at each evaluation, by N."""
    means, draws = worth.by_prompt.mean(2), np.array(list(_resampled(worth)))
    return {
        str(n): [
            (float(c), estimate(float(means[t, i]), draws[:, t, i], confidence))
            for t, c in enumerate(worth.compute)
        ]
        for i, n in enumerate(worth.ns)
    }


def _resampled(worth: Worth) -> Iterator[Array]:
    """R_N of resampled prompts, (evaluations, ns) each."""
    prompts, rng = worth.by_prompt.shape[2], np.random.default_rng(0)
    for chosen in rng.integers(prompts, size=(RESAMPLES, prompts)):
        yield worth.by_prompt[:, :, chosen].mean(2)


def _worth(compute: Array, means: Array, at: Sequence[float]) -> Array:
    """(doublings, computes `at`): the worth of each, by the means, (evaluations, ns), at `compute`."""
    places, first = np.unique(compute, return_index=True)
    grid = np.linspace(places[0], places[-1], CELLS)
    curves = [
        np.maximum.accumulate(make_smoothing_spline(np.sqrt(places), row)(np.sqrt(grid)))
        for row in means[first].T
    ]
    reached = np.append(grid, np.inf)  # by the index of a reward in a curve that never falls
    indices = [np.searchsorted(one, np.interp(at, grid, two)) for one, two in pairwise(curves)]
    return np.maximum(reached[np.array(indices)] - at, 0.0)
