"""The events that go into the round machine, and the effects that come out of it.

The shell hands events in one at a time and carries the returned effects out in order. Each effect
ends before the next begins. So a `Persist` is durable before the message of a later `Send` leaves.
An effect only starts long work (fetching, syncing, reducing, merging); the result comes back as an
event. This module uses no clock, disk or socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from swarm.protocol.messages import messages
from swarm.protocol.messages.schemas import Count, Generation, OnWire
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.values.updates import UpdateBound


@dataclass(frozen=True)
class Regained(OnWire):
    """The height after which a peer that lost its record, or its newest record, votes again [P5].

    Before the loss, the peer cannot have voted above that height in that generation. So it knows
    all its votes above that height.
    """

    generation: Generation
    height: Count


@dataclass(frozen=True)
class Record:
    """The protocol's durable state, except blobs and chain; replaced atomically."""

    tip: Manifest
    certificate: messages.Certificate | None
    """Certificate of the tip; None for manifest 0."""
    parent: Manifest | None
    """The tip's parent, from which a merge can be computed again."""
    promised: messages.Ballot | None = None
    accepted: messages.Accepted | None = None
    """This peer's vote. Both the promise and the vote are for the height after the tip."""
    abstain_until_height: int = 0
    """A peer casts no vote up to this height if a damaged disk rolled its record back [P5]."""
    regained: Regained | None = None
    """A generation in which the peer votes again after its own height, if there is one."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Tick:
    """Time has passed; the shell sends one at least every `Timers.tick_s`."""


class Received(NamedTuple):
    """A message whose attached blobs are all here and whose signatures were verified."""

    source: PeerId
    header: messages.Header
    message: messages.Message


@dataclass(frozen=True)
class Offered:
    """Local steps have ended; the offer's blobs and the private state are durable [P6]."""

    offer: messages.Offer


@dataclass(frozen=True)
class Expected:
    """The trainer expects its local steps on this tip to end in `remaining_s`."""

    tip: Digest
    remaining_s: float


@dataclass(frozen=True)
class Stored:
    """A blob has arrived, or was computed here; it is readable but not yet durable."""

    digest: Digest


@dataclass(frozen=True)
class Unobtainable:
    """A peer did not send a blob, or sent one that was refused.

    If `peer` is this peer itself, a stored blob is missing or damaged.
    """

    digest: Digest
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class NotMade:
    """A value could not be made from a delta: wrong digest, or the attempt failed [W6].

    The value may be here nevertheless, if another peer has sent it during the attempt.
    """

    digest: Digest
    reason: str


@dataclass(frozen=True)
class Undeliverable:
    """A peer's machine refused a message, so its process probably does not run."""

    peer: PeerId


@dataclass(frozen=True)
class Synced:
    """All blobs of this manifest are durable."""

    manifest: Digest


@dataclass(frozen=True)
class SyncFailed:
    """The blobs of this manifest could not be made durable. The shell does not retry by itself."""

    manifest: Digest
    reason: str


@dataclass(frozen=True)
class UnitReduced:
    """A mean was computed and stored."""

    roster_id: Digest
    unit: Unit
    result: messages.ReducedUnit


@dataclass(frozen=True)
class MergeComputed:
    """The merged experts of a due tip were computed and stored."""

    tip: Digest
    units: Mapping[Unit, messages.ReducedUnit]


@dataclass(frozen=True)
class LeaveAsked:
    """The person asked this peer to leave the run."""


@dataclass(frozen=True)
class Discovered:
    """Peers of this run that the DHT lists, on any chain; the machine greets them.

    Without this event, two parts of a swarm that forgot each other would never meet again.
    """

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class HeadsFound:
    """Members have sent links that the chain had lost; invalid signatures are dropped."""

    links: tuple[messages.Link, ...]
    """The link before the gap, and steps from there, oldest first."""


Event = (
    Tick
    | Received
    | Offered
    | Expected
    | Stored
    | Unobtainable
    | NotMade
    | Undeliverable
    | Synced
    | SyncFailed
    | UnitReduced
    | MergeComputed
    | LeaveAsked
    | Discovered
    | HeadsFound
)


# ---------------------------------------------------------------- effects


class Purpose(Enum):
    """Why blobs are fetched; a new `Fetch` replaces the running one of the same purpose."""

    REDUCE = "reduce"  # inputs of the units that this peer reduces
    AHEAD = "ahead"  # experts with one writer in a roster, before they are proposed
    PROPOSAL = "proposal"  # blobs of a manifest that is to be accepted
    CATCH_UP = "catch_up"  # blobs of a decided manifest that is to be applied


@dataclass(frozen=True)
class BlobWanted:
    """A blob and the peers to ask, best first."""

    unit: Unit
    digest: Digest
    num_bytes: int
    sources: tuple[PeerId, ...]
    bound: UpdateBound | None = None
    """How far the value may be from its base (update bounds); None: no bound is checked."""
    is_delta: bool = False
    """Whether the blob is a delta; otherwise it is a value."""


@dataclass(frozen=True)
class Persist:
    """Make the record durable before continuing, and the chain's new links before the record."""

    record: Record
    links: tuple[messages.Link, ...] = ()


@dataclass(frozen=True)
class RewriteChain:
    """Make the whole chain of heads durable in place of the stored one."""

    links: tuple[messages.Link, ...]


class Send(NamedTuple):
    """Post a message; it may be lost."""

    destination: PeerId
    header: messages.Header
    message: messages.Message


@dataclass(frozen=True)
class Fetch:
    """Get these blobs, from their sources in turn, until the fetch is cancelled or replaced."""

    purpose: Purpose
    wants: tuple[BlobWanted, ...]


@dataclass(frozen=True)
class CancelFetch:
    """Stop fetching for this purpose."""

    purpose: Purpose


@dataclass(frozen=True)
class Sync:
    """Make all blobs of the manifest durable, then report `Synced`, or `SyncFailed`.

    The blobs are the values of all units, and those deltas of the manifest that are here.
    """

    manifest: Manifest


@dataclass(frozen=True)
class Rebuild:
    """Make a value from the previous value and a delta, which are both here, and store it.

    Report `Stored`, or `NotMade` if it has another digest [W6].
    """

    unit: Unit
    base: Digest
    delta: Digest
    digest: Digest
    """Digest of the value."""


@dataclass(frozen=True)
class Reduce:
    """Average these values in the given order, store the result, report `UnitReduced`.

    With a `base`, the inputs are deltas. The remainders of earlier means (`Remainders`) are added,
    and the mean becomes a delta. The value is the base plus that delta. Both are durable before
    the report (delta means).
    """

    roster_id: Digest
    unit: Unit
    inputs: tuple[tuple[PeerId, Digest], ...]
    weights: tuple[int, ...] | None = None
    """Weight of each input; None: all weigh the same (mean weights)."""
    base: Digest | None = None


@dataclass(frozen=True)
class ComputeMerge:
    """Merge the experts of this (due) tip from its agreed values, report `MergeComputed`."""

    tip: Manifest


@dataclass(frozen=True)
class Apply:
    """The manifest is the new tip and durable: swap the live model to it [P4]."""

    manifest: Manifest
    previous: Digest
    """The tip before it."""


@dataclass(frozen=True)
class Keep:
    """All blobs except the named ones may be deleted [GC]."""

    digests: frozenset[Digest]


@dataclass(frozen=True)
class Left:
    """This peer has left the run, or need not wait any longer before it leaves."""

    reason: str


class Topic(Enum):
    """The subject of a reason."""

    ROUND = "round"  # phases of a round: rosters, proposals, decisions
    TAKEOVER = "takeover"  # a convener was replaced or stepped down
    MEMBERSHIP = "membership"  # who joined, left or was removed
    ADMISSION = "admission"  # what this peer lacks to join, or to vote
    FORK = "fork"  # reforms and fork choice
    REFUSED = "refused"  # something was not believed; counted


@dataclass(frozen=True)
class Reason:
    """Why the protocol did or did not act, in one sentence with its numbers."""

    topic: Topic
    text: str
    refused: str = ""
    """The message that was not believed, such as "COMMIT", if the topic is `REFUSED`."""


Effect = (
    Persist
    | RewriteChain
    | Send
    | Fetch
    | CancelFetch
    | Sync
    | Rebuild
    | Reduce
    | ComputeMerge
    | Apply
    | Keep
    | Left
    | Reason
)
