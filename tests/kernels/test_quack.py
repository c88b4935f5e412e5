"""QuACK's GEMM with our epilogue, compiled ahead of time: read as machine code, and run on a CPU.

`make test-quack` installs quack-kernels and runs this; elsewhere it is skipped. As a program (`python
tests/kernels/test_quack.py FOLDER CAPABILITY`) it compiles each kernel, and CuTe leaves
PTX and cubin in the folder.
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
from sass import instructions_in_loop, instructions_outside_products

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COUNTED = "STL", "LDL", "HGMMA", "UTCHMMA", "LDTM", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG"
both = pytest.mark.parametrize("capability", [90, 100])


def compiled(folder: str, capability: int) -> dict[str, dict[str, Any]]:
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
            config = quack.CONFIGS[capability]
            quack.plan(config, dtype, stores)
            (cubin,) = set(Path(folder).glob("*.cubin")) - seen
            seen.add(cubin)
            command = [cuobjdump, "-sass", "-res-usage", cubin]
            dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            if capability == 90:
                logits = config.rows * config.columns // (128 if config.pingpong else 256)
                instructions = instructions_outside_products(dump, "HGMMA")
            else:  # one round of each loop over the parts of a row
                logits = dump.count("MUFU.EX2")
                instructions = sum(instructions_in_loop(dump, name) for name in ("FMNMX3", "MUFU.EX2"))
            count = {name: len(re.findall(rf"\b{name}\b", dump)) for name in COUNTED}
            registers, stack = (int(n) for n in re.findall(r"(?:REG|STACK):(\d+)", dump))
            found[f"{str(dtype)[6:]} {'single pass' if stores else 'score'}"] = count | {
                "registers": registers, "stack": stack,
                "logit": instructions / logits,
            }  # fmt: skip
    return found


@cache
def report(program: str, capability: int, *arguments: str) -> dict[str, Any]:
    """The output of a program that compiles for such a GPU."""
    from kernels.triton import quack

    if not find_spec("triton") or not find_spec("quack"):
        pytest.skip("quack-kernels or Triton is not installed: make test-quack")
    assert not quack.why_not()  # another version than the one that the tests install
    with TemporaryDirectory() as folder:
        gpu = {"QUACK_ARCH": f"{capability}", "CUTE_DSL_ARCH": f"sm_{capability}a"}
        output = {"QUACK_CACHE_ENABLED": "0", "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": folder}
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests/helpers")))}
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | gpu | output | paths
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, ROOT / program, folder, f"{capability}", *arguments]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@both
def test_no_kernel_spills_and_an_epilogue_is_at_most_9_instructions_a_logit(capability: int) -> None:
    found = report("tests/kernels/test_quack.py", capability)
    assert set(found) == {f"{t} {k}" for t in ("bfloat16", "float16") for k in ("single pass", "score")}
    assert [n for n, code in found.items() if code["STL"] or code["LDL"] or code["stack"]] == []
    assert {n: code["logit"] for n, code in found.items() if not 5 < code["logit"] <= 9} == {}


@both
def test_operands_come_and_results_go_by_tma_and_scores_store_nothing(capability: int) -> None:
    for name, code in report("tests/kernels/test_quack.py", capability).items():
        stores = "score" not in name
        assert code["UTMALDG"] and bool(code["UTMASTG"]) == stores, name
        if capability == 90:
            assert code["HGMMA"] and code["USETMAXREG"] == 2 and bool(code["STSM"]) == stores, name
        else:  # a row is read twice, by two loops
            assert code["UTCHMMA"] and code["LDTM"] == 2, name


@both
def test_the_compiled_kernels_are_float64s_with_copies_and_products_early_and_late(
    capability: int,
) -> None:
    """Gradients' factors to bf16's rounding, statistics to 1e-5 of the largest, log-probs to 1e-5 nats."""
    errors = report("tests/helpers/ptx_quack.py", capability, "3")
    assert len(errors) >= 12 and {len(e) for e in errors.values()} == {3}
    assert {name: max(e) for name, e in errors.items() if max(e) >= 1} == {}


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1], int(sys.argv[2]))))
