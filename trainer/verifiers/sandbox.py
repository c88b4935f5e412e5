"""The sandbox of a worker, which may execute a model's text: it can compute and reply, nothing else.

Three layers, none of which needs root:
- limits on address space, CPU time and open files; no file writes, no core dump;
- an audit hook: Python refuses to write files, start processes, open sockets, load libraries;
- on Linux (x86-64, arm64) a seccomp filter: the kernel refuses the same calls from native code, too.

Not covered: files stay readable (so make secrets unreadable for the user who trains; the environment is
empty), and text that an own function executes in the scorer's process can forge its own verdict. Outside
Linux there is no seccomp filter, and native code can bypass the audit hook.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

MEMORY = 2 << 30  # bytes, on top of the process after its imports
_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.add_dll_directory"}
_REFUSED = ("os.", "socket.", "subprocess.", "ctypes.", "shutil.", "resource.", "signal.", "pty.", "fcntl.")

# Linux system calls by number: (AUDIT_ARCH, open, openat) and the refused ones, in this order: sockets;
# clone, fork, exec; signals; ptrace, other processes' memory, pidfd; io_uring, memfd, openat2; names, modes
# and attributes of files; shared memory and queues; mounts, namespaces, keys, bpf, limits.
_CALLS: dict[str, tuple[tuple[int, int | None, int], str]] = {
    "x86_64": (
        (0xC000003E, 2, 257),
        """41 42 49 53 56 57 58 435 59 322 62 129 200 234 297 101 310 311 424 434 438 425 426 427 319 437
        85 76 77 82 264 316 83 258 84 86 265 87 263 88 266 133 259 90 91 268 452 92 93 94 260
        132 235 280 261 188 189 190 197 198 199 29 68 240 165 166 272 308 161 155 321 250 248
        249 160 302 298 323 304""",
    ),
    "aarch64": (
        (0xC00000B7, None, 56),
        """198 203 200 199 220 435 221 281 129 138 130 131 240 117 270 271 424 434 438 425 426 427 279 437
        45 46 38 276 34 37 35 36 33 52 53 452 54 55 88 5 6 7 14 15 16 194 186 180 40 39 97 268
        51 41 280 219 217 218 164 261 241 282 265""",
    ),
}


def limit(cpu_seconds: int) -> None:
    """Limit memory, CPU time and files of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    if sys.platform == "linux":  # other systems do not enforce it, or count shared libraries
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def lock_down() -> None:
    """Refuse writes, processes and sockets from now on; this process cannot undo it."""
    sys.dont_write_bytecode = True
    if sys.platform == "linux":
        _seccomp()
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        written = isinstance(mode, str) and any(c in mode for c in "wax+")
        if written or (isinstance(flags, int) and flags & _WRITE):
            raise PermissionError("the sandbox permits no written files")
    elif event.startswith(_REFUSED) and event not in _READING:
        raise PermissionError(f"the sandbox does not permit {event}")


def _seccomp() -> None:
    """Install the filter if the machine is known; a container may forbid it, which leaves the hook."""
    if platform.machine() not in _CALLS:
        return
    (arch, open_call, openat_call), refused = _CALLS[platform.machine()]

    def op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
        return struct.pack("HBBI", code, jt, jf, k)

    load, equal, at_least, any_bit, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    program = [op(load, 4), op(equal, arch, 1, 0), op(ret, kill), op(load, 0)]
    if platform.machine() == "x86_64":  # x32 numbers, which the list below does not cover
        program += [op(at_least, 0x40000000, 0, 1), op(ret, refuse)]
    for number in map(int, refused.split()):
        program += [op(equal, number, 0, 1), op(ret, refuse)]
    for call, argument in ((open_call, 1), (openat_call, 2)):
        if call is not None:
            program += [op(equal, call, 0, 4), op(load, 16 + 8 * argument), op(any_bit, _WRITE, 0, 1)]
            program += [op(ret, refuse), op(ret, allow)]
    program.append(op(ret, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    fprog = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(22, 2, ctypes.c_char_p(fprog), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
