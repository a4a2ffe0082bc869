"""What a peer does for others, as its node calls it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from swarm.network.ledger import Ledger
from swarm.network.streams import Serve

OnMessage = Callable[[str, bytes], Awaitable[None]]
OnRequest = Callable[[str, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Handlers:
    """What the node calls for others, always in its own loop; so none of them may block.

    Attributes:
        on_message: gets the sender's peer id, as libp2p (or its signature) proved it, and the
            payload.
        on_request: the same, and returns the answer, at most 1 MB.
        streams: who serves which bulk protocol.
        ledger: what others may cost; it is told who the members are.
    """

    on_message: OnMessage | None = None
    on_request: OnRequest | None = None
    streams: Mapping[str, Serve] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
