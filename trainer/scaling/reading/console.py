"""Reads metrics among a trainer's other output: verl's lines, transformers' dicts, a notebook's tables."""

import ast
import json
import re
from collections import Counter
from contextlib import suppress
from html.parser import HTMLParser
from itertools import pairwise

from trainer.scaling.reading.columns import STEPS, matching
from trainer.scaling.reading.values import Row

CONTROLS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours, and a cursor that moves
STEP = re.compile(r"(?:^|[\s)])step:(\d+) - (\S.*)", re.MULTILINE)  # after ray's `(TaskRunner pid=1) `
INITIAL = re.compile(r"Initial validation metrics: (\{[^{}]+\})")  # of verl, before step 1
VALUE = re.compile(r"(.+):(?:np\.\w+\()?([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))\)?(?:\s.*)?")
# A progress bar of tqdm; a dict of transformers, at the begin of a line or behind a bar.
BAR_OR_DICT = re.compile(r"\| *(\d+)/(\d+) \[[^\]\n]*\]?|(?:^|(?<=\])) *(\{'[^{}\n]+\}) *$", re.MULTILINE)


def console(text: str) -> list[Row]:
    """The rows of a console log; none if it holds no metrics."""
    plain = CONTROLS.sub("", text).replace("\r", "\n")
    return _verl(plain) or _transformers(plain)


def _verl(text: str) -> list[Row]:
    """Lines `step:4 - actor/loss:0.1 - val-core/aime/acc/mean@32:0.3`, and the metrics before step 1."""
    rows: list[Row] = [{"step": 0, **_dict(metrics)} for metrics in INITIAL.findall(text)]
    for step, metrics in STEP.findall(text):
        pairs = (VALUE.fullmatch(part) for part in metrics.split(" - "))
        rows.append({"step": int(step), **{p[1]: float(p[2]) for p in pairs if p}})
    return [row for row in rows if len(row) > 1]


def _transformers(text: str) -> list[Row]:
    """Dicts of metrics among progress bars, as of TRL. The bar is drawn again after a dict: its count is the
    step; bars of evaluations and downloads count to another total."""
    rows: list[Row] = []
    bars: list[tuple[int, int, int]] = []  # (rows before it, count, total)
    for count, total, metrics in BAR_OR_DICT.findall(text):
        if count:
            bars.append((len(rows), int(count), int(total)))
        elif row := _dict(metrics):
            rows.append(row)
    after = [bar for earlier, bar in pairwise([(0, 0, 0), *bars]) if bar[0] > earlier[0]]
    total = Counter(bar[2] for bar in after).most_common(1)[0][0] if after else None
    # The first bar counts.
    steps = {number: count for number, count, out_of in reversed(bars) if out_of == total}
    step = None
    for number in range(len(rows), 0, -1):
        step = steps.get(number, step)
        if step is not None:
            rows[number - 1] = {"step": step, **rows[number - 1]}
    return rows


def _dict(text: str) -> Row:
    """The metrics of a printed dict; empty if it is none."""
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(
            re.sub(r"(?<=: )(?:np\.\w+\()?(-?(?:nan|inf|[\d.e+-]+))\)?(?=[,}])", r"'\1'", text)
        )
        return {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, str | float | int)}
    return {}


def notebook(text: str) -> list[Row]:
    """The tables with a column of steps in the output of a notebook's cells; several are runs."""
    tables: list[list[Row]] = []
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError("it is no notebook: it has no list of cells")
    for cell in content["cells"]:
        for output in cell.get("outputs") or ():
            page = _Tables()
            page.feed("".join((output.get("data") or {}).get("text/html") or ()))
            for header, *lines in filter(None, page.tables):
                if any(matching(name, header) for name in STEPS):
                    tables.append([dict(zip(header, line, strict=False)) for line in lines])
    if len(tables) < 2:
        return tables[0] if tables else []
    return [{"run": f"table {i}", **row} for i, rows in enumerate(tables, 1) for row in rows]


class _Tables(HTMLParser):
    """Collects the cells of all tables: `tables` has the text of each row's cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._cell = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            self._cell = True
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell &= tag not in ("td", "th", "tr", "table")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += data.strip()
