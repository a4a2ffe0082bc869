"""A peer's durable record, and the state derived from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from swarm.protocol.chain.chain_record import abstains
from swarm.protocol.chain.trust import Chain
from swarm.protocol.messages import messages
from swarm.protocol.messages.events import Persist, Record
from swarm.protocol.rounds.state import LocalPeer, Outbox
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Digest, Manifest, PeerId
from swarm.protocol.values.schedule import merge_due

NO_GENERATION = "00"
"""Generation in the header of a peer that abstains. Real generations are "0" or have 32 digits."""


class Standing:
    """The tip, and the promise and vote for the next height, with the rules that need only these.

    Only `record` and `chain` are persistent. A crash loses everything else, by design.
    """

    def __init__(self, peer: LocalPeer, record: Record, chain: Chain | None) -> None:
        self.peer, self.me, self.rules = peer, peer.me, peer.rules
        self.record = record
        self.chain = chain or Chain.of(record)
        """The tip's head and earlier heads, which prove the tip to peers with another tip."""
        self.applied_at = peer.now
        """When this peer applied the tip, or started."""
        self.out = Outbox(peer.me, self.header())

    @property
    def tip(self) -> Manifest:
        """The newest manifest this peer has applied."""
        return self.record.tip

    @property
    def is_member(self) -> bool:
        """Whether this peer's work counts."""
        return self.me in self.record.tip.members

    @property
    def is_alone(self) -> bool:
        """Whether this peer is the only member."""
        return self.is_member and len(self.tip.members) == 1

    @property
    def decides_alone(self) -> bool:
        """Whether this peer is the only voter; there may be trainees."""
        return self.tip.voters == {self.me}

    @property
    def rank(self) -> int:
        """Place in the order of conveners; trainees and strangers have places after all voters."""
        order = self.tip.order
        return order.index(self.me) if self.me in self.tip.voters else len(order)

    def electorate(self) -> Collection[PeerId]:
        """Peers whose promises and votes count, without trainees and joiners [R7]."""
        return self.tip.voters

    def has_quorum(self, peers: Iterable[PeerId]) -> bool:
        """Whether these peers decide the next height: a majority, or half with rank 0 [C5]."""
        electorate = self.electorate()
        return self.tip.is_quorum([peer for peer in peers if peer in electorate])

    def may_vote(self) -> bool:
        """Whether this peer may promise, accept and campaign at this height [P5]."""
        return self.me in self.electorate() and not self.abstains()

    def abstains(self) -> bool:
        """Whether this peer may have cast a vote that its rolled-back record lacks [P5]."""
        return abstains(self.record)

    def is_due(self, manifest: Manifest) -> bool:
        """Whether the successor of this manifest must be a merge. The manifest alone decides it.

        Policy: merge schedule.
        """
        return merge_due(manifest, self.rules.merging)

    def is_better(self, manifest: Manifest) -> bool:
        """Whether a manifest beats the tip in the total order [F1]; a tip only moves up."""
        return manifest.code > self.tip.code

    def promised(self) -> messages.Ballot:
        """The ballot of a READY: the durable promise, or attempt 0, which promises nothing."""
        return self.record.promised or messages.Ballot(0, self.tip.order[0])

    def header(self) -> messages.Header:
        """The header of all messages under this tip [H2].

        A peer that abstains names no generation, so that others do not count it as part of a living
        quorum [F2] (liveness tracking). Otherwise two peers, one of them abstaining, would wait for
        each other for ever.
        """
        generation = NO_GENERATION if self.abstains() else self.tip.generation
        return messages.Header(self.tip.code, self.tip.digest, generation)

    def signed_accept(self, ballot: messages.Ballot, digest: Digest) -> messages.Accept:
        """This peer's signed vote."""
        statement = messages.accept_statement(self.rules.run, ballot, digest)
        return messages.Accept(ballot, digest, self.peer.sign(statement))

    def persist(self, record: Record, links: tuple[messages.Link, ...] = ()) -> None:
        """Replaces the record as a whole, in memory and on the disk."""
        self.record = record
        self.out.emit(Persist(record, links))

    def persist_promise(self, ballot: messages.Ballot) -> None:
        """Makes a promise durable before the READY that carries it [P1]."""
        self.persist(replace(self.record, promised=ballot))

    def persist_accepted(self, vote: messages.Accepted) -> None:
        """Makes a vote durable before the ACCEPT [P2]."""
        self.persist(replace(self.record, promised=vote.ballot, accepted=vote))


@dataclass(eq=False)
class Role:
    """Base of the roles. The fields of a role name the other records and roles that it uses."""

    standing: Standing

    def __post_init__(self) -> None:
        self.peer = self.standing.peer
        self.out = self.standing.out
        self.me = self.peer.me
        self.rules = self.peer.rules

    @property
    def now(self) -> float:
        """Time of the event that is being handled, in seconds."""
        return self.peer.now

    @property
    def timers(self) -> Timers:
        """The present timers, in seconds."""
        return self.peer.timers

    @property
    def tip(self) -> Manifest:
        """The newest manifest this peer has applied."""
        return self.standing.record.tip
