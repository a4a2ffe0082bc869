"""Links that a simulated peer's chain has lost, asked of members as `swarm.network.heads` does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from swarm.emulation.simulator.shell import Shell
from swarm.emulation.simulator.signing import holds
from swarm.errors import BadMessage
from swarm.protocol.events import HeadsFound
from swarm.protocol.gaps import Filling, between, filled, gaps
from swarm.protocol.manifest import Digest, PeerId
from swarm.protocol.messages import Link
from swarm.protocol.rounds import RoundMachine
from swarm.protocol.signatures import sound

FIRST_S = 0.5
ANSWER_S = 0.1
NEXT_S = 0.1
AGAIN_S = 0.3
"""After a look in vain. A real peer waits 5 s, 1 s and a minute, but its rounds take minutes; those
here take seconds, and in class Q a generation of members leaves within 40."""
IDLE_S = 2.0
"""While nothing is missing, or nobody is there to be asked."""


class SearchingShell(Shell, Protocol):
    """What the search for heads needs of its peer."""

    machine: RoundMachine

    def machine_of(self, name: PeerId) -> RoundMachine | None:
        """Another peer's machine, if the links work and it runs."""


class HeadSearch:
    """Closes the gaps of one peer's chain, from its boot to its end."""

    def __init__(self, shell: SearchingShell) -> None:
        self._shell = shell
        self._begun: dict[tuple[Digest, Digest], Filling] = {}
        self._asked = 0
        shell.after(FIRST_S, self._look)

    def _look(self) -> None:
        """Asks a member for a page of a gap, each in turn."""
        machine = self._shell.machine
        found = gaps(machine.chain)
        others = sorted(set(machine.tip.members) - {self._shell.me})
        if not found or not others:
            self._shell.after(IDLE_S, self._look)
            return
        self._asked += 1
        other = self._shell.machine_of(others[self._asked % len(others)])
        if other is None:
            self._shell.after(AGAIN_S, self._look)
            return
        gap = found[self._asked // len(others) % len(found)]
        filling = self._begun.get(gap.ends, gap)
        is_member = self._shell.me in other.tip.members  # strangers are shown none
        page = between(other.chain, filling.question) if is_member else ()
        self._shell.after(ANSWER_S, self._came, filling, page)

    def _came(self, filling: Filling, page: Sequence[Link]) -> None:
        is_sound = partial(sound, run=self._shell.machine.rules.run, holds=holds)
        try:
            filling = filling.extended(page, is_sound)
        except BadMessage:  # it has nothing of it
            self._shell.after(AGAIN_S, self._look)
            return
        self._begun[filling.ends] = filling
        chain = self._shell.machine.chain
        _, problem = filled(chain, filling.path)
        if problem is None or filling.links[-1].head.code >= chain.tip.code:
            del self._begun[filling.ends]
        if problem is None:
            self._shell.tell(HeadsFound(filling.path))
        self._shell.after(NEXT_S, self._look)
