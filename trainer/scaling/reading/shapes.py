"""Tables of several runs, or of one metric per row, as one table of metrics for each run."""

from collections import Counter
from itertools import chain

from trainer.scaling.layout import grouped
from trainer.scaling.reading.columns import COMPUTE, REWARD, matching
from trainer.scaling.reading.values import Row, is_known, is_text

METRIC = ("metric", "metric_name", "key", "tag")  # long tables, as of MLflow and tbparse
RUN = ("run id", "run_id", "run_uuid", "run", "run_name", "run name", "seed")
NAME = ("name", "run_name", "run name")
LABEL = r"condition|label|name|recipe|exp(?:eriment)?|variant|config|setting|group|trial|arm|model|method"


def runs_of(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows by the name of the run, "" if there is one."""
    rows = _wide(rows)
    return _charted(rows) or _by_run(rows) or _by_label(rows) or {"": rows}


def _wide(rows: list[Row]) -> list[Row]:
    """Rows of a metric's name and its value as rows that have a column of this name."""
    first = _lower(rows)
    metric = next((first[n] for n in METRIC if n in first), None)
    if metric is None or "value" not in first or not isinstance(rows[0][metric], str):
        return rows
    value = first["value"]
    other = [c for c in first.values() if c not in (metric, value)]
    return [{**{c: row.get(c) for c in other}, row[metric]: row.get(value)} for row in rows]


def _charted(rows: list[Row]) -> dict[str, list[Row]]:
    """The CSV of a W&B chart (`run - metric`, `run - metric__MIN`, …) by run; none if it is no such table."""
    columns = dict.fromkeys(c for row in rows for c in row)
    charted = [c for c in columns if " - " in c and f"{c}__MIN" in columns and f"{c}__MAX" in columns]
    shared = [c for c in columns if c.removesuffix("__MIN").removesuffix("__MAX") not in charted]
    runs: dict[str, list[Row]] = {}
    for run, metrics in grouped((c.rpartition(" - ")[0], c) for c in charted).items():
        runs[run] = [
            {c.rpartition(" - ")[2] if c in metrics else c: row.get(c) for c in (*shared, *metrics)}
            for row in rows
            if any(is_known(row.get(c)) for c in metrics)
        ]
    return runs


def _by_run(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows by the value of a column `run` or `seed`; none if there is one run, or one row for each."""
    first = _lower(rows)
    for column in (first[n] for n in RUN if n in first):
        labels = [first[n] for n in NAME if n in first and first[n] != column][:1]
        prefix = "seed " if column.lower() == "seed" else ""
        runs = grouped((" ".join(str(row.get(c)) for c in (*labels, column)), row) for row in rows)
        if 1 < len(runs) <= len(rows) / 2:
            return {prefix + run: part for run, part in runs.items()}
    return {}


def _by_label(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows by the value of a column of text, or of a name like `label`, that explains why measurements of
    a step come again: most of a run's are in another run, too, and few come again within a run."""
    columns = dict.fromkeys(c for row in rows for c in row)
    first = {c: next((r[c] for r in rows if is_known(r.get(c))), None) for c in columns}
    step = next((c for name, _ in COMPUTE for c in matching(name, columns)), None)
    labels = [c for c in columns if matching(LABEL, [c]) or is_text(first[c])]
    measured = [c for c in columns if c not in (step, *labels)]
    measured = matching(REWARD, measured) or measured  # of many columns, those that matter
    cells = [
        [(row[step], c) for c in measured if is_known(row.get(c))] if step in row else [] for row in rows
    ]
    total = sum(map(len, cells))
    best: dict[str, list[Row]] = {}
    for label in labels if total > len(set(chain.from_iterable(cells))) else ():
        parts = grouped((str(row.get(label)), i) for i, row in enumerate(rows))
        if len(best) < len(parts) <= len(rows) / 2:
            once = [{cell for i in part for cell in cells[i]} for part in parts.values()]
            runs = Counter(chain.from_iterable(once))  # in how many of the parts a measurement is
            within = total - sum(map(len, once))
            shared = max(
                sum(any(runs[c] > 1 for c in cells[i]) for i in part) / len(part) for part in parts.values()
            )
            if shared >= 1 / 2 and within <= (total - len(runs)) / 2:
                best = {name: [rows[i] for i in part] for name, part in parts.items()}
    return best if len(best) > 1 else {}


def _lower(rows: list[Row]) -> dict[str, str]:
    """The columns of the first row by their names in lower case."""
    return {c.lower(): c for c in rows[0]} if rows else {}
