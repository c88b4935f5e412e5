"""Reads metrics among a trainer's other output: verl's lines, transformers' dicts, a notebook's tables."""

import ast
import json
import re
from collections import Counter
from contextlib import suppress
from html import unescape
from itertools import accumulate, pairwise

from trainer.scaling.layout import grouped
from trainer.scaling.reading.columns import REWARD, STEPS, matching
from trainer.scaling.reading.values import Row

CONTROLS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours, and a cursor that moves
STEP = r"(?m)()(?:^|[\s)])step:(\d+)() - (\S.*)"  # of verl, after ray's `(TaskRunner pid=1) `
# `[eval] Step 3 | acc: 0.5`; `Epoch:[1/1](3/9), Reward: 2`; slime's `rollout 3: {'rollout/raw_reward': 0.5}`.
NAMED = r"(?:\b(?:step|rollout|iter\w*)|(?<=\beval))[ :#=]*"
ANY_STEP = rf"(?mi)^(.*?)(?:{NAMED}(\d+)(?:/\d+)?|[( \t](\d+)/\d+(?!.*{NAMED}\d))[^\w\n]*[ \t](\S.*)"
EVALUATION = re.compile(r"(?i)(?:^|.*\W)(?:eval|valid|test)\w*\W*(?:at )?")
BETWEEN = re.compile(r" - |, | ?\| ?|(?<!\s)\s+(?=[\w/]+=)")
INITIAL = re.compile(r"Initial validation metrics: (\{[^{}]+\})")  # of verl, before step 1
NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?%?|nan|inf)"
VALUE = re.compile(rf"\W*([^\W\d].*?)['\"]? ?[:=] ?(?:np\.\w+\()?({NUMBER})[)}}\]]*[s.,]?(?:\s.*)?")
# A progress bar of tqdm, in Colab without the bar; a dict of transformers, at a line's begin or behind a bar.
BAR_OR_DICT = re.compile(r"[|%] *(\d+)/(\d+) \[[^\]\n]*\]?|(?:^|(?<=\])) *(\{'[^{}\n]+\}) *$", re.MULTILINE)
OTHER_BAR = re.compile(r"(?m)^[^\n{|%:]+: +\d+%[^\]\n]*\]?")  # `Map: 9%|# | 9/99 [`, of no training
CELL, TAG = re.compile(r"(?is)<t[dh]\b[^>]*>(.*?)(?=<t[dhr]\b|</t|$)"), re.compile(r"<[^>]*>")


def console(text: str) -> list[Row]:
    """The rows of a console log; none if it holds no metrics."""
    plain = CONTROLS.sub("", text).replace("\r", "\n")
    if rows := _lines(plain, STEP):
        return rows
    dicts, lines = _transformers(plain), _lines(plain, ANY_STEP)
    logged = any("loss" in row or matching(REWARD, list(row)) for row in dicts)  # not settings alone
    return dicts if logged or len(lines) < 2 else lines


def _lines(text: str, form: str) -> list[Row]:
    """Lines `step:4 - actor/loss:0.1 - val-core/aime/acc/mean@32:0.3` or alike, and verl's before step 1."""
    rows: list[Row] = [{"step": 0, **_dict(metrics)} for metrics in INITIAL.findall(text)]
    for head, step, count, metrics in re.findall(form, text):
        kind = "eval/" if EVALUATION.fullmatch(head) else ""
        pairs = (VALUE.fullmatch(part) for part in BETWEEN.split(metrics))
        values = {kind * (p[1][:4] != "eval") + p[1]: p[2] for p in pairs if p}
        rows.append({"step": int(step or count), **values})
    return [row for row in rows if len(row) > 1]


def _transformers(text: str) -> list[Row]:
    """Dicts of metrics among progress bars, as of TRL. The bar is drawn again after a dict: its count is the
    step; bars of evaluations and downloads count to another total."""
    rows: list[Row] = []
    bars: list[tuple[int, int, int]] = []  # (rows before it, count, total)
    for count, total, metrics in BAR_OR_DICT.findall(OTHER_BAR.sub("", text)):
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
        rows[number - 1] = {"step": step, **rows[number - 1]}
    trained = list(pairwise(row for row in rows if "loss" in row))
    shared = sum(a["step"] == b["step"] and a != b for a, b in trained)
    late = bars and 3 * shared > len(trained)  # a resumed run makes a step twice
    return _counted(rows, bars) if late else rows


def _counted(rows: list[Row], bars: list[tuple[int, int, int]]) -> list[Row]:
    """Rows that were written long after their bars, as into a file, with steps that are equally far apart."""
    by_total = grouped((total, count) for _, count, total in bars)
    last = max(next(iter(by_total.values())))  # the first is that of training
    logged = list(accumulate("loss" in row for row in rows))
    for row, n in zip(rows, logged, strict=True):  # a program that was killed has not written its last dicts
        row |= {"step": None, "step (counted)": last // logged[-1] * n or None}
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
    """The tables with a column of steps in a notebook's cells, else what these printed; several are runs."""
    tables: list[list[Row]] = []
    printed: list[list[Row]] = []
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError("it is no notebook: it has no list of cells")
    for cell in content["cells"]:
        outputs = cell.get("outputs") or ()
        page = "".join("".join((output.get("data") or {}).get("text/html") or ()) for output in outputs)
        for header, *lines in filter(None, _tables(page)):
            if any(matching(name, header) for name in STEPS):
                tables.append([dict(zip(header, line, strict=False)) for line in lines])
        printed.append(console("".join("".join(output.get("text") or ()) for output in outputs)))
    tables = tables or list(filter(None, printed))
    if len(tables) < 2:
        return tables[0] if tables else []
    return [{"run": f"table {i}", **row} for i, rows in enumerate(tables, 1) for row in rows]


def _tables(page: str) -> list[list[list[str]]]:
    """The text of the cells of each row of each table."""
    tables = re.findall("(?is)<table.*?(?:</table>|$)", page)
    rows = [[CELL.findall(row) for row in re.split("(?i)<tr", table)[1:]] for table in tables]
    return [[[unescape(TAG.sub("", cell)).strip() for cell in row] for row in table] for table in rows]
