"""Callbacks with which an observer (a script, a program, a drill) follows a peer."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.network.rounds.round_driver import RoundObserver
from swarm.protocol.records.records import PeerState
from swarm.protocol.values.manifest import Manifest
from swarm.train.engine.engine import StepStats
from swarm.train.engine.local_steps import LocalStats


@dataclass(frozen=True)
class RoundReport:
    """The effect of one applied manifest on this peer.

    Attributes:
        manifest: the agreed state, with its round, members and owners of experts.
        stats: figures of the local steps for the manifest; None if this peer took none.
        counted: whether this peer's shared tensors are in the mean.
        wait_s: seconds from the offer until the manifest was applied.
        reason: reason for the protocol's decision, in a sentence.
    """

    manifest: Manifest
    stats: LocalStats | None
    counted: bool
    wait_s: float
    reason: str


class PeerObserver(RoundObserver):
    """Callbacks of a peer. A subclass overrides those that it needs; the others do nothing.

    The peer waits for each callback, so a callback must be short. An exception in a callback ends
    the training. Callbacks run in the thread that calls `Peer.train`, unless their docstring says
    otherwise.
    """

    def on_address(self, address: str) -> None:
        """The network is up, and others may join at this address; the first callback."""

    def on_invitation(self, text: str) -> None:
        """This peer founds a run that others join with this text; called before `on_address`."""

    def on_notice(self, line: str) -> None:
        """A sentence about something that joiners need, such as the run's text."""

    def on_joining(self) -> None:
        """This peer looks for a run to join, as a stranger."""

    def on_fetched(self, here: int, total: int) -> None:
        """So many bytes of the model have arrived; called in the node's thread while joining."""

    def on_state(self, state: PeerState) -> None:
        """The peer enters another state, such as training or averaging."""

    def on_step(self, step: int, stats: StepStats) -> None:
        """A local step was done.

        Args:
            step: number of the step in the run, from 0, which counts each step of a round once.
            stats: losses (nats per token), gradient norm and tokens of this peer's batch.
        """

    def on_saving(self) -> None:
        """The offered values are stored, but the private state is not durable yet."""

    def on_round(self, report: RoundReport) -> None:
        """A manifest was applied: this peer's model is now the agreed model."""

    def on_validation(self, round_number: int, val_loss: float, bits_per_byte: float) -> None:
        """This peer measured the state after a round on the held-out text.

        Args:
            round_number: number of the round.
            val_loss: the loss in nats per token.
            bits_per_byte: the same loss, comparable between tokenizers.
        """


UNOBSERVED = PeerObserver()
