"""Is a curve that is no sigmoid said to be none? Simulated runs of other shapes. [5 min]

  python -m bench validation.shapes              100 runs of each kind; a few minutes

Each run has 24 evaluations up to 6,000 with noise of sd .006, standard errors reported and R0 measured; its
parameters are drawn anew. A run is flagged if the fit says that the curve is no sigmoid or has fallen: a wide
interval alone does not count. It is covered if the 90 % interval of the reward at 4 × the data holds the
truth. Where the reward falls there is no such truth: the run is right only if it is flagged.
"""

import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.harness import Case, Row, repeated
from bench.table import table
from trainer.scaling import Curve, Sigmoid, fit
from trainer.scaling.simulate import simulated

Array = NDArray[np.float64]
Shape = Callable[[Array], Array]  # R(C)

OPTIONS = {"runs": (100, "runs of each kind")}
PARALLEL = True
SEED = 15
LAST, EVALUATIONS, NOISE = 6_000.0, 24, 0.006
EXTRAPOLATION = 4.0  # times the data
SAYS_SO = {"not-sigmoid", "other-shape", "falling", "last-point-low"}


def _ends(rng: np.random.Generator) -> tuple[float, float]:
    """R0 and the rise."""
    return rng.uniform(0.05, 0.4), rng.uniform(0.2, 0.45)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _sigmoid(rng: np.random.Generator) -> Shape:
    R0, rise = _ends(rng)
    return Sigmoid(R0, R0 + rise, rng.uniform(1.1, 2.6), _log_uniform(rng, 600, 3_000)).reward


def _exponential(rng: np.random.Generator) -> Shape:
    (R0, rise), tau = _ends(rng), _log_uniform(rng, 1_000, 4_000)
    return lambda c: R0 - rise * np.expm1(-c / tau)


def _power_law(rng: np.random.Generator) -> Shape:
    (R0, rise), start, p = _ends(rng), _log_uniform(rng, 60, 600), rng.uniform(0.25, 0.6)
    return lambda c: R0 + rise * (1 - (1 + c / start) ** -p)


def _logistic(rng: np.random.Generator, middle: float, steepness: float) -> Shape:
    (R0, rise), k = _ends(rng), steepness / middle
    low = 1 / (1 + np.exp(steepness))
    return lambda c: R0 + rise * (1 / (1 + np.exp(-k * (c - middle))) - low) / (1 - low)


def _log_linear(rng: np.random.Generator) -> Shape:
    (R0, rise), tau = _ends(rng), _log_uniform(rng, 60, 1_500)
    return lambda c: R0 + rise * np.log1p(c / tau) / np.log1p(EXTRAPOLATION * LAST / tau)


def _two_stages(rng: np.random.Generator) -> Shape:
    (R0, rise), B, C_mid = _ends(rng), rng.uniform(1.5, 2.5), rng.uniform(1_000, 2_500)
    share = rng.uniform(0.35, 0.65)
    first = Sigmoid(0, share * rise, B, 0.05 * C_mid)
    second = Sigmoid(0, (1 - share) * rise, B, 3 * C_mid)
    return lambda c: R0 + first.reward(c) + second.reward(c)


def _capped(rng: np.random.Generator, cap: float) -> Shape:
    R0, rise = _ends(rng)
    return lambda c: R0 + rise * np.minimum(c / cap, 1)


def _changed(rng: np.random.Generator, begin: float, by: float) -> Shape:
    """A sigmoid that is nearly complete, and after `begin` of the data a steady change."""
    R0, rise = _ends(rng)
    curve = Sigmoid(R0, R0 + rise, rng.uniform(1.6, 2.6), rng.uniform(500, 1_200))
    return lambda c: curve.reward(c) + by * np.clip((c / LAST - begin) / (1 - begin), 0, None)


def _second_rise(rng: np.random.Generator) -> Shape:
    rise = rng.uniform(0.05, 0.12)
    shape = _changed(rng, 0.8, rise)
    return lambda c: np.minimum(shape(c), shape(np.array(1.2 * LAST)))  # as much again, then an end


KINDS: dict[str, Callable[[np.random.Generator], Shape]] = {
    "exponential saturation": _exponential,
    "power-law approach": _power_law,
    "logistic in linear compute, complete": lambda rng: _logistic(
        rng, rng.uniform(1_500, 3_000), rng.uniform(4, 8)
    ),
    "the same, seen to 20 % past its middle": lambda rng: _logistic(rng, LAST / 1.2, rng.uniform(3, 7)),
    "log-linear, no ceiling": _log_linear,
    "two stages": _two_stages,
    "linear, then a hard cap": lambda rng: _capped(rng, LAST * rng.uniform(0.35, 0.75)),
    "linear, cap not reached": lambda rng: _capped(rng, LAST * rng.uniform(1.2, 3)),
    "plateau, second rise in the last fifth": _second_rise,
    "slow collapse": lambda rng: _changed(rng, 0.7, -0.12),
    "fast collapse": lambda rng: _changed(rng, 0.9, -rng.uniform(0.1, 0.25)),
    "decline of .02 over the last third": lambda rng: _changed(rng, 2 / 3, -0.02),
}
FALLS = {"slow collapse", "fast collapse", "decline of .02 over the last third"}
CONTROL = "sigmoid (control)"


def simulate(kind: str, i: int, seed: int) -> tuple[Shape, Curve]:
    """Run `i` of a kind, and its shape."""
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode()), i])
    shape = {**KINDS, CONTROL: _sigmoid}[kind](rng)
    compute = LAST / EVALUATIONS * np.arange(EVALUATIONS + 1)
    return shape, simulated(shape, compute, rng.normal(0, NOISE, EVALUATIONS + 1), NOISE)


def measure(kind: str, i: int, seed: int = SEED) -> Row:
    """The fit's flags for one run, and whether its forecast covers the truth."""
    shape, run = simulate(kind, i, seed)
    fitted = fit(run)
    ahead, truth = fitted.at(EXTRAPOLATION * LAST), float(shape(np.array(EXTRAPOLATION * LAST)))
    flagged = not SAYS_SO.isdisjoint(fitted.flags)
    covered = kind not in FALLS and ahead.low <= truth <= ahead.high
    return {
        "kind": kind, "flags": fitted.flags, "flagged": flagged, "covered": covered,
        "either": flagged or covered, "wrong": fitted.identified and not covered,
    }  # fmt: skip


def cases(options: Namespace) -> Iterator[Case]:
    """Every run of every kind."""
    return repeated((*KINDS, CONTROL), options.runs, measure)


HEAD = ("kind", "runs", "flagged", "covered", "either", "identified, and missed")


def describe(head: Row, runs: Sequence[Row]) -> str:
    """A row for each kind, for the sigmoids, and for all but them, in Markdown."""
    groups = {kind: [r for r in runs if r["kind"] == kind] for kind in (*KINDS, CONTROL)}
    groups["all but the sigmoids"] = [r for r in runs if r["kind"] != CONTROL]
    rows = []
    for kind, group in groups.items():
        keys = ("flagged", "covered", "either", "wrong")
        shares = {key: f"{np.mean([r[key] for r in group]):.2f}" for key in keys}
        if kind in FALLS:
            shares["covered"] = "–"
        rows.append([kind, str(len(group)), *shares.values()])
    return table(HEAD, rows)
