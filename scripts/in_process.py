"""A swarm in one process, without a network: for measurements of what a method does to the loss.

Nothing is computed here. Local steps, weights of a mean, the mean, owners and merges are the
functions that a peer calls; a test compares the outcome, bit for bit, with the plain reference of
SPES that real swarms are compared with. Values are not encoded, so a run must be exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from swarm.codecs import mean_chunk
from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.data.loader import Loader
from swarm.experts import Slice, all_shapes, expert_shapes, shared_shapes
from swarm.model.initialise import initial_tensors
from swarm.model.merge import donors_of, merged_part
from swarm.protocol.merging import alpha_at, merge_due, merged_until
from swarm.protocol.ownership import assign
from swarm.protocol.weights import weights
from swarm.train.local_steps import Task, train_local_steps
from swarm.train.resident import ResidentEngine


class Tip(NamedTuple):
    """What decides of a manifest whether a merge is due."""

    step: int
    merged: int


class InProcessSwarm:
    """`run.peers` peers that are never left out, with experts that never move."""

    def __init__(self, run: RunConfig, loader: Loader) -> None:
        """All with the initial model and their shares of the experts."""
        exact = {run.wire.shared, run.wire.experts, run.train.frozen, run.train.compute}
        assert (
            exact == {"fp32"}
            and run.round.experts_every == 1
            and not run.round.stagger
            and not run.round.seconds
        )
        self.run, self.loader = run, loader
        self.peers = tuple(f"peer-{number:02}" for number in range(run.run.peers))
        self.owners = assign(
            {},
            dict.fromkeys(self.peers, 1.0),
            self.peers,
            stale=(),
            owners_per_expert=run.ownership.owners_per_expert,
            num_experts=run.model.num_experts,
            seed=run.run.name,
        ).owners
        self.agreed = initial_tensors(run, list(all_shapes(run.model)))
        self.engines = {peer: ResidentEngine(run) for peer in self.peers}
        for peer, engine in self.engines.items():
            engine.write(self.agreed)
            engine.own([expert for expert, owners in self.owners.items() if peer in owners])
        self.tip, self.tokens, self.merges = Tip(0, 0), 0, 0

    def round(self) -> None:
        """Local steps of each peer, what they agree on, and a merge if one is due."""
        phase = self.run.phase_at(self.tokens)
        work = {peer: self._train(peer) for peer in self.peers}
        self.agreed = self._mean(shared_shapes(self.run.model), self.peers, work)
        for expert, owners in self.owners.items():
            self.agreed |= self._mean(expert_shapes(self.run.model, expert), owners, work)
        self.tip = self.tip._replace(step=self.tip.step + phase.local_steps)
        if merge_due(self.tip, self.run.merging):  # type: ignore[arg-type]  # reads these two only
            self._merge()
        for engine in self.engines.values():
            engine.write(self.agreed)

    def loss(self, held_out: HeldOut) -> float:
        """Held-out loss of the agreed model, nats per token."""
        engine = self.engines[self.peers[0]]
        return held_out.mean(lambda tokens, scored: engine.evaluate(tokens, scored_BT=scored))

    def _train(self, peer: str) -> int:
        """One peer's local steps on the next samples; gives the tokens they predicted."""
        phase, length = self.run.phase_at(self.tokens), self.run.data.sequence_length
        first = self.tokens // length
        samples = phase.local_steps * phase.batch_tokens // length
        stats = train_local_steps(
            self.engines[peer],
            self.loader,
            self.run,
            Task(peer, self.tip.step, ((first, first + samples),), phase.batch_tokens),
            left=lambda steps, _: phase.local_steps - steps,
            stop=lambda: False,
            on_step=lambda *_: None,
        )
        self.tokens += stats.tokens
        return stats.tokens

    def _mean(
        self, names: Iterable[str], sources: Iterable[str], work: dict[str, int]
    ) -> dict[str, Tensor]:
        """The weighted mean of some tensors over their sources, in peer-id order."""
        names, sources = list(names), sorted(sources)
        values = [self.engines[peer].read(names) for peer in sources]
        shares = weights(work, sources)
        return {name: mean_chunk([each[name] for each in values], shares) for name in names}

    def _merge(self) -> None:
        """All experts move towards their donors, from the agreed values before."""
        run, agreed = self.run, self.agreed

        def read(part: Slice) -> Tensor:
            return agreed[part.name].view(-1)[part.start : part.stop]

        donors = donors_of(read, run.model, run.merging.top_k)
        alpha = alpha_at(self.tip.step, run.merging)
        merged = partial(merged_part, read=read, donors=donors, alpha=alpha)
        self.agreed = agreed | {
            name: merged(Slice(name, 0, math.prod(shape))).view(shape)
            for expert in range(run.model.num_experts)
            for name, shape in expert_shapes(run.model, expert).items()
        }
        self.tip = self.tip._replace(merged=merged_until(self.tip.step, run.merging))
        self.merges += 1
