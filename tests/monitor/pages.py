"""A page on loopback, served as by swarm-monitor."""

import contextlib
import http.client
import threading
from collections.abc import Iterator
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.routing import Mount

from swarm.monitor.server import MAX_LISTENERS, Feed, application, listening_socket, server_of

WAIT_S = 60.0


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Page(NamedTuple):
    """The address of a page, and its content."""

    feed: Feed
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str, method: str = "GET") -> Answer:
        with self.open(path, method) as answer:
            return Answer(answer.status, answer.headers, answer.read())

    @contextlib.contextmanager
    def open(self, path: str, method: str = "GET") -> Iterator[http.client.HTTPResponse]:
        """An answer that may have no end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(method, path)
        answer = connection.getresponse()
        try:
            yield answer
        finally:
            answer.close()
            connection.close()


@contextlib.contextmanager
def page_of(feed: Feed | None = None, *, prefix: str = "", port: int = 0) -> Iterator[Page]:
    """Serves until the block ends, below a prefix as a proxy would."""
    shown = feed or Feed(MAX_LISTENERS)
    bound, server = listening_socket("127.0.0.1", port), server_of(shown)
    if prefix:
        server.config.app = Starlette(routes=[Mount(prefix, application(shown))])
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield Page(shown, bound.getsockname()[1])
    finally:
        shown.close()
        server.should_exit = True
        thread.join(WAIT_S)
        bound.close()
        assert not thread.is_alive()
