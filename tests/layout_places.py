"""The places of a model's tensors in its layout."""

from swarm.experts import Slice
from swarm.protocol.values.layout import Layout


def places_of(layout: Layout) -> dict[str, list[tuple[str, Slice]]]:
    """Name of a tensor -> its units and slices, in element order."""
    found: dict[str, list[tuple[str, Slice]]] = {name: [] for name in layout.shapes}
    for unit in layout.units:
        for piece in unit.slices:
            found[piece.name].append((unit.unit, piece))
    return found
