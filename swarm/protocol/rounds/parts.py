"""The classes that a round machine is made of."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.averaging import Averaging
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.convener import Convener
from swarm.protocol.rounds.forks import Forks
from swarm.protocol.rounds.gossip import Gossip
from swarm.protocol.rounds.listener import Listener
from swarm.protocol.rounds.merger import Merger
from swarm.protocol.rounds.phase1 import Phase1
from swarm.protocol.rounds.proposer import Proposer
from swarm.protocol.rounds.reducer import Reducer
from swarm.protocol.rounds.reformer import Reformer
from swarm.protocol.rounds.standing import Standing
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.rounds.takeover import Takeover
from swarm.protocol.rounds.withholding import Withholding


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The class of each part; a test replaces one to see what its rule is for."""

    standing: type[Standing] = Standing
    contacts: type[Contacts] = Contacts
    succession: type[Succession] = Succession
    blobs: type[Blobs] = Blobs
    withholding: type[Withholding] = Withholding
    acceptor: type[Acceptor] = Acceptor
    reducer: type[Reducer] = Reducer
    merger: type[Merger] = Merger
    gossip: type[Gossip] = Gossip
    forks: type[Forks] = Forks
    adopter: type[Adopter] = Adopter
    listener: type[Listener] = Listener
    contributor: type[Contributor] = Contributor
    phase1: type[Phase1] = Phase1
    collector: type[Collector] = Collector
    averaging: type[Averaging] = Averaging
    proposer: type[Proposer] = Proposer
    convener: type[Convener] = Convener
    takeover: type[Takeover] = Takeover
    reformer: type[Reformer] = Reformer
