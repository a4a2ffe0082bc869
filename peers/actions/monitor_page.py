"""swarm-monitor --http: looks at the run in one thread, and serves the page from another."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import click

from swarm.background import SYSTEM, SupervisedThread
from swarm.errors import ConfigError, SwarmError

try:
    from swarm.monitor.server import MAX_LISTENERS, Feed, listening_socket, serve
except ImportError as error:
    raise ConfigError(
        f"--http needs a package that is not installed: {error.name}",
        hint="install moe-swarm[monitor]",
    ) from error
from swarm.monitor.schema import as_json
from swarm.monitor.snapshot import Snapshot
from swarm.protocol.records.printable import printable

LOCAL = "127.0.0.1"


class Looks(Protocol):
    """A source of snapshots of a run."""

    @property
    def refresh_s(self) -> float:
        """Seconds from one look to the next."""

    def look(self) -> Snapshot:
        """The newest snapshot. Raises a `SwarmError` if there is none now."""


def bound_to(address: str) -> socket.socket:
    """A socket for `HOST:PORT`, `[HOST]:PORT` or `PORT`.

    Raises:
        ConfigError: the text is no address, or the address cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) >= 2**16:
        raise ConfigError(f"--http {address!r}: no port", hint="for example 127.0.0.1:8080")
    return listening_socket(host.strip("[]") or LOCAL, int(port))


def url_of(bound: socket.socket) -> str:
    """The URL of a listening socket for a browser on this machine."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def page_at(address: str) -> Callable[[Looks], None]:
    """Returns a function that serves the page at `HOST:PORT` until the process is asked to end.

    Args:
        address: listening address, bound at once, so that a port in use is reported before other
            work.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    bound = bound_to(address)
    return functools.partial(_show_page, bound, address.rpartition(":")[0].strip("[]") or LOCAL)


def _show_page(bound: socket.socket, name: str, source: Looks) -> None:
    feed = Feed(MAX_LISTENERS)
    watcher = SupervisedThread("watcher", lambda: _watch(feed, source, watcher.stopping))
    watcher.start()
    click.echo(f"swarm-monitor: the page is at {url_of(bound)}")
    try:
        serve(feed, bound, name)
    finally:
        watcher.stopping.set()  # not awaited, since a look may take long and holds no resources
        bound.close()


def _watch(feed: Feed, source: Looks, stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            feed.show(as_json(source.look()))
        except (SwarmError, OSError) as error:
            feed.lose(printable(str(error)))
        except Exception as error:
            feed.lose(f"a fault of this monitor: {printable(repr(error))}")
            raise
        SYSTEM.wait(stopping, source.refresh_s)
