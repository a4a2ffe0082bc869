"""Units in memory as blobs, for tests."""

from collections.abc import Mapping

from torch import Tensor

from swarm.codecs import cut_from, encoded
from swarm.experts import UnitLayout


def blob_of(layout: UnitLayout, tensors: Mapping[str, Tensor]) -> bytes:
    """The blob of a unit of these tensors, given by full names."""
    return encoded(layout, cut_from(tensors.__getitem__)).whole()
