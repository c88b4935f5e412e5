"""QuACK's GEMM with our epilogue, compiled ahead of time for Hopper: read as machine code, and run on a CPU.

`make test-quack` installs quack-kernels and runs this; elsewhere it is skipped. As a program (`python
tests/kernels/test_quack.py FOLDER`) it compiles each kernel, whose PTX and cubin CuTe leaves in the folder.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sass import instructions_outside_products

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def compiled(folder: str) -> dict[str, dict[str, Any]]:
    """Of each kernel what its machine code holds."""
    import torch
    import triton
    from quack.gemm_runtime import host

    from kernels.triton import quack

    host.get_max_active_clusters = lambda *_: 132
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    found, seen = {}, set[Path]()
    for dtype in (torch.bfloat16, torch.float16):
        for stores in (True, False):
            config = quack.CONFIGS[90]
            quack.plan(config, dtype, stores)
            (cubin,) = set(Path(folder).glob("*.cubin")) - seen
            seen.add(cubin)
            command = [cuobjdump, "-sass", "-res-usage", cubin]
            dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            logits = config.rows * config.columns // (128 if config.pingpong else 256)
            count = {
                name: len(re.findall(rf"\b{name}\b", dump))
                for name in ("STL", "LDL", "HGMMA", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG")
            }
            registers, stack = (int(n) for n in re.findall(r"(?:REG|STACK):(\d+)", dump))
            found[f"{str(dtype)[6:]} {'single pass' if stores else 'score'}"] = count | {
                "registers": registers, "stack": stack,
                "logit": instructions_outside_products(dump, "HGMMA") / logits,
            }  # fmt: skip
    return found


@cache
def report(program: str, *arguments: str) -> dict[str, Any]:
    """The output of a program that compiles for Hopper."""
    from kernels.triton import quack

    if not find_spec("triton") or not find_spec("quack"):
        pytest.skip("quack-kernels or Triton is not installed: make test-quack")
    assert not quack.why_not()  # another version than the one that the tests install
    with TemporaryDirectory() as folder:
        hopper = {"CUDA_VISIBLE_DEVICES": "", "QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"}
        output = {"QUACK_CACHE_ENABLED": "0", "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": folder}
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests/helpers")))}
        environment = os.environ | hopper | output | paths
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, ROOT / program, folder, *arguments]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_no_kernel_spills_and_an_epilogue_is_at_most_9_instructions_a_logit() -> None:
    found = report("tests/kernels/test_quack.py")
    assert set(found) == {f"{t} {k}" for t in ("bfloat16", "float16") for k in ("single pass", "score")}
    assert [n for n, code in found.items() if code["STL"] or code["LDL"] or code["stack"]] == []
    assert {n: code["logit"] for n, code in found.items() if not 5 < code["logit"] <= 9} == {}


def test_operands_come_and_results_go_by_tma_and_scores_store_nothing() -> None:
    for name, code in report("tests/kernels/test_quack.py").items():
        assert code["HGMMA"] and code["UTMALDG"] and code["USETMAXREG"] == 2, name
        assert bool(code["UTMASTG"]) == bool(code["STSM"]) == ("score" not in name), name


def test_the_compiled_kernels_are_float64s_with_copies_and_products_early_and_late() -> None:
    """Gradients' factors to bf16's rounding, statistics to 1e-5 of the largest, log-probs to 1e-5 nats."""
    errors = report("tests/helpers/ptx_quack.py", "3")
    assert len(errors) >= 12 and {len(e) for e in errors.values()} == {3}
    assert {name: max(e) for name, e in errors.items() if max(e) >= 1} == {}


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1])))
