"""Triton kernels compiled for a GPU without one, and run on the CPU from their PTX."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from ptx import GLOBAL, PARAMETERS, Kernel, parse
from ptx_memory import Memory
from ptx_steps import program
from ptx_tasks import TensorMap

WAITS = (
    "bar.", "mbarrier.try_wait", "wgmma.wait_group", "cp.async.wait_group", "cp.async.bulk.wait_group",
    "fence.proxy.async",
)  # fmt: skip
"""How the opcodes of synchronising instructions begin."""


def specialised(kernel: Any, arguments: dict[str, Any]) -> Any:
    """The compiler's input: the kernel with the types and known values of these arguments."""
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        signature[parameter.name], aligned = described(value, parameter)
        if signature[parameter.name] == "constexpr":
            constants[(i,)] = value
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def described(value: Any, parameter: Any) -> tuple[str, bool]:
    """(Triton's type of an argument, whether the compiler may assume that 16 divides it)."""
    if parameter.is_constexpr:
        return "constexpr", False
    if hasattr(value, "block_shape"):
        return f"tensordesc<{short(value.base.dtype)}{list(value.block_shape)}>", False
    if isinstance(value, torch.Tensor):
        return f"*{short(value.dtype)}", value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr", False
    return ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0 and not parameter.do_not_specialize


def short(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64"}
    return names[dtype]


def ptx(source: Any, options: dict[str, Any], capability: int) -> tuple[str, dict[str, Any]]:
    """(PTX, what the compiler says of it) of a specialised kernel; the assembler is not run."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target, context = GPUTarget("cuda", capability, 32), ir.context()
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    metadata = dict(parsed.__dict__, target=target)
    for name in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[name](module, metadata)
    return module, metadata


@dataclass(slots=True)
class Machine:
    """A GPU of NumPy: launches of kernels on CPU tensors, each under `seed`'s schedule."""

    capability: int = 90
    seed: int = 0
    races: bool = True
    removed: tuple[str, tuple[int, ...]] | None = None
    """A kernel, and the places in its code of instructions that are left out."""
    compiled: dict[Any, tuple[str, Kernel, dict[str, Any]]] = field(default_factory=dict)
    passed: dict[str, set[int]] = field(default_factory=dict)
    """What WAITS names of each kernel that a warp came to."""
    barriers: dict[str, dict[int, str]] = field(default_factory=dict)
    """Place and opcode of all that WAITS names, of each kernel that was launched."""

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        """In place of JITFunction.run."""
        bound = dict(zip(kernel.arg_names, args, strict=False))
        bound |= {k: options.pop(k) for k in list(options) if k in kernel.arg_names}
        source = specialised(kernel, bound)
        key = source.hash(), str(sorted(options.items()))
        if key not in self.compiled:
            text, metadata = ptx(source, options, self.capability)
            name = f"{kernel.fn.__name__} {sha256(text.encode()).hexdigest()[:8]}"
            self.compiled[key] = name, parse(text), metadata
        name, parsed, metadata = self.compiled[key]
        self.barriers[name] = {at: parsed.code[at].opcode for at in parsed.places(*WAITS)}
        removed = self.removed[1] if self.removed and self.removed[0] == name else ()
        values = [bound[n] for n, kind in source.signature.items() if kind != "constexpr"]
        tensors = [x.base if hasattr(x, "base") else x for x in values]
        with memory_of([x for x in tensors if isinstance(x, torch.Tensor)], self.races) as (memory, places):
            arguments, maps = packed(parsed, values, places, metadata.get("tensordesc_meta") or [])
            ready = program(parsed, metadata["shared"], removed, maps)
            ready.run((*grid, 1, 1)[:3], arguments, memory, self.seed, self.races)
        if not removed:
            self.passed.setdefault(name, set()).update(ready.passed & self.barriers[name].keys())


def packed(
    kernel: Kernel, values: list[Any], places: dict[int, int], descriptors: list[dict[str, Any]]
) -> tuple[bytes, dict[int, TensorMap]]:
    """The kernel's arguments as it reads them, and the matrices of the TMA descriptors among them.

    The last two parameters, Triton's scratch memory, are not used.
    """

    def address(x: torch.Tensor) -> int:
        storage = x.untyped_storage().data_ptr()
        return GLOBAL + places[storage] + x.data_ptr() - storage if x.numel() else 0

    packed, maps, rest = bytearray(kernel.parameter_bytes), {}, iter(kernel.parameters.values())
    metas = iter(descriptors)
    for value in values:
        numbers = [value]
        if hasattr(value, "block_shape"):
            (offset, _), meta, size = next(rest), next(metas), value.base.element_size()
            rows, box = tuple(value.shape), tuple(meta["block_size"])
            stride = value.strides[0] * size
            maps[PARAMETERS + offset] = TensorMap(
                address(value.base), rows, stride, box, size, meta["swizzle"]
            )
            numbers = [*value.shape, *value.strides]
        for x in numbers:
            offset, size = next(rest)
            x = address(x) if isinstance(x, torch.Tensor) else x
            struct.pack_into("<f" if isinstance(x, float) else {4: "<i", 8: "<q"}[size], packed, offset, x)
    return bytes(packed), maps


@contextmanager
def memory_of(tensors: list[torch.Tensor], races: bool) -> Iterator[tuple[Memory, dict[int, int]]]:
    """Memory with the storages of CPU tensors, and where each is; what was written there comes back."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
    contents = {at: torch.empty(0, dtype=torch.uint8).set_(s).numpy() for at, s in storages.items()}
    places, size = {}, 256
    for at, content in contents.items():
        places[at] = size + at % 256
        size += (len(content) + 255) // 256 * 256 + 512
    memory = Memory(size, GLOBAL, None, races)
    for at, content in contents.items():
        memory.bytes[places[at] : places[at] + len(content)] = content
        memory.valid[places[at] : places[at] + len(content)] = True
    yield memory, places
    for at, content in contents.items():
        content[:] = memory.bytes[places[at] : places[at] + len(content)]
