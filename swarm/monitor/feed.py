"""The newest snapshot for everybody who listens: the whole first, then only what has changed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.monitor.schema import SnapshotJson

ROWS = {"peers": "peer_id", "experts": "expert"}
"""Lists of objects that change one by one, and the field that names each."""
TAILS = ("events", "rounds", "losses")
"""Lists that grow at the end, and are cut at the beginning."""

KEPT = 3
"""Versions that a slow listener may be behind until it gets everything anew."""

State = Mapping[str, Any]
Wake = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Feed:
    """One writer's thread shows snapshots, the server's event loop reads them."""

    def __init__(self, max_listeners: int) -> None:
        """Has nothing to show yet; takes so many listeners at a time."""
        self._max_listeners = max_listeners
        self._lock = threading.Lock()
        self._state: State = _without_snapshot("looking for the run")
        self._version = 0
        self._texts: dict[int, str] = {}
        """How far back a listener is -> what brings it up to date; of the newest version."""
        self._older: dict[int, State] = {0: self._state}
        self._listeners: list[Wake] = []
        self.closed = False

    @property
    def state(self) -> State:
        """A `SnapshotJson`; before the first one, its `health` alone."""
        return self._state

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def show(self, snapshot: SnapshotJson) -> None:
        """The newest snapshot; from any thread."""
        self._replace(dict(snapshot))

    def lose(self, reason: str) -> None:
        """A look failed: what was known stays, marked as such; from any thread."""
        health = {"health": {"word": "unreachable", "reason": reason}}
        self._replace({**self._state, **health})

    def close(self) -> None:
        """Ends every stream."""
        self.closed = True
        self._wake()

    def listen(self) -> Wake | None:
        """What is set when there is something new; None when there are too many listeners."""
        if len(self._listeners) >= self._max_listeners:
            return None
        wake = (asyncio.get_running_loop(), asyncio.Event())
        self._listeners.append(wake)
        return wake

    def leave(self, wake: Wake) -> None:
        """Undoes `listen`."""
        self._listeners.remove(wake)

    def since(self, version: int | None) -> tuple[int, str]:
        """The newest version, and the server-sent event that leads there; "" if there is none.

        Args:
            version: what the listener has; None at first. One that is too old gets all anew.
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
    """What turns one snapshot into another: `set`, `rows` and `tails`, each by field.

    `rows` has the rows that changed, and the order of all where that did. `tails` has how many
    were cut at the beginning and what was added at the end.
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
    """A server-sent event; JSON has no line ends.

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
    """None where the new list does not go on from the old one."""
    cut = before.index(after[0]) if after and after[0] in before else len(before)
    kept = len(before) - cut
    if list(before[cut:]) != list(after[:kept]) or not kept:
        return None
    return {"cut": cut, "add": list(after[kept:])}


def _without_snapshot(reason: str) -> State:
    return {"health": {"word": "unreachable", "reason": reason}}
