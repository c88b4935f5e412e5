"""The paper's numbers, each with its source; rates and model shapes are in trainer/accounting."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.accounting.kernel_cost import Constant
from trainer.scaling.curve.sigmoid import Sigmoid

R0 = Constant(0.30, "pass rate", "ASSUMED: the paper does not print R0")
TABLE = "arXiv 2510.13786 Table 1"
TABLE_1 = {  # the fitted curves of the paper's runs; neither R0 nor the points are printed
    name: Sigmoid(R0.value, A, B, C_mid)
    for name, C_mid, B, A in (
        ("ScaleRL", 2542, 1.92, 0.610),
        ("ScaleRL-32k", 11272, 1.89, 0.645),
        ("ScaleRL-8gen", 2542, 2.44, 0.585),
        ("ScaleRL-24gen", 3054, 2.22, 0.590),
        ("ScaleRL-32gen", 2936, 2.07, 0.595),
        ("ScaleRL-Scout", 4242, 1.65, 0.710),
        ("ScaleRL-bs512", 2818, 1.77, 0.605),
        ("ScaleRL-bs2048", 10909, 1.70, 0.645),
        ("ScaleRL-math+code-math", 2896, 2.05, 0.595),
        ("ScaleRL-math+code-code", 1675, 1.09, 0.615),
    )
}
CURVES = {"8b": "ScaleRL", "scout": "ScaleRL-Scout"}  # of a model


class PublishedRange(NamedTuple):
    """The paper's fit of its long run over a range of GPU-hours: A.7."""

    low: float
    high: float
    A: float
    B: float


RANGES = (
    PublishedRange(1500, 50000, 0.645, 1.70),
    PublishedRange(0, 100000, 0.655, 1.56),
    PublishedRange(0, 50000, 0.645, 1.70),
    PublishedRange(5000, 50000, 0.645, 1.67),
)


def with_sources(constants: Mapping[str, Constant], options: Mapping[str, Any]) -> list[str]:
    """A line for every constant: its value, as an option may have it, and its source."""
    values = {name: options.get(name, c.value) for name, c in constants.items()}
    return [
        f"  {name} = {values[name]:g} {c.unit}: {c.source if values[name] == c.value else 'GIVEN'}"
        for name, c in constants.items()
    ]
