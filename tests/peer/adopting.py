"""A model without its main loop: moves to a manifest, and gives the values offered on it."""

from collections.abc import Iterable, Iterator, Sequence

from swarm.codecs import Content
from swarm.config import RunConfig
from swarm.experts import expert_of_unit
from swarm.network.blobs.blob_store import BlobStore, store_content
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.text.agreed_model import initial_contents
from swarm.peer.training.live_model import LiveModel
from swarm.protocol.messages.messages import Offer
from swarm.protocol.training.adoption import Adoption, adopt
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Digest, Founding, Manifest, Unit
from swarm.protocol.values.schedule import Schedule


def founded_in(store: BlobStore, run: RunConfig, peers: Iterable[str]) -> Manifest:
    """Manifest 0 of a run of these peers. Its initial values are in the store."""
    layout, initial = layout_of(run), {}
    for unit, value in initial_contents(run, layout):
        initial[unit] = (store_content(store, value), value.num_bytes)
    founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
    return founding_manifest(founding, run, layout, initial, dict.fromkeys(peers, 1.0))


def adopt_into(
    model: LiveModel, manifest: Manifest, *, previous: Digest, offers: Sequence[Offer] = ()
) -> Adoption:
    """Returns the decision."""
    decision = adopt(model.me, manifest, previous=previous, bases=model.bases, offers=offers)
    model.adopt(manifest, decision)
    return decision


def offered_values(model: LiveModel, tip: Manifest) -> Iterator[tuple[Unit, Content, Digest]]:
    """Value and base of each unit that is due on a tip."""
    for unit in Schedule(model.run.round.experts_every).due_of(model.me, tip):
        expert = expert_of_unit(unit)
        base = tip.entries[unit].digest if expert is None else model.bases[expert]
        yield unit, model.value_of(unit), base
