"""verl's console log: `step:4 - actor/loss:0.1 - val-core/aime/acc/mean@32:0.3`, among any other output."""

import re

from trainer.scaling.reading.values import Row

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STEP = re.compile(r"(?:^|[\s)])step:(\d+) - (\S.*)", re.MULTILINE)  # after ray's `(TaskRunner pid=1) `
VALUE = re.compile(r"(.+):(?:np\.\w+\()?([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))\)?(?:\s.*)?")


def rows_of(text: str) -> list[Row]:
    """A row for each line of metrics; none if it is no such log."""
    rows = []
    for step, metrics in STEP.findall(COLOURS.sub("", text)):
        pairs = (VALUE.fullmatch(part) for part in metrics.split(" - "))
        rows.append({"step": int(step), **{p[1]: float(p[2]) for p in pairs if p}})
    return [row for row in rows if len(row) > 1]
