"""A trainer in seconds: takes the command line of trainer.main and writes a run folder like its own.

Its reward follows a sigmoid that depends on recipe and seed. `FAKE` (JSON in the environment) says how it
misbehaves: {"fails": ["grpo-1"], "tick": 0.05, "killed_at": {...}}. Each start is a line of starts.txt beside
the run folder, each step one of steps.txt.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from trainer.cli import parse, to_yaml
from trainer.config import ConfigError
from trainer.run_folder import claim, latest, record_end

STEPS, HOURS_PER_STEP, SD, C_MID = 24, 0.1, 0.006, 0.4
CEILINGS = {"scalerl": 0.62, "grpo": 0.52, "dapo": 0.57}


def main() -> int:
    launch = parse(sys.argv[1:])
    config, folder = launch.config, Path(launch.config.run_dir)
    recipe, how = folder.name.rpartition("-")[0], json.loads(os.environ.get("FAKE", "{}"))
    stops: list[int] = []
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda signum, frame: stops.append(signum))
    with claim(config.run_dir, launch.resume), (folder.parent / "starts.txt").open("a") as starts:
        starts.write(f"{folder.name} {sorted(os.sched_getaffinity(0))}\n")
        starts.flush()
        checkpoint = latest(folder) if launch.resume else None
        if launch.resume and checkpoint is None:
            raise ConfigError(f"--resume: {folder} holds no checkpoint")
        step = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
        (folder / "config.yaml").write_text(to_yaml(config))
        (folder / "journal").mkdir(exist_ok=True)
        (folder / "journal" / "000000.jsonl").write_text("{}\n")
        metrics = folder / "metrics.jsonl"
        rows = metrics.read_text().splitlines() if checkpoint else []
        rows = [row for row in rows if json.loads(row)["step"] <= step]
        metrics.write_text("".join(f"{row}\n" for row in rows))
        limit = config.pipeline.max_compute or float("inf")
        rng = random.Random(10 * config.seed + len(recipe))
        ceiling = CEILINGS.get(recipe, 0.5) + rng.gauss(0, 0.004)
        noise = [rng.gauss(0, SD) for _ in range(STEPS + 1)]
        while True:
            compute = step * HOURS_PER_STEP
            if not rows or json.loads(rows[-1])["step"] < step:
                share = 1 / (1 + (C_MID / compute) ** 2) if compute else 0.0
                reward = 0.2 + (ceiling - 0.2) * share + noise[step]
                row = {"step": step, "eval/pass_rate": reward, "eval/pass_rate_se": SD, "time": 0.0}
                row |= {f"compute/{k}": v for k, v in (("total", compute), ("evaluation", 0), ("startup", 0))}
                rows.append(json.dumps(row))
                with metrics.open("a") as file:
                    file.write(rows[-1] + "\n")
                books = {"unit": "core-hours", "devices_total": 2, "wall_s": 36.0 * step, "roles": {}}
                books["compute"] = {"total": compute, "evaluation": 0.0, "startup": 0.0}
                (folder / "ledger.json").write_text(json.dumps(books))
            if folder.name in how.get("fails", ()) and step == 3:
                raise ConfigError("step 3: loss is nan")
            ended = "steps" if step >= STEPS else "compute" if compute >= limit - 1e-9 else ""
            if ended or stops or step % 4 == 0 < step:
                path = folder / "checkpoints" / f"step-{step:06d}"
                path.mkdir(parents=True, exist_ok=True)
                (path / "controller.json").write_text("{}")
            if ended:
                record_end(folder, ended, config.pipeline.max_compute)
                return 0
            if stops:
                return 0
            time.sleep(how.get("tick", 0.002))
            step += 1
            with (folder.parent / "steps.txt").open("a") as steps:
                steps.write(f"{folder.name} {step}\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
