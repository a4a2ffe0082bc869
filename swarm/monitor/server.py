"""The page: static files, the snapshot, its changes as server-sent events, and metrics.

It answers GET alone, changes nothing, and loads nothing from elsewhere. It answers only browsers
that name this machine: a page of others whose name was pointed at this machine reads nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType

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
from swarm.monitor.feed import Feed, Wake
from swarm.monitor.metrics import METRICS

WEB = Path(__file__).with_name("web")
MAX_LISTENERS = 64
MAX_CONNECTIONS = 4 * MAX_LISTENERS
KEEP_ALIVE_S = 15.0
"""A stream on which nothing happens gets an empty line so often, lest a proxy ends it."""
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
    """The page of one feed; `name` is one more by which the machine may be called."""

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
    """Whether the Host header of a request is of this machine.

    Attackers can point a name of theirs at any address, but need a name of theirs for that. So
    every address will do, and of names only the machine's own and the given one.
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
    """A socket that listens, so that a port in use is told before anything starts.

    Raises:
        ConfigError: the address cannot be had.
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
    """Serves the page until the process is told to end; see `application`."""
    server = server_of(feed, name)
    server.run(sockets=[bound])


def server_of(feed: Feed, name: str = "localhost") -> uvicorn.Server:
    """A server that closes the feed when it is told to end, since its streams have no end."""
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
    """GET alone, by the names of this machine; the same headers on every answer."""

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
            app = Response("this page is only read\n", 405, {"allow": "GET"}, "text/plain")
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
