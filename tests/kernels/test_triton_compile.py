"""Every launch the Triton backend makes, compiled ahead of time for each GPU generation, without a GPU.

Run as a program (not in the interpreter) it calls the backend on tensors without data, compiles what it
would launch, and prints what the machine code holds. The tests read that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a block, CUDA C++ Programming Guide
ROWS, WIDTH = 4096, 4096
PARTS = 2  # processes that compile side by side


def launches(capability: int, part: int) -> list[tuple[str, dict[str, Any]]]:
    """(name, what was found) for each kernel in each shipped config, of one of the PARTS of all cases."""
    import triton
    from triton.runtime.jit import JITFunction

    from kernels.triton import fused

    found: list[tuple[str, dict[str, Any]]] = []

    def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bound = dict(zip(kernel.arg_names, args, strict=False))
        bound |= {k: options.pop(k) for k in list(options) if k in kernel.arg_names}
        found.append((f"{kernel.fn.__name__} {case}", compiled(triton, kernel, bound, options, capability)))

    JITFunction.run = compile_instead
    fused.capability = lambda device: capability
    fused.multiprocessors = lambda device: 132
    for case, call in cases()[part::PARTS]:  # noqa: B007  # compile_instead reads it
        call()
    return found


def cases() -> list[tuple[str, Any]]:
    """Calls that between them launch every kernel in every config and with every switch."""
    from kernels.triton import fused, rows, split

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    row, y = new(ROWS), new(ROWS, dtype=torch.int64)
    found: list[tuple[str, Any]] = []
    for vocabulary, cap in [(151936, 0.0), (151936, 30.0), (128257, 0.0), (1000, 30.0)]:
        z, name, b = new(ROWS, vocabulary), f"V={vocabulary} cap={cap}", row if cap else None
        found.append((name, lambda z=z, cap=cap: rows.row_stats(z, y, row, cap)))
        for exact in (False, True):
            found.append((
                f"{name} exact={exact}",
                lambda z=z, cap=cap, b=b, e=exact: rows.row_grads(z, y, row, cap, row, row, b, b, row, e),
            ))  # fmt: skip
        if not cap:
            found.append((name, lambda z=z: rows.single_pass(z, y, row, row)))
    found.append(("parts=3", lambda: split.split_bf16(new(ROWS, WIDTH), 3)))
    for dtype, parts, width, vocabulary in [
        (torch.bfloat16, 1, WIDTH, 151936),
        (torch.bfloat16, 3, WIDTH, 151936),
        (torch.bfloat16, 1, 4001, 50257),  # not aligned
        (torch.float32, 1, WIDTH, 151936),
        (torch.float32, 1, 4001, 50257),
    ]:
        h, weight = new(ROWS, width, dtype=dtype), new(vocabulary, parts * width, dtype=dtype)
        name = f"{str(dtype)[6:]} parts={parts} H={width}"
        found.append((f"score {name}", lambda h=h, w=weight: fused.score(h, w, y, row, 0.0)))
        if parts == 1:
            found.append((f"score {name} cap", lambda h=h, w=weight: fused.score(h, w, y, row, 30.0)))
            found.append((f"logits {name}", lambda h=h, w=weight: fused.logits(h, w, new(ROWS, len(w)))))
        if dtype == torch.bfloat16:
            found.append((f"fused {name}", lambda h=h, w=weight: fused.fused_epilogue(h, w, y, row, row)))
    return found + body_cases()


def body_cases() -> list[tuple[str, Any]]:
    """Calls that launch the body's kernels, forward and backward: usual shapes, the widest, and ones of 1."""
    from kernels.triton import rms_norm, rope, swiglu

    fp32, bf16 = torch.float32, torch.bfloat16

    def new(*shape: int, dtype: torch.dtype = fp32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    def train(outputs: Any) -> None:
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])

    def norm(rows: int, width: int, x: torch.dtype, residual: torch.dtype | None, dtype: torch.dtype) -> None:
        h, weight = new(rows, width, dtype=x), new(width)
        if residual is None:
            train(rms_norm.rms_norm(h, weight, 1e-6, dtype))
        else:
            train(rms_norm.fused_add_rms_norm(h, new(rows, width, dtype=residual), weight, 1e-6, dtype))

    def rotate(tokens: int, heads: int, kv_heads: int, width: int, x: torch.dtype, normed: bool) -> None:
        q, k = new(tokens, heads, width, dtype=x), new(tokens, kv_heads, width, dtype=x)
        table, positions = new(40960, width // 2), new(tokens, dtype=torch.int64)
        weights = (new(width), new(width)) if normed else (None, None)
        train(rope.fused_qk_norm_rope(q, k, table, table, positions, *weights, 1e-6, torch.bfloat16))

    def gated(rows: int, width: int, dtype: torch.dtype) -> None:
        packed = new(rows, 2 * width, dtype=dtype)
        train(swiglu.swiglu(*packed.chunk(2, 1), torch.bfloat16))

    calls = [
        *((norm, c) for c in [
            (ROWS, 4096, bf16, None, bf16), (ROWS, 8192, bf16, fp32, bf16), (1, 1, fp32, None, bf16),
        ]),
        *((rotate, c) for c in [
            (ROWS, 32, 8, 128, bf16, True), (ROWS, 3, 1, 512, fp32, True), (1, 1, 1, 2, bf16, False),
        ]),
        (gated, (ROWS, 12288, bf16)),
    ]  # fmt: skip
    return [(" ".join(map(str, c)), lambda call=call, c=c: call(*c)) for call, c in calls]


def compiled(
    triton: Any, kernel: Any, arguments: dict[str, Any], options: dict[str, Any], capability: int
) -> dict[str, Any]:
    """The machine code of a kernel as it would be specialised for these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        signature[parameter.name], aligned = described(value, parameter)
        if signature[parameter.name] == "constexpr":
            constants[(i,)] = value
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    dump = disassembled(Path(triton.__file__).parent / "backends/nvidia/bin", code.asm["cubin"])
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", dump, re.M)
    count = {
        name: sum(m.split(".")[0] == name for m in mnemonics)
        for name in ("STL", "LDL", "HGMMA", "HMMA", "UTCHMMA", "FFMA", "UTMALDG", "UTMASTG")
    }
    order = [m for m in mnemonics if m.split(".")[0] in ("LDG", "STG", "BAR", "BRA")]
    registers, stack = (int(re.search(rf"{k}:(\d+)", dump)[1]) for k in ("REG", "STACK"))  # type: ignore[index]
    return count | {
        "instructions": len(mnemonics), "registers": registers, "stack": stack,
        "shared": code.metadata.shared, "wgmma": code.asm["ptx"].count("wgmma.mma_async"), "order": order,
    }  # fmt: skip


@cache  # half a second, and a fourth of the launches share their code with another
def disassembled(tools: Path, code: bytes) -> str:
    """cuobjdump's disassembly and resource usage of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code)
        cubin.flush()
        command = [tools / "cuobjdump", "-sass", "-res-usage", cubin.name]
        return subprocess.run(command, capture_output=True, text=True).stdout


def described(value: Any, parameter: Any) -> tuple[str, bool]:
    """(Triton's type of an argument, whether the compiler may assume that 16 divides it)."""
    if parameter.is_constexpr:
        return "constexpr", False
    if hasattr(value, "block_shape"):
        return f"tensordesc<{short(value.base.dtype)}{list(value.block_shape)}>", False
    if isinstance(value, torch.Tensor):
        return f"*{short(value.dtype)}", True
    if isinstance(value, float):
        return "fp32", False
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr", False
    return ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0 and not parameter.do_not_specialize


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64"}[dtype]


@cache
def report(capability: int) -> dict[str, dict[str, Any]]:
    """What the program prints."""
    pytest.importorskip("triton")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    runs = [
        subprocess.Popen(
            [sys.executable, __file__, str(capability), str(part)],
            env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for part in range(PARTS)
    ]  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        printed, errors = run.communicate()
        assert run.returncode == 0, errors[-3000:]
        found |= json.loads(printed.splitlines()[-1])
    return found


generations = pytest.mark.parametrize(
    "capability",
    [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)],
    ids="sm_{}".format,
)


@generations
def test_no_kernel_spills_and_each_fits_the_shared_memory(capability: int) -> None:
    found = report(capability)
    assert {name.split()[0] for name in found} == {
        "_row_stats", "_row_grads", "_single_pass", "_split", "gemm", "merge", "estimate_anchors", "settle",
        "_rms_norm", "_rms_norm_grads", "_rope", "_rope_grads", "_swiglu", "_swiglu_grads",
    }  # fmt: skip
    spilled = [n for n, code in found.items() if code["STL"] or code["LDL"] or code["stack"]]
    assert spilled == []
    assert [n for n, code in found.items() if code["shared"] > SHARED_MEMORY[capability]] == []
    assert all(code["instructions"] > 50 for code in found.values())  # the disassembly was read


@generations
def test_bf16_products_use_the_tensor_cores_and_fp32_ones_are_not_rounded(capability: int) -> None:
    unit = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[capability]
    for name, code in report(capability).items():
        if name.startswith("gemm"):
            assert bool(code[unit]) == ("bfloat16" in name), name
            assert bool(code["UTMALDG"]) == ("H=4096" in name and "bfloat16" in name and capability >= 90), (
                name
            )
            if "float32" in name:
                assert not code["HMMA"], name  # TF32
            elif capability == 90:
                assert code["wgmma"] and not code["HMMA"], name


@generations
def test_bf16_results_wait_for_all_reads_of_their_tile(capability: int) -> None:
    for name, code in report(capability).items():
        if name.startswith("_row_grads") and "exact=False" in name:
            order = [mnemonic.split(".")[0] for mnemonic in code["order"]]
            stores = order.index("STG")
            reads = stores - 1 - order[:stores][::-1].index("LDG")
            assert "BAR" in order[reads:stores], name


if __name__ == "__main__":
    print(json.dumps(launches(*map(int, sys.argv[1:]))))
