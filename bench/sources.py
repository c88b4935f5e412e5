"""The paper's numbers that benches use, each with its source; rates and shapes are kernel_cost.py's."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.scaling.kernel_cost import Constant

R0 = Constant(0.30, "pass rate", "ASSUMED: the paper does not print R0")


@dataclass(frozen=True, slots=True)
class Curve:
    """A fitted curve of the paper; R0 is not in it."""

    A: float
    B: float
    C_mid: float
    source: str


CURVES = {
    "8b": Curve(0.610, 1.92, 2542, "arXiv 2510.13786 Table 1, ScaleRL (8B dense)"),
    "scout": Curve(0.710, 1.65, 4242, "arXiv 2510.13786 Table 1, ScaleRL-Scout"),
}


@dataclass(frozen=True, slots=True)
class PublishedFit:
    """The law of one of the paper's runs, as printed: ceiling, efficiency, GPU-hours of half the rise."""

    name: str
    C_mid: float
    B: float
    A: float


# arXiv 2510.13786, Table 1. R0 is not printed, nor are the points.
TABLE_1 = (
    PublishedFit("ScaleRL", 2542, 1.92, 0.610),
    PublishedFit("ScaleRL-32k", 11272, 1.89, 0.645),
    PublishedFit("ScaleRL-8gen", 2542, 2.44, 0.585),
    PublishedFit("ScaleRL-24gen", 3054, 2.22, 0.590),
    PublishedFit("ScaleRL-32gen", 2936, 2.07, 0.595),
    PublishedFit("ScaleRL-Scout", 4242, 1.65, 0.710),
    PublishedFit("ScaleRL-bs512", 2818, 1.77, 0.605),
    PublishedFit("ScaleRL-bs2048", 10909, 1.70, 0.645),
    PublishedFit("ScaleRL-math+code-math", 2896, 2.05, 0.595),
    PublishedFit("ScaleRL-math+code-code", 1675, 1.09, 0.615),
)


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """What the paper's fit of its long run found over a range of GPU-hours."""

    low: float
    high: float
    law: str
    A: float
    B: float | None
    source: str


RANGES = (
    PublishedRange(1500, 50000, "sigmoid", 0.645, 1.70, "arXiv 2510.13786 A.7"),
    PublishedRange(0, 100000, "sigmoid", 0.655, 1.56, "arXiv 2510.13786 A.7"),
    PublishedRange(0, 50000, "sigmoid", 0.645, 1.70, "arXiv 2510.13786 A.7"),
    PublishedRange(5000, 50000, "sigmoid", 0.645, 1.67, "arXiv 2510.13786 A.7"),
    PublishedRange(1500, 50000, "power law", 1.00, None, "arXiv 2510.13786 A.4"),
    PublishedRange(5000, 50000, "power law", 0.74, None, "arXiv 2510.13786 A.4"),
)
