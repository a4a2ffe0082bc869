"""Local progress of shared tensors that lies in the store while others take its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from swarm.codecs import encoded, read_parts
from swarm.experts import UnitLayout
from swarm.network.blobs import BlobStore
from swarm.network.contents import reader, write
from swarm.protocol.layout import ELEMENT_BYTES, Layout
from swarm.protocol.manifest import Unit
from swarm.train.engine import Engine


@contextmanager
def put_aside(
    engine: Engine,
    store: BlobStore,
    layout: Layout,
    units: Collection[Unit],
    begin_anew: Callable[[Unit], None],
) -> Iterator[None]:
    """Has the agreed values of these units in the engine for as long as it lasts.

    Args:
        engine: trains them.
        store: has their local progress meanwhile, in fp32.
        layout: of the run.
        units: with values in the engine that are not the agreed ones.
        begin_anew: gives the engine the agreed value of a unit.
    """
    aside = {}
    try:
        for unit in sorted(units):
            local = encoded(_in_fp32(layout.by_unit[unit]), engine.read_part)
            aside[unit] = write(store.draft(local.num_bytes), local)
            begin_anew(unit)
        yield
    finally:
        for unit, digest in aside.items():
            exact = _in_fp32(layout.by_unit[unit])
            for part, values in read_parts(exact, reader(store, digest)):
                engine.write_part(part, values)
        store.unpin(aside.values())


def _in_fp32(layout: UnitLayout) -> UnitLayout:
    """The same elements, in the bits of their masters."""
    return replace(layout, codec="fp32", num_bytes=layout.num_elements * ELEMENT_BYTES["fp32"])
