"""Inputs of the fuzzer: sound bytes of each kind, and ways to spoil them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Json = Any
VALUES: tuple[Json, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**31 + 1, 2**53 + 1, 2**62, 2**62 + 1, 2**64, 10**400,
    0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "0", "A", "QmA", "0" * 64, "f" * 64, "../../../pwn/x", "\x1b[2J\r\n", "\u202e", "\x00",
    "x" * 5000, "NaN", "run-1", "expert.0", "expert.999999", "shared.0", "quorum", "reform",
    [], {}, [[]], [0, 0], [5, 1], [[0, 2**63]], {"": 0}, {"A": {}}, ["A", "A"],
)  # fmt: skip
"""Replacements for parts of a sound JSON document."""
TEXTS = (
    b"", b"\x00", b"\xff", b"\x80", b"\xed\xa0\x80", b"{", b"}", b"[", b"\"", b",", b":", b"-",
    b"9" * 400, b"1e999", b"NaN", b"Infinity", b"null", b"[" * 3000, b'{"a":' * 1000, b"\\ud800",
    b"\xc1", b"\xd4\x40", b"\xdd\xff\xff\xff\xff", b"\xc7\xff\x50", b"\xdf\xff\xff\xff\xff",
    b"\xc4\x20", b"12D3KooW", b"swarm record ", b"= 1\n", b"[[phases]]\n", b"1979-05-27",
)  # fmt: skip
"""Insertions anywhere into sound bytes."""


@dataclass(frozen=True)
class Decoder:
    """A function that reads foreign bytes.

    Attributes:
        read: the decoder, followed by the checks of its result.
        allowed: errors that it may raise. Any other is a finding.
        samples: sound bytes.
    """

    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    samples: tuple[bytes, ...]


def spoilt(samples: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Any bytes, and samples with a few edits of their bytes or of their JSON."""
    edit = st.tuples(
        st.integers(0, 4), st.integers(0, 2**16), st.integers(0, 64), st.sampled_from(TEXTS)
    )
    change = st.tuples(st.integers(1, 2**32), st.integers(0, 3), st.sampled_from(VALUES))
    sample = st.sampled_from(samples)
    return st.one_of(
        st.builds(_edited, sample, st.lists(edit, min_size=1, max_size=3)),
        st.builds(_changed, sample, st.lists(change, min_size=1, max_size=3)),
        st.binary(max_size=200),
    )


def _edited(sample: bytes, edits: list[tuple[int, int, int, bytes]]) -> bytes:
    for kind, position, length, text in edits:
        at = position % (len(sample) + 1)
        if kind == 0:  # put in
            sample = sample[:at] + text + sample[at:]
        elif kind == 1:  # put over
            sample = sample[:at] + text + sample[at + len(text) :]
        elif kind == 2:  # take out
            sample = sample[:at] + sample[at + length :]
        elif kind == 3:  # cut off
            sample = sample[:at]
        else:  # turn a bit
            flipped = bytes([sample[at] ^ (1 << length % 8)]) if at < len(sample) else b"\x01"
            sample = sample[:at] + flipped + sample[at + 1 :]
    return sample


def _changed(sample: bytes, changes: list[tuple[int, int, Json]]) -> bytes:
    """Changes a JSON document and writes it canonically, so that only its content is wrong."""
    try:
        document = json.loads(sample)
    except ValueError:
        return sample
    for position, kind, put in changes:
        value = copy.deepcopy(put)  # otherwise a later change could insert it into itself
        path = _way(document, position)
        if not path:
            document = value
            continue
        parent = document
        for step in path[:-1]:
            parent = parent[step]
        _change(parent, path[-1], kind, value)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _change(parent: Json, key: Any, kind: int, value: Json) -> None:
    if kind == 0 and isinstance(parent, dict):
        parent[value if isinstance(value, str) else "unknown"] = parent.pop(key)
    elif kind == 1:
        del parent[key]
    elif isinstance(parent[key], list) and kind == 2:
        parent[key] = [*parent[key], value]
    else:
        parent[key] = value


def _way(document: Json, position: int) -> tuple[Any, ...]:
    """The path to a part of a JSON document, from the digits of `position`."""
    path: list[Any] = []
    while isinstance(document, dict | list) and document and position:
        position, number = divmod(position, len(document) + 1)
        if number == len(document):
            break
        key = sorted(document)[number] if isinstance(document, dict) else number
        path.append(key)
        document = document[key]
    return tuple(path)
