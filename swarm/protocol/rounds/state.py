"""The plain records of a round machine: its inputs, its outputs, its life and its work."""

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
    """For peers that trust each other, as in a simulation."""
    return messages.UNSIGNED


def room_for_all() -> int:
    """The room of a machine that holds every expert."""
    return ALL_EXPERTS


def nowhere(_: PeerId) -> str | None:
    """Where a peer is connected from, as far as a shell knows that knows nothing of networks."""
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
    """Mbit/s that its line carries away from it, as it was measured; 0: not known [D3]."""
    room_of: Callable[[], int] = room_for_all
    """Experts that fit its machine, those that it owns included [R4]."""
    fetches_ahead: bool = False
    """Whether it fetches what a roster has of one writer before that is proposed [D2]."""
    network_of: Callable[[PeerId], str | None] = nowhere
    """Public /24 or /48 from which another peer is connected; None where it is not known."""
    credential: Credential | None = None
    """With which this peer asks for a vote [R8]."""


@dataclass(eq=False)
class Outbox:
    """What this peer says and does because of one event, in order."""

    me: PeerId
    header: messages.Header
    """Of all messages under the present tip [H2]."""
    reason: str = ""
    """Last sentence that explained a decision."""
    effects: list[Effect] = field(default_factory=list)
    to_self: deque[tuple[PeerId, messages.Header, messages.Message]] = field(default_factory=deque)
    """Messages that are delivered before the event is over."""

    def emit(self, effect: Effect) -> None:
        """Has the shell do something."""
        self.effects.append(effect)

    def post(self, destination: PeerId, message: messages.Message) -> None:
        """Sends under the header of the present tip [H2]; to oneself without the network."""
        if destination == self.me:
            self.to_self.append((self.me, self.header, message))
        else:
            self.emit(Send(destination, self.header, message))

    def explain(self, topic: Topic, text: str) -> None:
        """Tells people why."""
        self.reason = text
        self.emit(Reason(topic, text))

    def refuse(self, source: PeerId, message: str, problem: str) -> None:
        """Says why a message is not handled."""
        self.reason = f"{message} from {source} refused: {problem}"
        self.emit(Reason(Topic.REFUSED, self.reason, message))

    def take(self) -> list[Effect]:
        """Hands over all effects since the last time."""
        effects, self.effects = self.effects, []
        return effects


@dataclass(frozen=True)
class Heights:
    """From one height to the next, for the parts that apply a tip or end the listening."""

    forget: Callable[[Record], None]
    """Has all parts forget the height after the old record's tip."""
    begin: Callable[[], None]
    """Starts what the new tip allows."""


@dataclass(eq=False)
class Life:
    """How far this process is between its start and its leave: listening, taking part, left."""

    boot_at: float
    """When it began to listen last: after its start, or after a stand-still [B1, B2]."""
    event_at: float
    listen_until: float | None
    """While it listens; None once it takes part."""
    may_listen_on: bool = False
    """Whether to wait for a chain of survivors that is being fetched."""
    leave_until: float | None = None
    """Once it was asked to leave: how long a manifest without it is waited for."""
    has_left: bool = False

    @property
    def is_listening(self) -> bool:
        """Whether it hears what the others have before it says anything [B1]."""
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
    """When this peer expects to have finished its local steps."""
    stalls_at: float | None = None
    """When it will have taken the steps after its offer, where rounds overlap [V8]."""
    steps_s: float | None = None
    """From a new tip to the end of its local steps, as expected last."""
    fetched_s: float = 0.0
    """Seconds of fetching the tip, and the tips that it overtook, before the first step."""
    signed: dict[messages.Declaration, messages.Signature] = field(default_factory=dict)
    """By this peer, for the tip."""
    reduces_from: int = 0
    """Round from which this peer is a reducer like others, after it failed as one."""

    def forget_height(self, ready_at: float | None) -> None:
        """Resets what referred to the old tip; `ready_at`: when the next steps may end."""
        self.offer = self.offered_at = self.stalls_at = None
        self.signed = {}
        self.ready_at = ready_at
