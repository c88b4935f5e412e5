"""`python -m bench` lists the benchmarks; `python -m bench NAME [--out FILE | --record]` runs one.

A record grows by a line with each case that was measured: the same command with the same --out goes on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from bench import harness

BENCHMARKS = {  # name -> question that it answers, time that it takes on two cores
    "kernels.compare": ("How fast, small and exact is the loss beside other implementations?", "10 min"),
    "kernels.accuracy": ("How far is each backend from float64, and is that within its bar?", "5 min"),
    "kernels.account": ("What would the loss cost on an H100 or H200, by account?", "1 s"),
    "kernels.parts": ("Where does the time of the loss and of the body's ops go, part by part?", "4 min"),
    "learner": ("How fast is a training step beside a plain transformers loop?", "7 min a round"),
    "engine": ("How many tokens/s does the engine make beside `generate` and vLLM?", "3 min"),
    "verifiers": ("How many answers and programs a second do the verifiers judge?", "3 min"),
    "gpu": ("On a GPU: everything that one card can show, what matters first", "10 min a call"),
    "gpu.stages": ("The stages of gpu that no other benchmark has", "minutes"),
    "gpu_hours": ("What does a faster loss save: GPU-hours, and reward at a budget?", "2 s"),
    "pipeline": ("How fast does a split of the GPUs train, under which lag?", "3 min"),
    "pipeline.virtual_run": ("How do controller and pool do at the paper's sizes, in virtual time?", "1 min"),
    "pipeline.schemes": ("PipelineRL or PPO-off-policy: which makes more steps, run for real?", "5 min"),
    "validation": ("How often do the curve's intervals hold the truth of simulated runs?", "30 min"),
    "validation.laws": ("And for sigmoids that are not the paper's?", "5 min"),
    "validation.shapes": ("Is a curve that is no sigmoid said to be none?", "5 min"),
    "validation.comparisons": ("How often is the comparison of two recipes right?", "15 min"),
    "validation.stopping": ("Does `forecast.stop` end runs that still had to gain?", "10 min"),
    "validation.halving": ("Does halving of a sweep lose the winner, and what does it save?", "hours"),
    "validation.chain": ("Is what the kernels' benchmark predicts of a run true of it?", "1 s, of kept runs"),
    "validation.curve_doc": ("Makes the outputs in docs/curve.md again", "2 min"),
    "faults": ("Does a run survive, or end in one line, whatever process dies or freezes?", "hours"),
    "faults.soak": ("Is anything lost, or growing, in a long run under random faults?", "an hour"),
}
MODULES = {  # of the folders whose name is a benchmark's
    "learner": "learner.throughput", "gpu": "gpu.suite", "pipeline": "pipeline.splits",
    "validation": "validation.runs", "faults": "faults.matrix",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """List the benchmarks, or run one; the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n`python -m bench NAME --help` explains its options and columns.\n")
        for name, (question, time) in BENCHMARKS.items():
            print(f"  {name:23} {question} [{time}]")
        return 0
    name, *options = argv
    if name not in BENCHMARKS:
        print(f"error: bench has no {name!r}; expected one of: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.{MODULES.get(name, name)}")
    return harness.run(name, module, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
