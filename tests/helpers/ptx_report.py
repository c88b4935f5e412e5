"""The Triton kernels' cases, run from their PTX without a GPU.

A program, since Triton's interpreter must be off: `python tests/helpers/ptx_report.py PATTERN SEEDS REMOVED`
prints JSON. Each case that PATTERN matches runs under that many schedules; if REMOVED matches, too, also
once without each synchronising instruction that it comes to.
"""

import json
import re
import sys
from typing import Any

import ptx_cases
import ptx_gemm_cases
from ahead_of_time import Machine
from ptx_memory import PTXError, RaceError


def report(pattern: str, seeds: int, removed: str) -> dict[str, Any]:
    """Of each case its errors under each schedule; of each kernel what became of it without each barrier.

    Without a barrier, wait or fence there is a "race" or another "error", a result is "wrong", or nothing
    shows: then it is "redundant". "never": no case comes to it. together: without all redundant ones.
    """
    from triton.runtime.jit import JITFunction

    from kernels.triton import fused, rms_norm

    rms_norm.multiprocessors = fused.multiprocessors = lambda device: 1
    fused.capability, fused.quack_config = lambda device: 90, lambda *_: None
    machine, errors, shown, together = Machine(), {}, {}, {}
    JITFunction.run = lambda kernel, *args, **options: machine.launch(kernel, *args, **options)
    for name, case in (ptx_cases.cases() | ptx_gemm_cases.cases()).items():
        if not re.search(pattern, name):
            continue
        machine.passed, errors[name] = {}, []
        for machine.seed in range(seeds):
            errors[name].append(case())
        for kernel, passed in machine.passed.items() if re.search(removed, name) else ():
            outcomes = shown.setdefault(kernel, dict.fromkeys(machine.barriers[kernel], "never"))
            for at in passed:
                if outcomes[at] in ("never", "redundant"):
                    outcomes[at] = without(machine, kernel, (at,), case)
            redundant = tuple(at for at, outcome in outcomes.items() if outcome == "redundant")
            if len(redundant) > 1:
                together[kernel] = without(machine, kernel, redundant, case)
    barriers = {
        kernel: [(machine.barriers[kernel][at], outcome) for at, outcome in outcomes.items()]
        for kernel, outcomes in shown.items()
    }
    return {"errors": errors, "barriers": barriers, "together": together}


def without(machine: Machine, kernel: str, places: tuple[int, ...], case: ptx_cases.Case) -> str:
    """What shows that barriers are missing, under the schedule that does everything late."""
    machine.removed, machine.seed = (kernel, places), 1
    try:
        return "redundant" if case() < 1 else "wrong"
    except RaceError:
        return "race"
    except PTXError:
        return "error"
    finally:
        machine.removed = None


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
