"""Reads metrics among a trainer's other output: verl's lines, transformers' dicts, a notebook's tables."""

import json
import re
from collections import Counter
from html import unescape
from itertools import accumulate, pairwise

from trainer.scaling.layout import grouped
from trainer.scaling.reading.columns import LIKELY, REWARD, STEPS, matching
from trainer.scaling.reading.values import Row

CONTROLS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours, and a cursor that moves
STEP = r"(?m)(?:^|[\s)])(step:\d+ - \S.*)"  # of verl, after ray's `(TaskRunner pid=1) `
# `[eval] Step 3 | acc: 0.5`; `Epoch:[1/1](3/9), Reward: 2`; slime's `rollout 3: {'rollout/raw_reward': 0.5}`.
HELD_OUT = r"(?:eval[a-z]*|val(?:id[a-z]*)?|test(?:ing)?)(?![a-z])"
KIND = r"(?:(?:global|train\w*|optim\w*|update|policy|rl|grpo)_)?"
NAMED = rf"(?:(?<!micro )\b{KIND}(?:step|rollout|perf|iter(?:ation)?)|(?<=\beval))[ :#=\[('\"]*"
COUNT = rf"{NAMED}(\d[\d,]*)(?:/(\d+))?|(?<!step)[( \t](\d+)/(\d+)(?!.*{NAMED}\d| \d+:\d)"  # not of a date
BAR = r"[|%] *(?=\d+/\d+ \[[\d:]+<)"
# NeMo-RL's `== Step 3/9 ==`, under it a title `Validation results:` and lines `• Accuracy: 0.5`.
ITEM = rf"[^\w\n]*•(.*)|[^\w\n]*((?:train|{HELD_OUT})[^\n:\d]*):\s*$"
LINE = re.compile(rf"(?i)(?!.*{BAR})(?:{ITEM}|(.*?)(?:{COUNT})(?![\w-]|\.\d)(.*))")
# What these lines have: found faster.
HINT = re.compile(r"(?i)(?:step|rollout|perf|iter|ation|eval)[ :#=\[('\"]*\d|[( \t]\d+/\d+(?!\d| \[)|•|:\s*$")
EPOCH = re.compile(r"(?i)\bep(?:och|isode)\W{0,3}(\d+)")
# Before the step, perhaps with the set's name: `Evaluated aime (`; or behind it: `step 3 | eval | …`.
EVALUATION = re.compile(rf"(?i)(?:.*\W)?{HELD_OUT}\W*(?:results?\W*)?(?:at |(\S+) \()?")
MARKED = re.compile(rf"(?i)\W*{HELD_OUT}(?: *[|\])]| +- |:(?! *[-+.\d]))")
METRIC = re.compile(rf"(?i){HELD_OUT}|.*(?:loss|{'|'.join(LIKELY.values())})")
NUMBER = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?%?|nan|inf)"
WORDS = r"([^\W\d][^:=|,\n]{0,150}?)"  # `Actor Loss: 1`, `reward=1`, ` | Reward 1 | `, `: reward 1, `
NAME = rf"(val-core/.{{1,99}}?):|{WORDS}['\"]?(?: ?: ?| = )|((?:{HELD_OUT} )?[^\W\d][\w./@-]{{0,150}})="
BETWEEN = rf"(?<=[-|,:] ){WORDS} (?=[^\s|,]+(?: [^-|:=,]*)?(?:[-|,]|$))"
END = r"[a-z/]*[)}\]'\"]*[.,;]?(?=[\s|,±+]|$)"
VALUE = re.compile(rf"(?i)(?<!\w)(?:{NAME}|{BETWEEN})['\"]?(?:[\w.]+\()?({NUMBER}){END}")
# A progress bar of tqdm, in Colab without the bar; a dict of transformers, at a line's begin or behind a bar.
BAR_OR_DICT = re.compile(r"[|%] *(\d+)/(\d+) \[[^\]\n]*\]?|(?:^|(?<=\])) *(\{'[^{}\n]+\}) *$", re.MULTILINE)
OTHER_BAR = re.compile(r"(?m)^[^\n{|%:]+: +\d+%[^\]\n]*\]?")  # `Map: 9%|# | 9/99 [`, of no training
CELL, TAG = re.compile(r"(?is)<t[dh]\b[^>]*>(.*?)(?=<t[dhr]\b|</t|$)"), re.compile(r"<[^>]*>")


def console(text: str) -> list[Row]:
    """The rows of a console log; none if it holds no metrics. A number that the text ends with may be cut."""
    plain = CONTROLS.sub("", text).replace("\r", "\n").rstrip("0123456789.,e+-%")
    if verl := re.findall(STEP, plain):
        return _lines("\n".join(verl))
    dicts = _transformers(plain)
    if any("loss" in row or matching(REWARD, list(row)) for row in dicts):  # not settings alone
        return dicts
    lines = _lines(plain)
    if len(lines) < 2:  # the bars may hold metrics, and are drawn several times at a step
        bars = _lines(re.sub(BAR, " step ", plain))
        lines = [row for row, after in pairwise([*bars, {}]) if row["step"] != after.get("step")]
    return dicts if len(lines) < 2 else lines


def _lines(text: str) -> list[Row]:
    """Lines `step:4 - actor/loss:0.1 - val-core/aime/acc/mean@32:0.3` or alike.

    Where steps begin again with each epoch, those of the log's epochs before are added; without a
    total, an epoch ends with its last line."""
    block: Row = {"step": 0}  # of the last line with a step of a total and no values
    rows = [block]
    epoch, last, starts, below = 1, (1, 0), {1: 0}, ""
    for line in filter(None, map(LINE.match, filter(HINT.search, text.split("\n")))):
        item, title, head, step, steps, count, total, metrics = line.groups()
        if title or item:
            below = title or below
            block |= _values(item or "", below) if below or block["step"] else {}
            continue
        match = EPOCH.search(line[0])
        epoch = int(match[1]) if match else epoch
        n, out_of = int((step or count).replace(",", "")), int(steps or total or 0)
        values = _values(metrics, head)
        if (out_of or match) and (steps or values):
            if epoch > last[0] and n <= last[1]:
                starts[epoch] = starts.get(last[0], 0) + (out_of or last[1] + (n == 0))
            last, n = (epoch, n), n + starts.get(epoch, 0)
        row: Row = {"step": n, **values}
        block = row if out_of and not values else block
        # A completion may say `Step 2: x = 3`, which is no row.
        if row is block or n >= rows[-1]["step"] or any(map(METRIC.match, values)):
            rows.append(row)
    return [row for row in rows if len(row) > 1]


def _values(metrics: str, head: str = "") -> Row:
    """The numbers of a line by their names, which begin with eval/ where it says that it is an evaluation."""
    match = EVALUATION.fullmatch(head)
    kind = f"eval/{match[1]}/" if match and match[1] else "eval/" * bool(match or MARKED.match(metrics))
    named = (("".join(names), number) for *names, number in VALUE.findall(metrics))
    return {kind * (not re.match(HELD_OUT, name, re.IGNORECASE)) + name: number for name, number in named}


def _transformers(text: str) -> list[Row]:
    """Dicts of metrics among progress bars, as of TRL. The bar is drawn again after a dict: its count is the
    step; bars of evaluations and downloads count to another total."""
    rows: list[Row] = []
    bars: list[tuple[int, int, int]] = []  # (rows before it, count, total)
    for count, total, metrics in BAR_OR_DICT.findall(OTHER_BAR.sub("", text)):
        if count:
            bars.append((len(rows), int(count), int(total)))
        elif row := _values(metrics):
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
