"""The HTTP side: a page, and JSON that it asks for. Only with the token, from this machine, and reading.

No path of a request reaches the file system: runs are numbers, groups are numbers in an index.
"""

import asyncio
import logging
import os
import secrets
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from trainer.config import ConfigError
from trainer.view.page import live_page, note
from trainer.view.rollouts import ORDERS, NoGroupError, Query
from trainer.view.state import RunState
from trainer.view.tokens import group_view

READ_S = 0.05  # of the journal at once, between requests
LOOK_S = 1.0  # between looks for something new
REPORT_S, REPORT_SHARE = 10.0, 0.02  # least time between two drawings, and largest share of a core for them
PACKAGES = Path(__file__).parents[2]  # the folder of `trainer` and `kernels`
LAST = 19  # the priority of later drawings: after everything else
ROWS = 50  # of the table in one answer
HEADERS = {
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "X-Frame-Options": "SAMEORIGIN", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip
INTERRUPTED = {"": None, "1": True, "0": False}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class View:
    """Serves some runs to a browser that brings the token."""

    def __init__(self, runs: Sequence[RunState], token: str, port: int) -> None:
        self.runs, self.token, self.port = runs, token, port
        self.cookie = f"sigmoid-rl-{port}"  # cookies do not know ports
        # The report, how many there were, the steps and evaluations in it, and when it may be drawn again.
        self._report, self._reports, self._size, self._due = "", 0, 0, 0.0
        self._drawing: asyncio.Task[None] | None = None
        self._painter: Process | None = None

    def application(self) -> web.Application:
        """The routes, behind the token."""
        application = web.Application(middlewares=[self._guard])
        routes = {"/": self._page, "/api/runs": self._runs, "/api/groups": self._groups,
                  "/api/group": self._group, "/report": self._curve}  # fmt: skip
        application.add_routes([web.get(path, handler) for path, handler in routes.items()])
        return application

    async def follow(self) -> None:
        """Read what the runs write, a little at a time, for ever."""
        self._draw_if_due()
        try:
            while True:
                done = [await self._read(run) for run in self.runs]
                await asyncio.sleep(LOOK_S if all(done) else 0.005)
        finally:
            with suppress(ProcessLookupError):
                if self._painter:
                    self._painter.kill()
            if self._drawing:
                await self._drawing

    async def _read(self, run: RunState) -> bool:
        return await asyncio.to_thread(run.rollouts.update, READ_S)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what has no token, or comes by another name (DNS rebinding)."""
        answer = await self._answer(request, handler)
        answer.headers.update(HEADERS)
        return answer

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.host not in (f"127.0.0.1:{self.port}", f"localhost:{self.port}"):
            return _refuse(403, f"expected 127.0.0.1:{self.port} as the host")
        asked, known = request.query.get("token", ""), request.cookies.get(self.cookie, "")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not any(secrets.compare_digest(_bytes(self.token), _bytes(x)) for x in (asked, known, bearer)):
            text = "the token is missing or wrong; open the address that `sigmoid-rl view` printed"
            return _refuse(403, text)
        if asked:  # out of the address, into a cookie; the part after # stays
            answer = web.Response(status=303, headers={"Location": "/"})
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict")
            return answer
        try:
            return await handler(request)
        except web.HTTPException as e:
            return _refuse(e.status, e.reason)
        except (ConfigError, NoGroupError, ValueError) as e:
            return _refuse(400, str(e))
        except Exception as e:  # a fault of this program; its traceback is for the terminal
            logging.getLogger(__name__).exception("no answer to %s", request.path)
            return _refuse(500, f"{type(e).__name__}: {e}")

    async def _page(self, request: web.Request) -> web.Response:
        text, policy = live_page()
        headers = {"Content-Security-Policy": policy}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _runs(self, request: web.Request) -> web.Response:
        for run in self.runs:
            run.update()
        if "curve" in request.query:  # it is looked at
            self._draw_if_due()
        return web.json_response({"runs": [run.view() for run in self.runs], "reports": self._reports})

    async def _groups(self, request: web.Request) -> web.Response:
        run, query = self._run(request), query_of(request.query)
        page = await asyncio.to_thread(run.rollouts.page, query, _number(request, "start"), ROWS)
        return web.json_response(page)

    async def _group(self, request: web.Request) -> web.Response:
        run, only = self._run(request), request.query.get("rollout")
        entry, record, learned = run.rollouts.record(_number(request, "id"))
        number = None if only is None else _number(request, "rollout")
        if number is not None and number >= len(entry.lengths):
            raise NoGroupError(f"group {entry.group_id} has {len(entry.lengths)} rollouts, from 0")
        start = _number(request, "start")
        view = await asyncio.to_thread(group_view, run.folder, entry, record, learned, start, number)
        return web.json_response(view)

    async def _curve(self, request: web.Request) -> web.Response:
        """The newest report: the curve and all charts."""
        self._draw_if_due()
        if not self._report and self._drawing:
            await asyncio.shield(self._drawing)
        return web.Response(text=self._report, content_type="text/html")

    def _draw_if_due(self) -> None:
        """Draw the report anew once something has come and some time has passed."""
        for run in self.runs:
            run.update()
        size = sum(run.step + run.evaluations for run in self.runs)
        idle = self._drawing is None or self._drawing.done()
        if idle and (not self._report or (size != self._size and time.monotonic() > self._due)):
            self._size, self._drawing = size, asyncio.create_task(self._draw())

    async def _draw(self) -> None:
        """Draw the report in a process of its own, so that no answer waits for the fits."""
        began, folders = time.monotonic(), [str(run.folder) for run in self.runs]
        # -P and the package's own folder: a folder `trainer` where the user looks at runs is not imported.
        command = sys.executable, "-P", "-m", "trainer.view.page", *folders
        path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        self._painter = await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, env=environment, start_new_session=True
        )
        if self._reports:  # nobody waits for it
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._painter.pid, LAST)
        text, _ = await self._painter.communicate()
        if not text:  # an older curve stays, and it is tried again
            self._size = -1
            why = f"The curve could not be drawn (exit code {self._painter.returncode}); it is tried again."
            text = self._report.encode() or note(why).encode()
        self._report, self._reports = text.decode(), self._reports + 1
        now = time.monotonic()
        self._due = now + max(REPORT_S, (now - began) / REPORT_SHARE)

    def _run(self, request: web.Request) -> RunState:
        number = _number(request, "run")
        if number >= len(self.runs):
            raise NoGroupError(f"there are {len(self.runs)} runs, from 0")
        return self.runs[number]


def query_of(values: Any) -> Query:
    """The filters in an address; ValueError for one that cannot be read."""

    def number(name: str) -> float | None:
        raw = values.get(name, "")
        return float(raw) if raw else None

    bounds = {f"{x}s": (number(f"{x}_min"), number(f"{x}_max")) for x in ("reward", "length", "advantage")}
    bounds = {column: ends for column, ends in bounds.items() if ends != (None, None)}
    first, _, last = values.get("step", "").replace("–", "-").partition("-")
    steps = (int(first), int(last or first)) if first.strip() else None
    if (order := values.get("order") or "newest") not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}")
    if (asked := values.get("interrupted", "")) not in INTERRUPTED:
        raise ValueError(f"interrupted: expected 1 or 0, given {asked[:40]!r}")
    return Query(
        task=values.get("task", ""), steps=steps, outcome=values.get("outcome", ""), order=order,
        interrupted=INTERRUPTED[asked], text=values.get("text", ""), bounds=bounds,
    )  # fmt: skip


def _number(request: web.Request, name: str) -> int:
    raw = request.query.get(name, "0")
    if not raw.isascii() or not raw.isdecimal() or len(raw) > 12:
        raise ValueError(f"{name}: expected a number from 0, given {raw[:40]!r}")
    return int(raw)


def _bytes(text: str) -> bytes:
    """UTF-8, and the bytes of a header that were none: aiohttp has those as surrogates."""
    return text.encode(errors="surrogateescape")


def _refuse(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


async def serve(view: View, listener: socket.socket) -> None:
    """Serve until the task is cancelled."""
    runner = web.AppRunner(view.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    try:
        await view.follow()
    finally:
        await runner.cleanup()
