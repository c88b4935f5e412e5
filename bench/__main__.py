"""`python -m bench` lists the benchmarks; `python -m bench NAME` runs one, as `python -m bench.NAME` does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = {  # name -> question that it answers, time that it takes on two cores
    "kernels.compare": ("How fast, small and exact is the loss beside other implementations?", "10 min"),
    "kernels.accuracy": ("How far is each backend from float64, and is that within its bar?", "5 min"),
    "kernels.account": ("What would the loss cost on an H100 or H200, by account?", "1 s"),
    "kernels.probe": ("On a GPU: where does the time of the loss go, part by part?", "4 min"),
    "learner": ("How fast is a training step beside a plain transformers loop?", "7 min a round"),
    "mfu": ("What share of a card's peak would the learner reach, by account?", "1 min"),
    "engine": ("How many tokens/s does the engine make beside `generate` and vLLM?", "3 min"),
    "verifiers": ("How many programs a second does the verifier of code judge?", "2 min"),
    "gpu": ("On a GPU: the first ten minutes, and the suites of loss and learner", "10 min"),
    "gpu_hours": ("What does a faster loss save: GPU-hours, and reward at a budget?", "2 s"),
    "pipeline": ("How fast does a split of the GPUs train, under which lag? And a real run?", "5 min"),
    "pipeline.schemes": ("PipelineRL or PPO-off-policy: which makes more steps, run for real?", "5 min"),
    "pipeline.scale": ("What does the controller cost at the paper's sizes?", "5 min"),
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


def main(argv: Sequence[str]) -> int:
    """List the benchmarks, or run one; the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n`python -m bench NAME --help` explains its options and columns.\n")
        for name, (question, time) in BENCHMARKS.items():
            print(f"  {name:23} {question} [{time}]")
        print("\npytest-benchmark suites: pytest bench --benchmark-only")
        return 0
    name, *options = argv
    if name not in BENCHMARKS:
        print(f"error: bench has no {name!r}; expected one of: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return importlib.import_module(module(name)).main(options) or 0


def module(name: str) -> str:
    """The module of a benchmark."""
    return f"bench.{name}.__main__" if name in PACKAGES else f"bench.{name}"


PACKAGES = ("gpu", "learner", "pipeline", "validation", "faults")  # each has a benchmark of its own name

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
