"""Limits depth and number of elements of foreign bytes before hivemind's msgpack decoder.

hivemind decodes extension types by recursion, and each level takes 40 kB of the C stack. 200 nested
tuples (936 bytes) end the process with a segmentation fault (measured). So the bytes are scanned
first, without recursion and without creating values.

hivemind decodes three kinds of foreign bytes, each behind a check:

- whole dictionaries, in `rpc_store` and in answers to `rpc_find`, before any signature is
  verified: `BoundedSerializer`, which `guard_hivemind` installs as the serializer of `DHTProtocol`;
- values, when a search ends: `SignedRecords.validate` accepts only values that `is_bytes`;
- subkeys: `SignedRecords.validate` has compared them, as bytes, with the subkey of their owner.

Messages of protobuf need no check: those of the DHT do not nest, and its parser stops at depth 100.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from hivemind.dht.protocol import DHTProtocol
from hivemind.utils import MSGPackSerializer

from swarm.errors import BadRecord

MAX_DEPTH = 16
"""Most nesting levels. A dictionary of records has four; 16 nested extension types take 640 kB of
stack."""
MAX_ELEMENTS = 4200
"""Most elements. A record has four, and the dictionary of a key has 1,024 records at most."""
_TUPLE, _DICTIONARY = 0x40, 0x50
_SIZES = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}
# By first byte: size of the length that follows.
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
# By first byte: size of the value that follows.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


class _Scan:
    """A position in foreign bytes, with the open containers around it."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self._at = 0
        self.num_elements = 0
        # For each container: number of missing elements, limit of its end, whether it must end
        # exactly there.
        self._open = [(1, len(encoded), True)]

    def problem(self) -> str | None:
        """Why the bytes may not be decoded, or None."""
        while self._open:
            to_come, end, is_exact = self._open.pop()
            if to_come == 0:
                if is_exact and self._at != end:
                    return f"{end - self._at} bytes follow a value that has ended"
                continue
            self.num_elements += 1
            if self.num_elements > MAX_ELEMENTS:
                return f"more than {MAX_ELEMENTS} elements"
            self._open.append((to_come - 1, end, is_exact))
            fault = self._take(end)
            if len(self._open) > MAX_DEPTH + 1:
                return f"nested more than {MAX_DEPTH} deep"
            if fault or self._at > end:
                return fault or "a value is longer than its container"
        return None

    def _take(self, end: int) -> str | None:
        """Skips the next value, or enters it."""
        if self._at >= end:
            return "a value is missing"
        first = self._encoded[self._at]
        self._at += 1
        if first < 0x80 or first >= 0xE0:
            return None
        if first < 0xA0:
            is_map = first < 0x90
            self._open.append(((first & 0x0F) * (2 if is_map else 1), end, False))
        elif first < 0xC0:
            self._at += first & 0x1F
        elif first in _FIXED:
            self._at += _FIXED[first]
        elif first in _FIXED_EXTENSIONS:
            return self._enter(_FIXED_EXTENSIONS[first], end)
        else:
            return self._take_sized(first, end)
        return None

    def _take_sized(self, first: int, end: int) -> str | None:
        width = (_BYTES | _EXTENSIONS | _ARRAYS | _MAPS).get(first)
        if width is None:
            return f"no value begins with the byte {first}"
        if self._at + width > end:
            return "a length is missing"
        (size,) = _SIZES[width].unpack_from(self._encoded, self._at)
        self._at += width
        if first in _EXTENSIONS:
            return self._enter(size, end)
        if first in _BYTES:
            self._at += size
        else:
            self._open.append((size * (2 if first in _MAPS else 1), end, False))
        return None

    def _enter(self, num_bytes: int, end: int) -> str | None:
        """Enters an extension type, which must contain exactly one value."""
        if self._at + 1 + num_bytes > end:
            return "an extension type is longer than its container"
        code = self._encoded[self._at]
        self._at += 1
        if code not in (_TUPLE, _DICTIONARY):
            return f"an extension type {code}, which no record has"
        self._open.append((1, self._at + num_bytes, True))
        return None


def structure_problem(encoded: bytes) -> str | None:
    """Why msgpack may not be decoded, or None; takes about 1 us per element.

    Args:
        encoded: one value, as hivemind's serializer writes it.
    """
    return _Scan(encoded).problem()


def num_elements(encoded: bytes) -> int:
    """Number of values before the first invalid one, at most `MAX_ELEMENTS` + 1."""
    scan = _Scan(encoded)
    scan.problem()
    return scan.num_elements


def is_bytes(encoded: bytes) -> bool:
    """Whether this is msgpack of one byte string, as every value of this swarm's records is."""
    return encoded[:1] in (b"\xc4", b"\xc5", b"\xc6") and structure_problem(encoded) is None


class BoundedSerializer(MSGPackSerializer):
    """hivemind's serializer, changed to refuse bytes that are nested too deep or too large.

    Args:
        refuse: counts a refusal under its reason.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse

    def loads(self, buf: bytes) -> object:
        """Decodes foreign bytes.

        Raises:
            BadRecord: reason `record_nesting`, or `record_schema` if they cannot be decoded.
        """
        try:
            problem = structure_problem(buf)
            if problem:
                raise BadRecord("record_nesting", f"a record's bytes are refused: {problem}")
            try:
                return MSGPackSerializer.loads(buf)
            except Exception as error:  # hivemind's constructors check nothing
                raise BadRecord("record_schema", f"no records: {error!r:.200}") from error
        except BadRecord as error:
            self._refuse(error.reason)
            raise


def guard_hivemind() -> None:
    """Makes every DHT node of this process decode within limits, from its first message on.

    After its entry a node gets a `BoundedSerializer` of its own, which counts refusals.
    """
    DHTProtocol.serializer = BoundedSerializer(_uncounted)


def _uncounted(_: str) -> None:
    """Ignores refusals while a node enters the DHT."""
