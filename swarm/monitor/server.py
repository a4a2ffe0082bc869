"""The monitor's page: static files, the snapshot, its changes as server-sent events, metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.errors import ConfigError
from swarm.monitor.exposition import CONTENT_TYPE, exposition
from swarm.monitor.metrics import METRICS
from swarm.monitor.schema import SnapshotJson

ROWS = {"peers": "peer_id", "experts": "expert"}
"""Lists of objects that change one by one, and the field that identifies each object."""
TAILS = ("events", "rounds", "losses")
"""Lists that grow at the end, and are cut at the beginning."""

KEPT = 3
"""Versions that a listener may be behind without getting the full state again."""

State = Mapping[str, Any]
Wake = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Feed:
    """Snapshots. One thread writes them, and the server's event loop reads them."""

    def __init__(self, max_listeners: int) -> None:
        """Begins without a snapshot. Accepts at most `max_listeners` at a time."""
        self._max_listeners = max_listeners
        self._lock = threading.Lock()
        self._state: State = _without_snapshot("looking for the run")
        self._version = 0
        self._texts: dict[int, str] = {}
        """The event that leads to the newest version, by the version that a listener has."""
        self._older: dict[int, State] = {0: self._state}
        self._listeners: list[Wake] = []
        self.closed = False

    @property
    def state(self) -> State:
        """A `SnapshotJson`. Before the first snapshot, only its `health`."""
        return self._state

    @property
    def listeners(self) -> int:
        """Number of listeners."""
        return len(self._listeners)

    def show(self, snapshot: SnapshotJson) -> None:
        """Shows the newest snapshot. Callable from any thread."""
        self._replace(dict(snapshot))

    def lose(self, reason: str) -> None:
        """Records a failed look: marks the last state as unreachable. Callable from any thread."""
        health = {"health": {"word": "unreachable", "reason": reason}}
        self._replace({**self._state, **health})

    def close(self) -> None:
        """Ends every stream."""
        self.closed = True
        self._wake()

    def listen(self) -> Wake | None:
        """The signal of a new version. None if there are too many listeners."""
        if len(self._listeners) >= self._max_listeners:
            return None
        wake = (asyncio.get_running_loop(), asyncio.Event())
        self._listeners.append(wake)
        return wake

    def leave(self, wake: Wake) -> None:
        """Undoes `listen`."""
        self._listeners.remove(wake)

    def since(self, version: int | None) -> tuple[int, str]:
        """The newest version, and the server-sent event that leads to it. "" if there is no event.

        Args:
            version: the listener's version. The whole state is sent if it is None or too old.
        """
        with self._lock:
            if version == self._version:
                return version, ""
            behind = -1 if version not in self._older else version
            if behind not in self._texts:
                before = self._older.get(behind)
                self._texts[behind] = (
                    event("change", difference(before, self._state))
                    if before is not None and len(before) > 1
                    else event("snapshot", self._state)
                )
            return self._version, self._texts[behind]

    def _replace(self, state: State) -> None:
        with self._lock:
            self._state, self._version = state, self._version + 1
            self._texts.clear()
            self._older[self._version] = state
            for old in [old for old in self._older if old < self._version - KEPT]:
                del self._older[old]
        self._wake()

    def _wake(self) -> None:
        for loop, wake in tuple(self._listeners):
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake.set)


def difference(before: State, after: State) -> dict[str, Any]:
    """The change from one snapshot to another: `set`, `rows` and `tails`, each by field.

    `rows` has the changed rows, and the order of all rows if the order changed. `tails` has the
    number of entries cut at the beginning, and the entries added at the end.
    """
    change: dict[str, Any] = {"set": {}, "rows": {}, "tails": {}}
    for field, value in after.items():
        old = before.get(field)
        if value == old:
            continue
        if field in ROWS and old is not None:
            change["rows"][field] = _rows(old, value, ROWS[field])
        elif field in TAILS and old and (tail := _tail(old, value)):
            change["tails"][field] = tail
        else:
            change["set"][field] = value
    return change


def event(kind: str, value: Mapping[str, Any]) -> str:
    """A server-sent event. Its JSON has no line ends.

    Raises:
        ValueError: a number is not finite, which no browser would read.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return f"event: {kind}\ndata: {data}\n\n"


def _rows(before: Sequence[State], after: Sequence[State], key: str) -> dict[str, Any]:
    known = {row[key]: row for row in before}
    order = [row[key] for row in after]
    change: dict[str, Any] = {"rows": [row for row in after if row != known.get(row[key])]}
    return change if order == list(known) else change | {"order": order}


def _tail(before: Sequence[Any], after: Sequence[Any]) -> dict[str, Any] | None:
    """None if the new list does not continue the old one."""
    cut = before.index(after[0]) if after and after[0] in before else len(before)
    kept = len(before) - cut
    if list(before[cut:]) != list(after[:kept]) or not kept:
        return None
    return {"cut": cut, "add": list(after[kept:])}


def _without_snapshot(reason: str) -> State:
    return {"health": {"word": "unreachable", "reason": reason}}


WEB = Path(__file__).with_name("web")
MAX_LISTENERS = 64
MAX_CONNECTIONS = 4 * MAX_LISTENERS
KEEP_ALIVE_S = 15.0
"""An idle stream gets an empty line at this interval, so that no proxy ends it."""
GRACE_S = 2
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def application(feed: Feed, name: str = "localhost") -> ASGIApp:
    """The page of one feed. `name` is an additional name of this machine."""

    def snapshot(_: Request) -> Response:
        return JSONResponse(feed.state, status_code=200 if "peers" in feed.state else 503)

    def metrics(_: Request) -> Response:
        return Response(exposition(feed.state), media_type=CONTENT_TYPE)

    async def events(_: Request) -> Response:
        wake = feed.listen()
        if wake is None:
            said = f"{MAX_LISTENERS} listeners are the most that this monitor takes\n"
            return Response(said, 503, {"retry-after": "10"}, "text/plain")
        return _Stream(feed, wake)

    return _Guard(
        Starlette(
            routes=[
                Route("/", _file("index.html")),
                Route("/favicon.ico", _file("favicon.svg")),
                Route("/snapshot.json", snapshot),
                Route("/glossary.json", _glossary),
                Route("/events", events),
                Route("/metrics", metrics),
                Mount("/static", StaticFiles(directory=WEB)),
            ]
        ),
        name,
    )


def names_this_machine(host: str, name: str) -> bool:
    """Whether the Host header of a request names this machine.

    Attackers can point names of their own at any address, so a name must be `name` or one of the
    machine's names. Any address is accepted.
    """
    called = re.sub(r":\d*$", "", host).strip("[]").lower().removesuffix(".")
    own = socket.gethostname().lower()
    if called in ("", own, f"{own}.local", name.lower()) or called.split(".")[-1] == "localhost":
        return True
    try:
        ipaddress.ip_address(called)
    except ValueError:
        return False
    return True


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port in use is reported before anything starts.

    Raises:
        ConfigError: the process cannot listen on the address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--http {host}:{port}: {error.strerror}", hint="another port, or 0 for a free one"
        ) from error
    return bound


def serve(feed: Feed, bound: socket.socket, name: str = "localhost") -> None:
    """Serves the page until the process is asked to end; see `application`."""
    server = server_of(feed, name)
    server.run(sockets=[bound])


def server_of(feed: Feed, name: str = "localhost") -> uvicorn.Server:
    """A server that closes the feed when it is asked to end, since its streams have no end."""
    return _Server(feed, name)


class _Server(uvicorn.Server):
    def __init__(self, feed: Feed, name: str) -> None:
        self._feed = feed
        super().__init__(
            uvicorn.Config(
                application(feed, name),
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._feed.close()
        super().handle_exit(sig, frame)


class _Guard:
    """Answers only GET requests to a name of this machine. Adds the same headers to each answer."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        app = self._app
        if scope["type"] == "http" and scope["method"] != "GET":
            app = Response("this page is read-only\n", 405, {"allow": "GET"}, "text/plain")
        elif scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not names_this_machine(host, self._name):
                said = f"{host[:100]!a} is no name of this machine: start it with --http HOST:PORT"
                app = Response(f"{said}\n", 421, media_type="text/plain")
        await app(scope, receive, guarded)


class _Stream(StreamingResponse):
    """Server-sent events until the listener or the feed ends."""

    def __init__(self, feed: Feed, wake: Wake) -> None:
        self._feed, self._wake = feed, wake
        super().__init__(self._events(), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.leave(self._wake)

    async def _events(self) -> AsyncIterator[str]:
        version, changed = None, self._wake[1]
        while not self._feed.closed:
            changed.clear()
            version, text = self._feed.since(version)
            if text:
                yield text
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await changed.wait()
            except TimeoutError:
                yield ":\n\n"


def _file(name: str) -> Callable[[Request], Response]:
    def answer(_: Request) -> Response:
        return FileResponse(WEB / name)

    return answer


def _glossary(_: Request) -> Response:
    return Response(json.dumps([vars(metric) for metric in METRICS]), media_type="application/json")
