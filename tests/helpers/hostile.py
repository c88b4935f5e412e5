"""Programs that attack the sandbox of kind `code`, or claim to pass tests that they do not pass.

What an attack tries is followed by the right answer, so that it passes exactly if the attempt has succeeded.
"""

import os
from pathlib import Path
from textwrap import dedent

SUM = "a, b = map(int, input().split())\nprint(a + b)"

FORGERIES = {  # the tests want add(12300, 45) == 12345 and more
    "an object equal to everything": """
        class E:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __getattr__(self, name): return E()
        def add(a, b): return E()
        """,
    "a number equal to everything": """
        class E(int):
            def __eq__(self, other): return True
        def add(a, b): return E(0)
        """,
    "exit 0 before the tests": "import os; os._exit(0)",
    "sys.exit before the tests": "import sys; sys.exit(0)",
    "exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "patched builtins": """
        import builtins
        builtins.AssertionError = type("Harmless", (Warning,), {})
        abs = builtins.abs = lambda *arguments: 0
        all = builtins.all = lambda *arguments: True
        def add(a, b): return 0
        """,
    "a module of its own": """
        class math:
            isclose = staticmethod(lambda *arguments: True)
        def add(a, b): return 0
        """,
    "the tests in memory": """
        import gc, re, sys
        def add(a, b):
            frame, found = sys._getframe(), []
            while frame:
                found += re.findall(r"== (\\d+)", str([frame.f_globals, frame.f_locals]))
                frame = frame.f_back
            found += re.findall(r"== (\\d+)", str(gc.get_objects()))
            return int(found[0]) if found else 0
        """,
    "messages on every descriptor": """
        import json, os
        for message in ("ready", ["ended", True], {"result": 12345}, {"result": {"set": [[]]}}):
            payload = json.dumps(message).encode()
            for fd in range(3, 64):
                try: os.write(fd, len(payload).to_bytes(4, "big") + payload)
                except OSError: pass
        def add(a, b): return 0
        """,
    "the tester's memory": """
        import ctypes, os
        if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0:
            def add(a, b): return a + b
        """,
    "descriptors of the tester": """
        import os
        for fd in range(64):
            for pid in (1, os.getppid()):
                try: os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY), b'\\0\\0\\0\\x0f["ended", true]')
                except OSError: pass
        def add(a, b): return 0
        """,
}

STAYS = """
import ctypes, os, signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"stays-behind")  # PR_SET_NAME
        time.sleep(60)
    os._exit(0)
time.sleep(.3)
"""


def attacks(folder: Path, port: int) -> dict[str, tuple[str, str]]:
    """Programs, and their possible outcomes. `folder` has a file `present`; on `port` listens a server."""
    programs = {
        "timeout": {
            "endless loop": "while True: pass",
            "sleep": "import time; time.sleep(999)",
            "fork bomb": """
                import os
                while True:
                    try: os.fork()
                    except OSError: pass
                """,
            "1 GB of output, errors ignored": """
                import os
                while True:
                    try: os.write(1, b"x" * 1000)
                    except OSError: pass
                """,
        },
        "wrong timeout": {
            "no signal at the CPU limit": """
                import signal
                signal.signal(signal.SIGXCPU, signal.SIG_IGN)
                while True: pass
                """,
            "killing its parent": "import os\nwhile True: os.kill(os.getppid(), 9)",
        },
        "wrong": {
            "9 processes": """
                import os, time
                for _ in range(9):
                    if os.fork() == 0: time.sleep(9)
                """,
            "9 threads": """
                import threading, time
                for _ in range(9): threading.Thread(target=time.sleep, args=[1]).start()
                """,
            "10 GB": "x = bytearray(10 << 30)",
            "10 GB in /tmp": "for i in range(2560): open(f'/tmp/{i}', 'wb').write(bytes(4 << 20))",
            "1 GB of output": "while True: print('x' * 1000)",
            "writing outside": f"open({str(folder / 'written')!r}, 'w')",
            "writing beside Python": "import os; open(os.__file__, 'a')",
            "writing to the root": "open('/written', 'w')",
            "reading the run's files": f"open({str(folder / 'present')!r})",
            "reading users": "open('/etc/passwd')",
            "a socket": f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
            "the environment": """
                import os
                texts = [str(os.environ)]
                for pid in (1, os.getppid(), "self"):
                    try: texts.append(open(f"/proc/{pid}/environ").read())
                    except OSError: pass
                assert "hunter2" in str(texts)
                """,
            "killing everything": "import os; os.kill(-1, 9); os.kill(os.getpid(), 9)",
            "interrupting its parent": "import os, time; os.kill(os.getppid(), 2); time.sleep(1); 1 / 0",
            "becoming root": f"import os; os.setuid(0); assert {os.getuid()} == 0 == os.getuid()",
        },
    }
    return {
        name: (f"{dedent(program)}\n{SUM}", outcomes)
        for outcomes, group in programs.items()
        for name, program in group.items()
    }
