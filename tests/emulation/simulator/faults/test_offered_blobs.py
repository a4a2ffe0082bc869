"""After a crash only synced blobs of an offer are left [P6] (delta means)."""

from dataclasses import replace
from random import Random

import pytest

from swarm.emulation.simulator.fault_schedule import build
from swarm.emulation.simulator.faults.faults import draw
from swarm.emulation.simulator.faults.hostile import ALL_CLASSES

SEEDS = range(6)


def quiet(fault_class, seed):
    """A swarm of a class without faults."""
    random = Random(f"{fault_class}:{seed}")
    return build(replace(draw(ALL_CLASSES[fault_class], random), script=()), random)


def offered_before_a_crash(world):
    """Blobs of the first offer, of coded and other units, and those left by a crash."""
    offers = []
    world.invariants.offered = lambda peer, offer: offers.append((peer, offer))
    world.run(lambda: offers)
    (peer, offer), coding = offers[0], world.task.rules.unit_coding
    disk = world.disks[peer]
    blobs = {
        unit: {digest for digest in (value.digest, value.delta) if digest}
        for unit, value in offer.units.items()
    }
    assert all(digest in disk for digests in blobs.values() for digest in digests)
    world.crash(peer)
    coded = set().union(*(digests for unit, digests in blobs.items() if unit in coding))
    others = set().union(*blobs.values()) - coded
    return coded, others, {digest for digest in coded | others if digest in disk}


@pytest.mark.parametrize("fault_class", "AR")
def test_values_are_lost_that_no_manifest_has_had_synced(fault_class):
    lost = kept = 0
    for seed in SEEDS:
        _, others, left = offered_before_a_crash(quiet(fault_class, seed))
        lost, kept = lost + len(others - left), kept + len(others & left)
    assert lost > kept > 0  # some survive by luck


def test_deltas_are_durable_when_they_are_offered():
    found = 0
    for seed in SEEDS:
        coded, _, left = offered_before_a_crash(quiet("R", seed))
        assert coded <= left
        found += len(coded)
    assert found > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_an_offer_on_disk_is_there_with_all_its_blobs(seed):
    world = quiet("r", seed)
    world.run(lambda: any(disk.offer for disk in world.disks.values()))
    peer = next(peer for peer, disk in world.disks.items() if disk.offer)
    world.crash(peer)
    offer = world.disks[peer].offer
    assert offer.blobs and all(digest in world.disks[peer] for digest in offer.blobs)
