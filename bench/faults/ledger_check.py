"""Do the books of a finished run add up? Read from its journal and metrics alone, not the trainer's state.

Each step was trained once, on the next P groups; each of them is there, with tokens no older than the lag
allows; and within an epoch no prompt comes twice and, until the last, none is missing.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from trainer.controller.journal import records, unpack
from trainer.jsonl import read_lines


def problems(run_dir: Path, prompts: int, prompts_per_step: int, lag: int) -> list[str]:
    """Everything wrong, one line each; of a run without no-positive-resampling or groups set aside."""
    rows = list(read_lines(run_dir / "metrics.jsonl"))
    steps = [row["step"] for row in rows if "eval/pass_rate" not in row]
    evaluated = Counter(row["step"] for row in rows if "eval/pass_rate" in row)
    last = max(steps, default=0)
    lacks, again = sorted({*range(1, last + 1)} - {*steps}), [s for s, n in Counter(steps).items() if n > 1]
    wrong = [f"metrics.jsonl lacks the steps {lacks}"] if lacks else []
    wrong += [f"metrics.jsonl has the steps {again} again"] if again else []
    wrong += ["the steps in metrics.jsonl are not in order"] if steps != sorted(steps) else []
    wrong += [f"step {step} was evaluated {n} times" for step, n in evaluated.items() if n > 1]
    books: dict[str, dict[int, dict[str, Any]]] = {"issued": {}, "finished": {}, "trained": {}}
    for record in records(run_dir / "journal"):  # what a resume repeats replaces what came before
        for kind in books.keys() & record.keys():  # turns are no part of the books
            books[kind][record[kind]] = record
    issued, finished, trained = books.values()
    epochs: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for step in range(1, last + 1):
        first = (step - 1) * prompts_per_step
        groups = range(first, first + prompts_per_step)
        record = trained.get(step, {})
        if (record.get("first"), record.get("last")) != (groups[0], groups[-1]):
            wrong.append(f"step {step} was trained on {record}, not on groups {groups[0]} to {groups[-1]}")
        for group in groups:
            if group not in issued or group not in finished:
                wrong.append(f"group {group} of step {step} is not in the journal")
                continue
            epochs[issued[group]["epoch"]][issued[group]["prompt_id"]] += 1
            versions = unpack(finished[group])["versions"][1]
            if not step - 1 - lag <= versions.min() <= versions.max() <= step - 1:
                wrong.append(f"group {group} has tokens of versions {set(versions.tolist())} in step {step}")
    for epoch, counts in epochs.items():
        wrong += [f"epoch {epoch} has prompt {p} {n} times" for p, n in counts.items() if n > 1]
        if epoch < max(epochs) and len(counts) != prompts:
            wrong.append(f"epoch {epoch} has {len(counts)} of {prompts} prompts")
    return wrong
