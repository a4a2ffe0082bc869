"""A model without its main loop: moves to a manifest, and gives what is offered on it."""

from collections.abc import Iterator, Sequence

from swarm.codecs import Content
from swarm.experts import expert_of_unit
from swarm.peer.live_model import LiveModel
from swarm.protocol.adoption import Adoption, adopt, due_units
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.messages import Offer


def adopt_into(
    model: LiveModel, manifest: Manifest, *, previous: Digest, offers: Sequence[Offer] = ()
) -> Adoption:
    """Returns what was decided."""
    decision = adopt(model.me, manifest, previous=previous, bases=model.bases, offers=offers)
    model.adopt(manifest, decision)
    return decision


def offered_values(model: LiveModel, tip: Manifest) -> Iterator[tuple[Unit, Content, Digest]]:
    """Value and base of each unit that is due on a tip."""
    for unit in due_units(model.me, tip, model.run.round.experts_every):
        expert = expert_of_unit(unit)
        base = tip.entries[unit].digest if expert is None else model.bases[expert]
        yield unit, model.value_of(unit), base
