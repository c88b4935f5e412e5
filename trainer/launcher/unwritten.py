"""Which lines of metrics.jsonl a killed launcher did not write, according to the controller's checkpoint.

The other roles outlive a killed launcher by the step under way, and save it. So a checkpoint can hold steps
and evaluations that metrics.jsonl lacks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def unwritten_rows(
    rows: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], version: int, devices: float
) -> list[dict[str, Any]]:
    """The missing lines up to `version`, in order, without FLOPs.

    `events` are the controller's last ones, among them some whose lines were written. A step's compute is
    that of the step before, and what all `devices` have spent between the two events, without evaluations.
    """
    steps = {row["step"]: dict(row) for row in rows if "eval/pass_rate" not in row}
    evaluated = {row["step"] for row in rows if "eval/pass_rate" in row}
    missing: list[dict[str, Any]] = []
    before = None  # the time of the step before
    for event in events:
        step, at, data = event["data"]["step"], event["time"], event["data"]
        if step > version:
            break
        if event["kind"] == "eval":
            before = None if before is None else before + data.get("seconds", 0.0)
            if step not in evaluated and step in steps:
                results = {f"eval/{name}": value for name, value in data.items() if name != "step"}
                missing.append({"step": step} | _when(steps[step]) | results)
            continue
        if event["kind"] == "step" and step not in steps:
            last = {"time": 0.0, "compute/total": 0.0} | _when(steps.get(step - 1, {}))
            seconds = max(0.0, at - before) if before is not None else 0.0
            last["time"] += seconds
            last["compute/total"] += devices * seconds / 3600
            steps[step] = data | last
            missing.append(steps[step])
        before = at
    return missing


def _when(row: Mapping[str, Any]) -> dict[str, Any]:
    """Time and compute of a line."""
    return {name: value for name, value in row.items() if name == "time" or name.startswith("compute/")}
