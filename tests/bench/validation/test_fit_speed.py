"""bench.validation.fit_speed: the table holds every case, and says how far the loop's answer is from ours."""

from __future__ import annotations

from bench.validation.fit_speed import describe, measure
from trainer.scaling.curve.paper import PaperGrid


def test_the_table_holds_every_case_and_the_answers_agree() -> None:
    record = measure(1, PaperGrid((0.55, 0.65, 0.01), (2000, 3000, 11)))
    assert record["pairs"] == 121
    assert record["differs"]["A"] == record["differs"]["C_mid"] == 0 and record["differs"]["B"] < 1e-4
    assert all(ms["cpu"]["median"] > 0 for ms in record["cases"].values())
    text = describe(record)
    assert all(name in text for name in record["cases"]) and "The grid of 121 pairs is " in text
