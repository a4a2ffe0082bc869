"""The plain records of a round machine: its inputs, outputs, stage of life, and work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.protocol.messages import messages
from swarm.protocol.messages.events import Effect, Reason, Record, Send, Topic
from swarm.protocol.rounds.policies.rules import Randomness, Rules
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import ALL_EXPERTS, PeerId

Sign = Callable[[bytes], messages.Signature]
"""Signs a statement with this peer's key."""


def unsigned(_: bytes) -> messages.Signature:
    """A signer for peers that trust each other, as in a simulation."""
    return messages.UNSIGNED


def room_for_all() -> int:
    """The room of a machine that holds every expert."""
    return ALL_EXPERTS


def nowhere(_: PeerId) -> str | None:
    """The `network_of` of a shell that does not know peers' networks."""
    return None


@dataclass(eq=False)
class LocalPeer:
    """The machine's inputs from outside; no role writes them."""

    me: PeerId
    capacity: float
    rules: Rules
    timers: Timers
    """May be replaced between two events."""
    now: float
    """Time of the event that is being handled, in seconds of any monotonic clock."""
    random: Randomness
    sign: Sign = unsigned
    is_dialable: bool = True
    uplink_of: Callable[[], int] = int
    """Measured uplink of this peer in Mbit/s; 0: not known (balanced uploads)."""
    room_of: Callable[[], int] = room_for_all
    """Number of experts that fit this machine, including those that it owns (expert ownership)."""
    fetches_ahead: bool = False
    """Whether to fetch single-writer experts of a roster before they are proposed (fetch ahead)."""
    network_of: Callable[[PeerId], str | None] = nowhere
    """Public /24 or /48 network from which another peer connects; None if unknown."""
    credential: Credential | None = None
    """The credential with which this peer asks for a vote [R8]."""


@dataclass(eq=False)
class Outbox:
    """The messages and other effects of one event, in order."""

    me: PeerId
    header: messages.Header
    """Header of all messages under the present tip [H2]."""
    reason: str = ""
    """The last sentence that explained a decision."""
    effects: list[Effect] = field(default_factory=list)
    to_self: deque[tuple[PeerId, messages.Header, messages.Message]] = field(default_factory=deque)
    """Messages to this peer itself, delivered before the event's handling ends."""

    def emit(self, effect: Effect) -> None:
        """Adds an effect for the shell to carry out."""
        self.effects.append(effect)

    def post(self, destination: PeerId, message: messages.Message) -> None:
        """Sends a message with the present tip's header [H2]; messages to itself stay in memory."""
        if destination == self.me:
            self.to_self.append((self.me, self.header, message))
        else:
            self.emit(Send(destination, self.header, message))

    def explain(self, topic: Topic, text: str) -> None:
        """Explains a decision to users."""
        self.reason = text
        self.emit(Reason(topic, text))

    def refuse(self, source: PeerId, message: str, problem: str) -> None:
        """Explains why a message is refused."""
        self.reason = f"{message} from {source} refused: {problem}"
        self.emit(Reason(Topic.REFUSED, self.reason, message))

    def take(self) -> list[Effect]:
        """Returns the effects since the last call, and clears them."""
        effects, self.effects = self.effects, []
        return effects


@dataclass(frozen=True)
class Heights:
    """Calls with which a part begins a height, when it applies a tip or ends the listening."""

    forget: Callable[[Record], None]
    """Has all parts drop their state for the height after the old record's tip."""
    begin: Callable[[], None]
    """Starts the work that the new tip allows."""


@dataclass(eq=False)
class Life:
    """The stage of this process: listening, taking part, leaving or left."""

    boot_at: float
    """When the process last began to listen: at its start, or after a stand-still [B1, B2]."""
    event_at: float
    listen_until: float | None
    """End of the listening; None once this peer takes part."""
    may_listen_on: bool = False
    """Whether to continue listening while a chain of survivors is being fetched."""
    leave_until: float | None = None
    """Time until which this peer, once asked to leave, waits for a manifest without it."""
    has_left: bool = False

    @property
    def is_listening(self) -> bool:
        """Whether this peer still listens, before it takes part [B1]."""
        return self.listen_until is not None

    @property
    def is_leaving(self) -> bool:
        """Whether this peer was asked to leave."""
        return self.leave_until is not None


@dataclass(eq=False)
class Work:
    """This peer's local steps on the tip, and its offer of them."""

    offer: messages.Offer | None = None
    offered_at: float | None = None
    """When it offered its shared tensors."""
    ready_at: float | None = None
    """When this peer expects its local steps to end."""
    stalls_at: float | None = None
    """Where rounds overlap: when the steps that follow this peer's offer will end (stall
    deadline)."""
    steps_s: float | None = None
    """Seconds from a new tip to the end of its local steps, as last expected."""
    fetched_s: float = 0.0
    """Seconds spent before the first step on fetching the tip, and tips that it replaced."""
    signed: dict[messages.Declaration, messages.Signature] = field(default_factory=dict)
    """This peer's signatures over its declarations for the tip."""
    reduces_from: int = 0
    """Round of the tip from which this peer reduces again, after it failed as a reducer."""

    def forget_height(self, ready_at: float | None) -> None:
        """Resets the state of the old tip. `ready_at`: when the next steps may end."""
        self.offer = self.offered_at = self.stalls_at = None
        self.signed = {}
        self.ready_at = ready_at
