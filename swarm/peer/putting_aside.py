"""Local progress of shared tensors that lies in the store while others take its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from swarm.codecs import encoded
from swarm.deltas.units import Parts, overwrite
from swarm.experts import ELEMENT_BYTES, UnitLayout
from swarm.network.blobs import BlobStore
from swarm.network.contents import reader, write
from swarm.peer.unit_threads import UnitThreads
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import Digest, Unit

Patiently = Callable[[Callable[[], Digest]], Digest]


@contextmanager
def put_aside(
    engine: Parts,
    store: BlobStore,
    layout: Layout,
    units: Collection[Unit],
    begin_anew: Callable[[Unit], None],
    *,
    threads: UnitThreads,
    patiently: Patiently,
) -> Iterator[None]:
    """Has the agreed values of these units in the engine for as long as it lasts.

    Args:
        engine: trains them.
        store: has their local progress meanwhile, in fp32.
        layout: of the run.
        units: with values in the engine that are not the agreed ones.
        begin_anew: gives the engine the agreed value of a unit.
        threads: to do that.
        patiently: writes progress into the store, again where that may help.

    Raises:
        StateError: progress could not be written, and all of it is in the engine, or not be read
            again, and the engine is of no use any more.
    """
    aside: dict[Unit, Digest] = {}
    elements = sum(layout.by_unit[unit].num_elements for unit in units)

    def put(unit: Unit) -> None:
        local = encoded(_in_fp32(layout.by_unit[unit]), engine.read_part)
        aside[unit] = patiently(lambda: write(store.draft(local.num_bytes), local))
        begin_anew(unit)

    def put_back(unit: Unit) -> None:
        overwrite(engine, _in_fp32(layout.by_unit[unit]), reader(store, aside[unit]))

    try:
        threads.each(put, sorted(units), elements)
        yield
    finally:
        threads.each(put_back, list(aside), elements)
        store.unpin(aside.values())


def _in_fp32(layout: UnitLayout) -> UnitLayout:
    """The same elements, in the bits of their masters."""
    num_bytes = layout.num_elements * ELEMENT_BYTES["fp32"]
    return replace(layout, codec="fp32", num_bytes=num_bytes)
