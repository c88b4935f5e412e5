"""The Triton kernels' compiled code, run on the CPU: its results, and each of its barriers taken out.

`tests/helpers/ptx.py` says how PTX is run, `tests/helpers/ptx_report.py` what.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx import GLOBAL, parse
from ptx_memory import Memory, PTXError, RaceError
from ptx_ops import arithmetic
from ptx_steps import program

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
NOTICED = {"race", "wrong", "error"}
ROWS_AND_BODY = "^(?!gemm)"
GEMMS = r"gemm (logits|fused) \(70, 192|gemm logits \(40"
"""By TMA and wgmma the plain GEMM and the one with the largest epilogue, and the one of FP32 by cp.async."""


@cache
def report(pattern: str, removed: str = "", schedules: int = 4) -> dict[str, Any]:
    """The output of `tests/helpers/ptx_report.py`: errors of cases and removed barriers of kernels."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, ROOT / "tests/helpers/ptx_report.py", pattern, str(schedules), removed]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    cases: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert {len(errors) for errors in cases["errors"].values()} == {schedules}
    return cases


def outcomes(found: dict[str, Any]) -> set[str]:
    """What became of kernels without a barrier, after the check that all results are right with it."""
    assert {name: max(e) for name, e in found["errors"].items() if max(e) >= 1} == {}
    return {outcome for shown in found["barriers"].values() for _, outcome in shown}


def test_compiled_row_kernels_are_float64s_under_any_schedule_and_need_each_barrier() -> None:
    found = report("^(row_stats|single_pass raised|row_grads( tail)? bf16|merge)$")
    assert outcomes(found) == {"race"}
    assert {kernel.split()[0] for kernel in found["barriers"]} == {
        "_row_stats", "_single_pass", "_row_grads", "merge",
    }  # fmt: skip


@pytest.mark.slow
def test_every_row_and_body_kernel_is_float64s_and_all_barriers_but_one_are_needed() -> None:
    found = report(ROWS_AND_BODY)
    assert outcomes(found) == {"race", "redundant"}
    assert {kernel.split()[0] for kernel in found["barriers"]} == {
        "_row_stats", "_row_grads", "_single_pass", "_terms", "_split", "merge", "estimate_anchors", "settle",
        "_rms_norm", "_rms_norm_grads", "_rope", "_rope_grads", "_scale", "_swiglu", "_swiglu_grads",
    }  # fmt: skip
    assert sum(map(len, found["barriers"].values())) > 200
    # The first barrier in a loop over tiles (512 wide, 8 warps): each thread then writes what it read itself.
    redundant = [
        name for name, shown in found["barriers"].items() for _, outcome in shown if outcome != "race"
    ]
    assert [name.split()[0] for name in redundant] == ["_rope_grads"]


@pytest.mark.slow
def test_every_gemm_is_float64s_with_copies_and_products_early_and_late_and_misses_each_wait() -> None:
    found = report("^gemm", GEMMS, 3)  # copies and products early, late, and at random
    assert outcomes(found) <= NOTICED | {"redundant"}
    kernels = {name: shown for name, shown in found["barriers"].items() if name.startswith("gemm")}
    assert len(kernels) == 3 and len(found["errors"]) >= 14
    for name, shown in kernels.items():
        # The waits for nothing at the end, and barriers beside others that order the same things.
        redundant = [opcode for opcode, outcome in shown if outcome == "redundant"]
        assert set(redundant) <= {"bar.sync", *(x for x in redundant if "wait_group" in x)}, name
        assert all(redundant.count(x) <= 1 for x in redundant if x != "bar.sync"), name
        if len(redundant) > 1:
            assert found["together"][name] in NOTICED, name
    used = {opcode for shown in kernels.values() for opcode, outcome in shown if outcome in NOTICED}
    assert {x.split(".")[0] for x in used} == {"bar", "mbarrier", "wgmma", "cp", "fence"}


HEAD = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0)
.reqntid 64
{
.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
ld.param.b64 %rd1, [kernel_param_0];
mad.wide.u32 %rd2, %r1, 4, %rd1;
"""


def run(body: str, seed: int = 0) -> list[int]:
    """What a kernel of two warps stores in 64 words, which contain their places before."""
    memory = Memory(256, GLOBAL, None, True)
    memory.valid[:] = True
    memory.bytes[:] = np.arange(64, dtype=np.uint32).view(np.uint8)
    kernel = program(parse(HEAD + body + "ret;\n}\n"), 256)
    kernel.run((1, 1, 1), GLOBAL.to_bytes(8, "little"), memory, seed)
    return list(map(int, memory.bytes.view(np.uint32)))


EXCHANGE = """
st.shared.b32 [%r2], %r1;
BARRIER
xor.b32 %r3, %r2, DISTANCE;
ld.shared.b32 %r4, [%r3];
st.global.b32 [%rd2], %r4;
"""


@pytest.mark.parametrize(
    ("barrier", "lanes", "ordered"),
    [
        ("bar.sync 0;", 32, True), ("bar.warp.sync -1;", 32, False), ("", 32, False),
        ("bar.sync 0;", 1, True), ("bar.warp.sync -1;", 1, True), ("", 1, False), ("", 0, True),
    ],
)  # fmt: skip
def test_words_exchanged_by_way_of_shared_memory_need_a_barrier_of_both_threads(
    barrier: str, lanes: int, ordered: bool
) -> None:
    body = EXCHANGE.replace("BARRIER", barrier).replace("DISTANCE", str(4 * lanes))
    for seed in range(4):
        if ordered:
            assert run(body, seed) == [i ^ lanes for i in range(64)]
        else:
            with pytest.raises(RaceError):
                run(body, seed)


def test_a_write_after_a_read_and_two_different_writes_are_races_and_equal_writes_are_none() -> None:
    late = "xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3]; st.shared.b32 [%r2], %r1;"
    for body in (late, "st.shared.b32 [0], %r1;", "st.global.b32 [%rd1], %r1;"):
        with pytest.raises(RaceError):
            run(body)
    assert run("st.global.b32 [%rd1], 7;")[0] == 7


def test_lanes_part_at_a_branch_and_meet_again() -> None:
    body = """
    and.b32 %r3, %r1, 3;
    setp.eq.s32 %p1, %r3, 0;
    mov.b32 %r4, 0;
    @%p1 bra $end;
    $loop:
    add.s32 %r4, %r4, 10;
    add.s32 %r3, %r3, -1;
    setp.ne.s32 %p2, %r3, 0;
    @%p2 bra $loop;
    $end:
    shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
    st.global.b32 [%rd2], %r5;
    """
    assert run(body) == [10 * ((i ^ 1) & 3) for i in range(64)]


def test_accesses_outside_of_tensors_or_not_aligned_are_errors() -> None:
    for body in ("st.global.b32 [%rd2+4], %r1;", "ld.global.b32 %r3, [%rd2+2];", "ld.shared.b32 %r3, [256];"):
        with pytest.raises(PTXError):
            run(body)


def test_rounding_is_that_of_exact_fractions() -> None:
    tiny = np.float32(2.0**-30)
    for opcode, operands, expected in [
        ("fma.rn.f32", (1 + 2.0**-12, 1 + 2.0**-12, -1), 2.0**-11 + 2.0**-24),
        ("fma.rm.f32", (1, 1, -tiny), 1 - 2.0**-24),
        ("fma.rz.f32", (-1, 1, tiny), -1 + 2.0**-24),
        ("fma.rp.f32", (1, 1, tiny), 1 + 2.0**-23),
        ("fma.rn.f32", (1 + 2.0**-23, 1 + 2.0**-23, 2.0**-24 - 2.0**-46), 1 + 2.0**-22),
        ("add.rz.ftz.f32", (1, -(2.0**-60)), 1 - 2.0**-24),
        ("mul.ftz.f32", (2.0**-100, 2.0**-40), 0),
        ("cvt.rni.f32.f32", (2.5,), 2),
        ("min.f32", (np.nan, 3), 3),
        ("div.s32", (-7, 2), -3),
        ("shr.s32", (-8, 40), -1),
        ("shl.b32", (1, 32), 0),
        ("mul.wide.s32", (-(2**30), 8), -(2**33)),
        ("bfe.s32", (0b110100, 2, 4), -3),
        ("cvt.rn.bf16.f32", (1 + 2.0**-8,), 0x3F80),  # a tie, to even
        ("cvt.rn.bf16.f32", (1 + 3 * 2.0**-8,), 0x3F82),
        ("setp.geu.f32", (np.nan, 1), True),
    ]:
        function, types, result = arithmetic(opcode)
        arrays = [np.full(32, x).astype(t) for x, t in zip(operands, types, strict=True)]
        with np.errstate(all="ignore"):
            assert function(*arrays).astype(result)[0] == expected, opcode
