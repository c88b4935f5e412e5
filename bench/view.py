"""`sigmoid-rl view` in Chromium on a long invented run: first paint, and the time of every view. [3 min]

  python -m bench view                          2,000 steps, 10,000 groups of 8 completions of 128 tokens

Milliseconds from the click until it is drawn, Playwright's polling included; of a filter, until its answer is
there. Of a new tab, from its address: "paint" is Chromium's first-contentful-paint, "head" when the run's
newest numbers stand there, "curve" when the report with fit and band does. The server starts anew
each round: "first curve" waits for the first fit, which begins with the server, and "index" is the time in
which it reads the journal, for which no view waits. "head" and "curve" are of another tab after that.
"""

import atexit
import json
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Case, Row, median_and_range
from bench.table import table
from bench.viewer import Viewer, browser, chromium
from trainer import models
from trainer.cli import to_yaml
from trainer.config import Config
from trainer.controller.journal import Journal
from trainer.controller.rounds import Minibatch
from trainer.controller.sampler import IssuedPrompt
from trainer.run_folder import TOKENIZER
from trainer.types import Group, Prompt, Rollout, TrainBatch, TrainSequence

OPTIONS: dict[str, Any] = {
    "steps": (2000, "of the run"),
    "groups": (10_000, "in its journal"),
    "completions": (8, "of a group"),
    "tokens": (128, "of a completion"),
    "rounds": (3, "starts of server and browser"),
}


def cases(options: Namespace) -> Iterator[Case]:
    """The rounds, on one run."""
    chromium()
    folder = Path(tempfile.mkdtemp(prefix="bench-view-"))
    atexit.register(shutil.rmtree, folder)
    write_run(folder, options)
    for number in range(options.rounds):
        yield f"round {number + 1}", partial(visit, folder)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """Median and range over the rounds of each view."""
    names = [name for name in rows[0] if name != "case"]
    shown = [[name, median_and_range([row[name] for row in rows], ".0f")] for name in names]
    return table(["view", "ms"], shown)


def visit(folder: Path) -> Row:
    """Start the server and a browser, and go through the views."""
    with Viewer(folder) as viewer, browser() as chrome:
        tab = chrome.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        row = views(tab, viewer.page)
        viewer.wait_for_index()
        row["index (at most)"] = 1e3 * (time.perf_counter() - began)
        return row | opened(chrome.new_page(), viewer.page)


SEEN = """new MutationObserver(() => {
  for (const [name, selector] of [["head", ".run dd"], ["curve", '[data-chart="curves"] .band']])
    if (document.querySelector(selector) && !top[`${name}At`]) top[`${name}At`] = top.performance.now();
}).observe(document, {subtree: true, childList: true})"""


def opened(tab: Any, address: str) -> Row:
    """Milliseconds until the page is there, by its own clock."""
    tab.add_init_script(SEEN)  # in the report's frame, too
    tab.goto(address)
    tab.frame_locator("iframe").locator('[data-chart="curves"] .band').first.wait_for()
    paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return {"paint": paint} | {name: tab.evaluate(f"window.{name}At") for name in ("head", "curve")}


def views(tab: Any, address: str) -> Row:
    """Milliseconds of each view."""

    def timed(name: str, action: Any, *selectors: Any) -> None:
        began = time.perf_counter()
        action()
        for selector in selectors:
            (tab.locator(selector) if isinstance(selector, str) else selector).first.wait_for()
        row[name] = 1e3 * (time.perf_counter() - began)

    row = {f"first {name}": x for name, x in opened(tab, address).items()}
    rows = "#rows tr:nth-child(5)"
    time.sleep(5)  # the journal is read meanwhile
    timed("table", lambda: tab.click('[data-view="rollouts"]'), rows)
    timed("group", lambda: tab.click("#rows tr:nth-child(3) a"), "article:nth-child(8) .t:nth-child(100)")
    timed("colour", lambda: tab.select_option("#colour", "entropy"), ".legend b:nth-child(3)", ".t.u")
    other = tab.locator("#title", has_not_text=tab.inner_text("#title"))
    timed("next group", lambda: tab.keyboard.press("j"), other, "article:nth-child(8) .t:nth-child(100)")
    timed("back", lambda: tab.click("#back"), rows)
    filters = {
        "filter step": ("step", "40"), "filter reward": ("reward_min", "0.5"),
        "search": ("text", "rare word"), "search in vain": ("text", "nowhere at all"),
    }  # fmt: skip
    for name, (field, value) in filters.items():
        action = f"[name={field}]"
        with tab.expect_response(lambda answer: "/api/groups" in answer.url) as answer:
            tab.fill(action, value)
        answer.value.finished()
        row[name] = answer.value.request.timing["responseEnd"]
        tab.wait_for_timeout(300)
        tab.click("#filters [type=reset]")
        tab.wait_for_timeout(500)
    return row


def write_run(folder: Path, options: Namespace) -> None:
    """An invented run: metrics of every step, an evaluation every 50, two processes, and the journal."""
    config = Config()
    steps = replace(config.pipeline, steps=options.steps)
    (folder / "config.yaml").write_text(to_yaml(replace(config, run_dir=str(folder), pipeline=steps)))
    shutil.copy(Path(models.__file__).parent / "tiny_model" / TOKENIZER, folder)
    spans: list[Row] = [
        {"role": role, "state": ("idle", "generate")[step % 2], "start": step, "end": step + 1}
        for step in range(options.steps + 1)
        for role in ("learner", "engine")
    ]
    books = {
        "unit": "core-hours", "compute": {"total": 20.0, "evaluation": 0.1, "startup": 0.1},
        "roles": {"learner": {"states": {"idle": 1.0, "forward_backward": 2.0}}},
    }  # fmt: skip
    (folder / "ledger.json").write_text(json.dumps(books))
    for name, records in {"metrics.jsonl": metrics(options.steps), "timeline.jsonl": spans}.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    journal, per_step = Journal(folder / "journal"), max(1, options.groups // options.steps)
    for step in range(1, options.groups // per_step + 1):
        groups = [invented(number, options) for number in range((step - 1) * per_step, step * per_step)]
        for group in groups:
            journal.issued(IssuedPrompt(group.group_id, 0, group.prompt, step - 1))
            journal.finished(group)
        journal.trained(step, Minibatch(tuple(groups)))
        sequences = tuple(_sequence(r) for g in groups for r in g.rollouts)
        scores = np.random.default_rng(step).random((2, options.tokens)).astype(np.float16)
        journal.learned(
            step, groups, TrainBatch(step, sequences, {}), dict.fromkeys(range(len(sequences)), scores)
        )
    journal.close()


def metrics(steps: int) -> Iterator[Row]:
    """The lines of every step, and of an evaluation every 50."""
    numbers = dict.fromkeys([f"metric/{i}" for i in range(60)], 0.5)
    numbers |= {"train/pass_rate": 0.5, "train/reward": 0.1, "learner/loss": 0.1, "learner/entropy": 1.0}
    for step in range(steps + 1):
        line = {"step": step, "compute/total": 0.01 * step}
        if step:
            yield line | numbers
        if step % 50 == 0:
            rate = 0.1 + 0.7 / (1 + (5 / max(0.01 * step, 1e-9)) ** 2) + 0.005 * (-1) ** step
            yield line | {"eval/pass_rate": rate, "eval/pass_rate_se": 0.01}


def invented(number: int, options: Namespace) -> Group:
    """A group of random tokens; one in a thousand has a rare word."""
    rng, rollouts = np.random.default_rng(number), []
    for i in range(options.completions):
        n, right = options.tokens, bool(rng.random() < 0.4)
        text = " ".join(f"{x:04d}" for x in rng.integers(0, 9999, n)) + " Rare Word" * (number % 1000 == 7)
        ids, sampled = rng.integers(5, 15, n, np.int32), np.ones(n, bool)
        numbers = -rng.random(n).astype(np.float32), np.full(n, number // 5, np.int32), sampled
        outcome: Any = "correct" if right else "wrong"
        rollouts.append(Rollout(ids, *numbers, text, float(right), outcome, False, i == 0))
    prompt = Prompt(f"{number:06d}", f"Question {number}: " + "why? " * 40, (1,), "42", {})
    return Group(number, 0, prompt, tuple(rollouts))


def _sequence(one: Rollout) -> TrainSequence:
    ones, zero = np.ones(len(one.token_ids), np.float32), np.zeros(1, np.int32)
    return TrainSequence(zero, one.token_ids, one.logprobs_gen, one.versions, ones, ones * (one.reward - 0.4))
