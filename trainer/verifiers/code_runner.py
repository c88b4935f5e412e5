"""The project's only file in the sandbox of kind `code`: `code_runner.py PACKAGES FD` tests a program.

This process, the tester, never executes the program: it forks processes that do, before it knows what they
may not see. For standard input there is one for each test; its output is sent out on socket FD. Calls and
asserts have one: what the program defines is a Remote here, its operations are executed there, and results
are JSON. So a program can claim nothing: expected values stay outside, and asserts are out of its reach.
"""

import atexit
import builtins
import ctypes
import json
import operator
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MAX_RESULT = 4 << 20  # characters of JSON, of what a function returns
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__call__": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "__getattr__": getattr,
    "__getitem__": operator.getitem,
    "__eq__": operator.eq,
    "__iter__": list,
    "__len__": len,
}
_KINDS: dict[str, Any] = {f"__{k.__name__}__": k for k in (tuple, set, frozenset, bytes, bytearray, dict)}
_objects: list[Any] = []  # in the program's process: what it has returned that is not plain data


class Channel:
    """Messages in both directions, each a line of JSON. ValueError on a line that is none, or too long."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = os.fdopen(source, "rb"), os.fdopen(target, "wb", closefd=False)

    def receive(self, limit: int = -1) -> Any:
        return json.loads(self._source.readline(limit))

    def send(self, value: Any) -> None:
        self._target.write(json.dumps(value).encode() + b"\n")
        self._target.flush()


def encode(value: Any, number: Callable[[Any], Any]) -> Any:
    """The value for JSON: plain data are copied, of any other object its number is given."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(v, number) for v in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: encode(v, number) for key, v in value.items()}
    if isinstance(value, complex):
        return {"__complex__": [value.real, value.imag]}
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(v, number) for v in (value.items() if kind is dict else value)]}
    return {"__object__": number(value)}


def decode(value: Any, get_object: Callable[[Any], Any]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v, get_object) for v in value]
    if not isinstance(value, dict):
        return value
    name, content = next(iter(value.items()), ("", []))
    if name == "__object__":
        return get_object(content)
    if name == "__complex__":
        return complex(*content)
    if name in _KINDS:
        return _KINDS[name]([decode(v, get_object) for v in content])
    return {key: decode(v, get_object) for key, v in value.items()}


def _fork_program(request: dict[str, Any], stdin: int, stdout: int, ends: tuple[int, ...] = ()) -> int:
    """Fork a process that executes the program under its limits; its id. `ends`: of pipes, for calls."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        for target, fd in enumerate((stdin, stdout, os.open(os.devnull, os.O_RDWR))):
            os.dup2(fd, target)
        for start, stop in zip((2, *ends), (*ends, 256), strict=True):
            os.closerange(start + 1, stop)  # the tester's socket above all
        if uid := request["uid"]:  # of root's programs, since the kernel does not limit root's processes
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        for name, most in request["limits"].items():
            resource.setrlimit(getattr(resource, name), (most, most + (name == "RLIMIT_CPU")))
        _execute(request["program"], ends)
        code = 0
    finally:  # without the interpreter's clean-up, which would take half of the time
        os._exit(code)


def _execute(source: str, ends: tuple[int, ...]) -> None:
    """Execute the program as Python does, to its end; in the program's process."""
    module = type(sys)("program" if ends else "__main__")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except SystemExit as e:
        if e.code:
            raise
    if ends:
        _answer_calls(module.__dict__, Channel(*ends))
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    module.__dict__.clear()  # closes its files
    sys.stdout.flush()


def _answer_calls(names: dict[str, Any], tester: Channel) -> None:
    """Execute the tester's operations until it ends; in the program's process."""

    def number(value: Any) -> int:
        _objects.append(value)
        return len(_objects) - 1

    def lookup(name: str) -> Any:
        return names[name] if name in names else getattr(names["Solution"](), name)  # LeetCode's class

    while True:
        operation, arguments, keywords = decode(tester.receive(), _objects.__getitem__)
        try:
            result = (_OPERATIONS | {"lookup": lookup})[operation](*arguments, **keywords)
            reply = {"result": encode(result, number)}
        except Exception as e:
            reply = {"raised": [kind.__name__ for kind in type(e).__mro__]}
        tester.send(reply)


class Remote:
    """An object of the program's process, in the tester: its operations are executed there."""

    def __init__(self, program: "Program", number: int) -> None:
        self.__dict__.update(program=program, number=number)


def _remote(name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any, **keywords: Any) -> Any:
        if name == "__eq__" and not isinstance(arguments[0], Remote):
            return False  # no object of the program may claim to equal a test's data
        result = self.__dict__["program"].ask(name, self, *arguments, **keywords)
        return iter(result) if name == "__iter__" else result

    return method


for _name in _OPERATIONS:
    setattr(Remote, _name, _remote(_name))


class Program(dict[str, Any]):
    """A process with the program, and the built-in names of its tests: Python's own, modules of the standard
    library, then the program's. What the tests define themselves comes before all of these."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(vars(builtins))
        self.tests = ""
        (requests, ours), (source, replies) = os.pipe(), os.pipe()
        _fork_program(request, os.memfd_create("in"), os.memfd_create("out"), (requests, replies))
        os.close(requests)
        os.close(replies)
        self._channel = Channel(source, ours)

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """The result of an operation in the program's process, or its exception if that is a built-in one."""
        self._channel.send(encode((operation, arguments, keywords), lambda value: value.__dict__["number"]))
        reply = self._channel.receive(MAX_RESULT)
        for name in reply.get("raised", ()):
            error = getattr(builtins, name, None)
            if isinstance(error, type) and issubclass(error, Exception):
                raise error("raised by the program")
        return decode(reply["result"], lambda number: Remote(self, number))

    def __missing__(self, name: str) -> Any:
        used = name in sys.stdlib_module_names and re.search(rf"\b{name}\s*\.", self.tests)  # as a module
        return __import__(name) if used else self.ask("lookup", name)

    def test(self, test: dict[str, Any], most: int) -> tuple[str, Any]:
        """Call the program, or execute asserts, where its `entry` replaces what the first code defined; the
        result must be JSON, and no longer than any that can be right."""
        if "call" in test:
            result = self.ask("lookup", test["call"])(*test["arguments"])
            return ("ended", result) if len(json.dumps(result)) <= most else ("failed", "")
        self.tests = "\n".join(test["code"])
        scope: dict[str, Any] = {"__name__": "tests", "__builtins__": self}
        for code in test["code"]:
            exec(compile(code, "tests.py", "exec"), scope)
            scope |= {name: self.ask("lookup", name) for name in test["entry"]}
        return "ended", True


def _run(request: dict[str, Any], text: str, most: int) -> tuple[str, str]:
    """Outcome (`ended`, `failed`, `timeout`) and the first bytes of output of the program on this input."""
    stdin, stdout = os.memfd_create("in"), os.memfd_create("out")
    with open(os.dup(stdin), "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    _, status = os.waitpid(_fork_program(request, stdin, stdout), 0)
    try:
        while os.getpid() == 1:  # in a namespace of its own: end what the program left behind
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    output = os.pread(stdout, most, 0).decode(errors="replace")
    os.close(stdin)
    os.close(stdout)
    outcomes = {0: "ended", -signal.SIGXCPU: "timeout"}
    return outcomes.get(os.waitstatus_to_exitcode(status), "failed"), output


def main(packages: str, fd: int) -> None:
    """Serve one program and its tests, until the socket closes."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no program may trace this process
    sys.path.append(packages)
    sys.set_int_max_str_digits(0)
    host = Channel(fd, fd)
    request = host.receive()
    program = Program(request) if request["calls"] else None
    host.send("ready")
    while test := host.receive():
        try:
            host.send(program.test(*test) if program else _run(request, *test))
        except BaseException:  # an assertion, an exception or the end of the program, a reply that is none
            host.send(["failed", ""])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
