"""All errors, in one tree. Every error has an exit code, and may name the next action.

SwarmError (1)
├── ConfigError (2)            a setting is wrong; names file, key, value and what is allowed
├── NobodyReachable (3)        no peer of a run answered
│   └── Unreachable            this one peer did not answer; try another, or later
│       ├── Refused            it answered with an error
│       └── NoRoute            it cannot be dialled from here; a third peer may reach it
├── DataError (4)              the corpus is missing, empty or too small
│   ├── TextMismatch           it is not the text that the run trains on
│   └── TokenizerError         a tokenizer's file is damaged, unfit or cannot be run
├── TrainingDiverged (5)       non-finite losses in a row; nothing reached the swarm
├── StateError (6)             the state directory cannot be used
│   ├── StateLocked            another process uses that directory
│   ├── CorruptState           a file in it is torn or was changed
│   └── MissingBlobs           blobs that were to be made durable are not in the store
├── RunMismatch (7)            the swarm's run is not the one that was asked for
├── HostileInput (8)           bytes from another peer were refused; counted, never fatal by itself
│   ├── BadBlob                wrong digest, size, shape, dtype or a non-finite value
│   ├── BadRecord              wrong signature, too large, not of its schema
│   ├── BadMessage             a control message that is not of its schema
│   ├── BadManifest            no certificate, or not a successor of its parent
│   └── TooCostly              a request for more than its sender may cost now
├── NetworkDown (9)            libp2p's daemon did not start, or died again and again
├── LinkTooSlow (10)           the bytes of a round take this link far longer than a round
├── OutOfMemory (11)           no engine fits the memory of this machine, or of its GPU
├── DoesNotFit (12)            a plan needs more disk or memory than a machine has
├── InvitationError (13)       an invitation is damaged, or lets nobody into this run
├── DataQuotaSpent (14)        the bytes that this machine may move in a month are used up
└── WorkersFailed (15)         the processes that compute for this peer end again and again
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_MESSAGE = 2000
"""Limit of a message, and of a hint, in characters."""
_LONG_WORD = re.compile(r"\S{401,}")
_KEPT = 120
"""Characters that are shown of the beginning of a long word, and of its end."""


def shortened(text: str) -> str:
    """A message, which may quote long input, cut to a length that a person reads.

    A word of more than 400 characters loses its middle, and so does a text of more than 2,000.
    """
    text = _LONG_WORD.sub(lambda word: _without_middle(word[0], _KEPT, _KEPT), text)
    if len(text) <= MAX_MESSAGE:
        return text
    return _without_middle(text, MAX_MESSAGE - 600, 500)


def _without_middle(text: str, first: int, last: int) -> str:
    left_out = len(text) - first - last
    return f"{text[:first]}… ({left_out:,} characters) …{text[-last:]}"


class SwarmError(Exception):
    """Base of all errors of this package. The text of an error is `shortened`.

    Attributes:
        exit_code: what a program that ends with this error returns to its shell.
        hint: the next action for the person who reads the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(shortened(message))
        self.hint = shortened(hint)

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ConfigError(SwarmError):
    """A setting is wrong. The message names source, key, value and what is allowed."""

    exit_code = 2


class NobodyReachable(SwarmError):
    """No peer of a run answered within the deadline."""

    exit_code = 3


class Unreachable(NobodyReachable):
    """One peer did not answer, or answered with an error. Try another peer, or this peer later."""


class Refused(Unreachable):
    """The peer was reached and answered with an error."""


class NoRoute(Unreachable):
    """This peer cannot be dialled from here. A third peer may reach it."""


class DataError(SwarmError):
    """The corpus is missing, empty or too small for the run."""

    exit_code = 4


class TextMismatch(DataError):
    """This machine's text is not the run's. The message names both texts, and what to do."""


class TokenizerError(DataError):
    """A tokenizer's file is damaged, unfit for a run, or cannot be run here."""


class TrainingDiverged(SwarmError):
    """Several steps in a row had a non-finite loss or gradient."""

    exit_code = 5


class StateError(SwarmError):
    """The state directory cannot be used."""

    exit_code = 6


class StateLocked(StateError):
    """Another living process holds the state directory."""


class CorruptState(StateError):
    """A file of the state directory is torn, truncated or was changed."""


class MissingBlobs(StateError):
    """Blobs that were to be made durable are not in the store.

    Attributes:
        digests: digests of these blobs, sorted.
    """

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(f"{len(digests)} blobs are not in the store: {digests[0]}")
        self.digests = tuple(digests)


class RunMismatch(SwarmError):
    """The swarm's run is not the one that was asked for."""

    exit_code = 7


class HostileInput(SwarmError):
    """Bytes from another peer were refused.

    Attributes:
        reason: a short word under which refusals of this kind are counted.
    """

    exit_code = 8

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadBlob(HostileInput):
    """A blob with the wrong digest, size, shape or dtype, or with a non-finite value."""


class BadRecord(HostileInput):
    """A record with a wrong signature, too large, or not of its schema."""


class BadMessage(HostileInput):
    """A control message that is not of its schema."""


class BadManifest(HostileInput):
    """A manifest without certificate, or that is not a successor of its parent."""


class TooCostly(HostileInput):
    """A peer asks for more than it may cost others now. It may ask again later."""


class NetworkDown(SwarmError):
    """libp2p's daemon did not start or has ended. Nothing can be sent or received."""

    exit_code = 9


class OutOfMemory(SwarmError):
    """No memory of the machine or of its GPU is left, and no engine needs less.

    Offered work is on disk.
    """

    exit_code = 11


class DoesNotFit(SwarmError):
    """A planned run needs more than the machine has. The message names resources and remedies."""

    exit_code = 12


class LinkTooSlow(SwarmError):
    """With this machine's link, a peer would always be a round late. The message says why."""

    exit_code = 10


class InvitationError(SwarmError):
    """An invitation is needed, damaged, expired, of another run, used up, or not ours to give."""

    exit_code = 13


class DataQuotaSpent(SwarmError):
    """The bytes that this machine may move in a month are used up, or too few for the next step.

    A running peer has then left in order.
    """

    exit_code = 14


class WorkersFailed(SwarmError):
    """The processes that compute for this peer ended or were silent several times in a row."""

    exit_code = 15


_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # raised when a handle is made and memory is nearly full
)


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was short. torch has no error type for this on CPUs and in cuBLAS."""
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _MEMORY_WORDS)
    return isinstance(error, MemoryError)


def no_access(error: BaseException) -> StateError | None:
    """The typed error for a file that belongs to another user. None for any other error."""
    if isinstance(error, PermissionError) and error.filename:
        hint = "run it as the user that owns it"
        return StateError(f"{error.filename}: {error.strerror}", hint=hint)
    return None


def unreadable(path: object, error: BaseException) -> StateError:
    """The typed error for a file of the state directory that could not be read."""
    return no_access(error) or CorruptState(f"{path} is damaged: {error}")
