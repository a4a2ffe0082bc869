"""A main loop, or what it drives, with one rule removed; `mutants.py` names the rule."""

# What a method here does is what the rule's method would do without the rule.
# ruff: noqa: D102

from __future__ import annotations

from dataclasses import replace

from swarm.emulation.simulator.model import Model
from swarm.emulation.simulator.trainer import Trainer
from swarm.emulation.simulator.values import Merged
from swarm.experts import expert_unit
from swarm.protocol.adoption import Action, Adoption
from swarm.protocol.manifest import Digest, Manifest
from swarm.protocol.merging import merge_due
from swarm.protocol.messages import Offer
from swarm.protocol.training import Training


class NoBaseCheck(Training):
    """Keeps progress whatever it was trained from [S2]."""

    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        adoption = super().decide(manifest, previous)
        experts = {
            expert: replace(choice, action=Action.KEEP)
            if choice.action is Action.RESTART
            else choice
            for expert, choice in adoption.experts.items()
        }
        return replace(adoption, experts=experts)


class OfferedBeforeSaved(Training):
    """Offers what a crash would make it forget [P6]."""

    async def offer(self) -> None:
        assert self.work is not None
        work, units = self.work, self.shell.store(self.tip, self._bases_of_due(), self.work.tokens)
        offer = Offer(self.tip.digest, work.steps, work.tokens, units, work.seconds)
        self.shell.submit(self.tip, offer)


class NoBaseCheckAtMerge(Training):
    """Moves progress with a merge whatever it was trained from [M8]."""

    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        adoption = super().decide(manifest, previous)
        experts = {
            expert: replace(choice, action=Action.REBASE, rebase_from=before)
            if choice.action is Action.RESTART
            and (before := manifest.entries[expert_unit(expert)].base) is not None
            else choice
            for expert, choice in adoption.experts.items()
        }
        return replace(adoption, experts=experts)


class MergingModel(Model):
    """Reads merged experts out of a manifest that is only due for a merge."""

    def _agreed(self, manifest: Manifest, expert: int) -> Digest:
        if not merge_due(manifest, self.task.rules.merging):
            return super()._agreed(manifest, expert)
        units = (expert_unit(each) for each in range(self.task.rules.num_experts))
        inputs = tuple(manifest.entries[unit].digest for unit in units)
        return self.task.values.digest_of(Merged(inputs, expert, 0))


class MergesOnApply(Trainer):
    """Merges by itself as soon as a merge is due [M1]."""

    model_type = MergingModel
