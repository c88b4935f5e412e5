"""Every launch the Triton backend makes, compiled ahead of time for each GPU generation, without a GPU.

Run as a program (not in the interpreter) it calls the backend on tensors without data, compiles what it
would launch, and prints what the machine code holds. The tests read that.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ahead_of_time import short, specialised
from sass import instructions_in_loop, instructions_outside_products

pytestmark = pytest.mark.timeout(1500)  # a generation takes minutes on a core
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a block, CUDA C++ Programming Guide
ROWS, WIDTH = 4096, 4096
PRODUCT = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # the tensor cores' instruction


def launches(capability: int, pattern: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, machine code) of each kernel in each shipped config, of the cases whose names match."""
    import triton
    from triton.runtime.jit import JITFunction

    from kernels.triton import fused

    found: list[tuple[str, dict[str, Any]]] = []
    tried = set()

    def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bound = dict(zip(kernel.arg_names, args, strict=False))
        bound |= {k: options.pop(k) for k in list(options) if k in kernel.arg_names}
        code = compiled(triton, kernel, bound, options, capability)
        variant = kernel, *(bound.get(k) for k in ("EPILOGUE", "PARTS", "TMA", "EVEN", "CAP"))
        if capability == 90 and variant not in tried:  # the front end is that of all generations
            code["refused"] = refused_ones(kernel, bound, options, capability)
            tried.add(variant)
        found.append((f"{kernel.fn.__name__} {case}", code))

    JITFunction.run = compile_instead
    fused.capability, fused.quack_config = lambda device: capability, lambda *_: None
    fused.multiprocessors = lambda device: 132
    for case, call in cases():
        if re.search(pattern, case):
            call()
    return found


def cases() -> list[tuple[str, Any]]:
    """Calls that between them launch every kernel in every config and with every switch."""
    from kernels import KL, DualClip
    from kernels.head import LMHead
    from kernels.objectives import OBJECTIVES
    from kernels.rows import Gradient
    from kernels.settings import Settings
    from kernels.tokens import Tokens
    from kernels.triton import fused, rows, scale, split, terms

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def logits_buffer(vocabulary: int) -> torch.Tensor:
        weight = new(vocabulary, 8, dtype=torch.bfloat16)
        head = LMHead(weight, weight.shape, cast(Any, None), "triton", torch.float32, Settings(), 0, ROWS)
        return head.logits_buffer(weight, ROWS)

    row, y = new(ROWS), new(ROWS, dtype=torch.int64)
    t = Tokens(y, row, row, row, row, row, None)
    found: list[tuple[str, Any]] = []
    for vocabulary, cap in [
        (151936, 0.0), (151936, 30.0), (128257, 0.0), (50257, 0.0), (1000, 30.0), (1, 0.0),
    ]:  # fmt: skip
        z, b = logits_buffer(vocabulary), row if cap else None
        name = f"V={vocabulary} cap={cap}"
        found.append((name, lambda z=z, cap=cap: rows.row_stats(z, y, row, cap)))
        wide = vocabulary > 1000
        for dtype in (torch.bfloat16, torch.float32, torch.float16) if wide else (torch.bfloat16,):
            g = Gradient(row, row, b, b, row)
            run = lambda z=z, cap=cap, g=g, d=dtype: rows.row_grads(z, y, row, cap, g, d)  # noqa: E731
            found.append((f"{name} {short(dtype)}", run))
        if not cap:
            found.append((name, lambda z=z: rows.single_pass(z, y, row, row)))
    for dtype in (torch.bfloat16, torch.float32):
        found.append(
            (f"scale {short(dtype)}", lambda d=dtype: scale.scale_(new(ROWS, WIDTH, dtype=d), row[0]))
        )
    found.append(("parts=3", lambda: split.split_16(new(ROWS, WIDTH), 3)))
    found.append(("parts=2 fp16", lambda: split.split_16(new(ROWS, WIDTH), 2, torch.float16)))
    for dtype, parts, width, vocabulary in [
        (torch.bfloat16, 1, WIDTH, 151936),
        (torch.bfloat16, 3, WIDTH, 151936),
        (torch.bfloat16, 1, 4001, 50257),  # not aligned
        (torch.float32, 1, WIDTH, 151936),
        (torch.float32, 1, 4001, 50257),
        (torch.bfloat16, 1, WIDTH, 256),  # one column tile
        (torch.bfloat16, 1, 1, 1),
        (torch.float16, 1, WIDTH, 151936),
        (torch.float16, 1, 4001, 50257),
    ]:
        h, weight = new(ROWS, width, dtype=dtype), new(vocabulary, parts * width, dtype=dtype)
        name = f"{str(dtype)[6:]} parts={parts} H={width} V={vocabulary}"
        found.append((f"score {name}", lambda h=h, w=weight: fused.score(h, w, y, row, 0.0)))
        if parts == 1 and (vocabulary == 151936 or name.startswith("bfloat16 parts=1 H=4001")):
            found.append((f"score {name} cap", lambda h=h, w=weight: fused.score(h, w, y, row, 30.0)))
        if parts == 1:
            found.append((f"logits {name}", lambda h=h, w=weight: fused.logits(h, w, new(ROWS, len(w)))))
        if dtype == torch.bfloat16:
            found.append((f"fused {name}", lambda h=h, w=weight: fused.fused_epilogue(h, w, y, row, row)))
    branches = {x.triton: Settings(x.make()) for x in OBJECTIVES.values() if x.triton}
    penalised = [Settings(DualClip(), KL(0.1, estimator), 0.1) for estimator in ("k1", "k2", "k3")]
    for s in [*branches.values(), *penalised]:  # the penalty is added to any objective's term
        run = lambda s=s: terms.terms(new(4, ROWS), t, s, [row] * 5)  # noqa: E731
        found.append((f"{s.objective} {s.kl}", run))
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
            train(rms_norm.RMSNorm.apply(h, None, weight, 1e-6, dtype))
        else:
            train(rms_norm.RMSNorm.apply(h, new(rows, width, dtype=residual), weight, 1e-6, dtype))

    def rotate(tokens: int, heads: int, width: int, x: torch.dtype, normed: bool) -> None:
        table, positions = new(40960, width // 2), new(tokens, dtype=torch.int64)
        weight = new(width) if normed else None
        x = new(tokens, heads, width, dtype=x)
        train(rope.NormRoPE.apply(x, weight, table, table, positions, 1e-6, torch.bfloat16))

    def gated(rows: int, width: int, dtype: torch.dtype) -> None:
        packed = new(rows, 2 * width, dtype=dtype)
        train(swiglu.SwiGLU.apply(*packed.chunk(2, 1), torch.bfloat16))

    calls = [
        *((norm, c) for c in [
            (ROWS, 4096, bf16, None, bf16), (ROWS, 8192, bf16, fp32, bf16), (1, 1, fp32, None, bf16),
        ]),
        *((rotate, c) for c in [
            (ROWS, 32, 128, bf16, True), (ROWS, 3, 512, fp32, True), (1, 1, 2, bf16, False),
        ]),
        (gated, (ROWS, 12288, bf16)),
    ]  # fmt: skip
    return [(" ".join(map(str, c)), lambda call=call, c=c: call(*c)) for call, c in calls]


def compiled(
    triton: Any, kernel: Any, arguments: dict[str, Any], options: dict[str, Any], capability: int
) -> dict[str, Any]:
    """The machine code of a kernel as it would be specialised for these arguments."""
    from triton.backends.compiler import GPUTarget

    source = specialised(kernel, arguments)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    dump = disassembled(Path(triton.__file__).parent / "backends/nvidia/bin", code.asm["cubin"])
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", dump, re.M)
    count = {
        name: sum(m.split(".")[0] == name for m in mnemonics)
        for name in ("STL", "LDL", "HGMMA", "HMMA", "UTCHMMA", "FFMA", "UTMALDG", "UTMASTG")
    }
    order = [m for m in mnemonics if m.split(".")[0] in ("LDG", "STG", "BAR", "BRA")]
    epilogue = 0.0
    if arguments.get("TMA") and arguments["EPILOGUE"].value:
        logits = arguments["ROWS"] * arguments["COLUMNS"] // (32 * options["num_warps"])
        epilogue = instructions_outside_products(dump, PRODUCT[capability]) / logits
    logit = 0.0  # the instructions of a row kernel for each, in a row's main loop
    if kernel.fn.__name__ in ("_row_stats", "_row_grads", "_single_pass"):
        logit = instructions_in_loop(dump) * 32 * options["num_warps"] / arguments["BLOCK"]
    registers, stack = (int(re.search(rf"{k}:(\d+)", dump)[1]) for k in ("REG", "STACK"))  # type: ignore[index]
    return count | {
        "instructions": len(mnemonics), "registers": registers, "stack": stack,
        "shared": code.metadata.shared, "wgmma": code.asm["ptx"].count("wgmma.mma_async"), "order": order,
        "loops": loop_accesses(code.asm["ptx"]),
        "epilogue": epilogue, "logit": logit,
        "waits": sum(m.startswith("WARPGROUP.ARRIVE") for m in mnemonics),
    }  # fmt: skip


def refused_ones(
    kernel: Any, arguments: dict[str, Any], options: dict[str, Any], capability: int
) -> dict[str, str]:
    """The error of the compiler's front end for each integer argument that it refuses where its value is 1.

    Triton makes a constant of such an argument, and that lacks a tensor's methods.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target, errors = GPUTarget("cuda", capability, 32), {}
    backend = make_backend(target)
    for parameter in kernel.params:
        if not isinstance(arguments[parameter.name], int) or parameter.is_constexpr:
            continue
        source, context = specialised(kernel, arguments | {parameter.name: 1}), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        parsed = backend.parse_options(options | source.parse_options())
        functions = backend.get_codegen_implementation(parsed)
        try:
            source.make_ir(target, parsed, functions, backend.get_module_map(), context)
        except Exception as error:  # whatever it is, the kernel does not compile
            errors[parameter.name] = repr(error)
    return errors


def loop_accesses(ptx: str) -> list[list[str]]:
    """Of each innermost loop of the PTX that accesses global memory, these loads and stores."""
    lines, labels, found = ptx.splitlines(), {}, []
    for i, line in enumerate(lines):
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label[1]] = i
        elif (jump := re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", line)) and jump[1] in labels:
            body = lines[labels[jump[1]] : i]
            found.append(re.findall(r"\b(ld\.global[\w.]*|st\.global[\w.]*)", "\n".join(body)))
    return [accesses for accesses in found if accesses]


@cache  # half a second, and a fourth of the launches share their code with another
def disassembled(tools: Path, code: bytes) -> str:
    """cuobjdump's disassembly and resource usage of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code)
        cubin.flush()
        command = [tools / "cuobjdump", "-sass", "-res-usage", cubin.name]
        return subprocess.run(command, capture_output=True, text=True).stdout


@cache
def report(capability: int, pattern: str = "") -> dict[str, dict[str, Any]]:
    """The program's output for the cases whose names match."""
    pytest.importorskip("triton")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if not (Path(find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump").exists():  # type: ignore[union-attr,arg-type]
        pytest.skip("this Triton comes without cuobjdump, which disassembles what it compiles")
    root = Path(__file__).parents[2]
    kept["PYTHONPATH"] = os.pathsep.join(
        [str(root), str(root / "tests/helpers"), *filter(None, [kept.get("PYTHONPATH")])]
    )
    command = [sys.executable, __file__, str(capability), pattern]
    run = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, dict[str, Any]] = dict(json.loads(run.stdout.splitlines()[-1]))
    return found


generations = pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=pytest.mark.slow) for c in (80, 90, 100)], ids="sm_{}".format
)


def test_two_kernels_do_not_spill_on_hopper() -> None:
    """The same within seconds, of two kernels."""
    found = report(90, "^(V=1000 cap=30.0|parts=3)$")
    assert {name.split()[0] for name in found} == {"_row_stats", "_split"}
    assert [n for n, code in found.items() if code["STL"] or code["LDL"] or code["stack"]] == []
    assert all(code["instructions"] > 50 and not any(code["refused"].values()) for code in found.values())


@generations
def test_no_kernel_spills_and_each_fits_the_shared_memory(capability: int) -> None:
    found = report(capability)
    assert {name.split()[0] for name in found} == {
        "_row_stats", "_row_grads", "_single_pass", "_terms", "_split", "gemm", "merge", "estimate_anchors",
        "settle", "_rms_norm", "_rms_norm_grads", "_rope", "_rope_grads", "_swiglu", "_swiglu_grads",
        "_scale",
    }  # fmt: skip
    spilled = [n for n, code in found.items() if code["STL"] or code["LDL"] or code["stack"]]
    assert spilled == []
    assert [n for n, code in found.items() if code["shared"] > SHARED_MEMORY[capability]] == []
    assert all(code["instructions"] > 50 for code in found.values())  # the disassembly was read


@pytest.mark.slow
def test_every_integer_argument_may_be_one() -> None:
    found = {name: code["refused"] for name, code in report(90).items() if "refused" in code}
    assert {name.split()[0] for name in found} == {name.split()[0] for name in report(90)}
    assert {name: errors for name, errors in found.items() if errors} == {}


@generations
def test_16_bit_products_use_the_tensor_cores_and_fp32_ones_are_not_rounded(capability: int) -> None:
    unit = PRODUCT[capability]
    for name, code in report(capability).items():
        if name.startswith("gemm"):
            assert bool(code[unit]) == ("float16" in name), name
            copied = "H=4096" in name and "float16" in name and capability >= 90
            assert bool(code["UTMALDG"]) == copied, name
            if "float32" in name:
                assert not code["HMMA"], name  # TF32
            elif capability == 90:
                assert code["wgmma"] and not code["HMMA"], name


@pytest.mark.slow
def test_an_epilogue_is_at_most_10_instructions_a_logit_and_no_product_of_a_step_waits_for_another() -> None:
    """On Hopper. ptxas makes every product wait if the epilogue may read their sum too early."""
    found = report(90)
    measured = {n: code["epilogue"] for n, code in found.items() if code["epilogue"] and "cap" not in n}
    assert len(measured) == 7  # score and fused: W as one or three parts, a single column tile; FP16's score
    assert {n: e for n, e in measured.items() if not 5 < e <= 10} == {}
    assert {n: code["waits"] for n, code in found.items() if code["HGMMA"] and code["waits"] != 1} == {}


@pytest.mark.slow
def test_the_row_statistics_take_at_most_9_instructions_a_logit() -> None:
    """On Hopper. With reductions over all threads in every tile there were 22."""
    found = {n: code["logit"] for n, code in report(90).items() if n.startswith("_row_stats")}
    found = {n: logit for n, logit in found.items() if "cap=0.0" in n and " V=1 " not in n}
    assert len(found) == 3 and {n: logit for n, logit in found.items() if not 5 < logit <= 9} == {}


@pytest.mark.slow
def test_the_account_counts_what_was_compiled() -> None:
    from bench.kernels.account import INSTRUCTIONS

    found = report(90)
    row = "V=151936 cap=0.0"
    counted = {
        "row_stats": found[f"_row_stats {row}"]["logit"],
        "row_grads": found[f"_row_grads {row} bf16"]["logit"],
        "single_pass": found[f"_single_pass {row}"]["logit"],
        "score": found["gemm score bfloat16 parts=1 H=4096 V=151936"]["epilogue"],
        "fused_epilogue": found["gemm fused bfloat16 parts=1 H=4096 V=151936"]["epilogue"],
    }
    assert counted == pytest.approx(INSTRUCTIONS, rel=0.15)  # supported releases of Triton differ


@generations
@pytest.mark.parametrize("vocabulary", [50257, 128257])
def test_odd_vocabularies_rows_are_read_and_written_16_bytes_at_a_time(
    vocabulary: int, capability: int
) -> None:
    found = {n: code["loops"] for n, code in report(capability).items() if f" V={vocabulary} " in n}
    found = {name: loops for name, loops in found.items() if name.startswith("_")}
    assert len(found) == 5
    for name, loops in found.items():
        wide = [accesses for accesses in loops if all(".v4.b32" in x or ".v8." in x for x in accesses)]
        assert wide and len(wide) * 2 >= len(loops), (name, loops)


@generations
def test_16_bit_results_wait_for_all_reads_of_their_tile(capability: int) -> None:
    for name, code in report(capability).items():
        if name.startswith("_row_grads") and "fp32" not in name:
            order = [mnemonic.split(".")[0] for mnemonic in code["order"]]
            stores = order.index("STG")
            reads = stores - 1 - order[:stores][::-1].index("LDG")
            assert "BAR" in order[reads:stores], name


if __name__ == "__main__":
    print(json.dumps(launches(int(sys.argv[1]), sys.argv[2])))
