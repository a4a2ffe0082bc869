"""Means of deltas and rebuilt values in a store: bits, durability, lifetimes."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from swarm.codecs import values_in
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.disk_work import sync_manifest
from swarm.network.rounds.reductions import LeftOver, Mean, Reductions
from swarm.protocol.messages.events import Rebuild, Reduce
from swarm.protocol.messages.messages import ReducedUnit
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Entry, Kind, Manifest
from tests.deltas.units import applied, base_of, encoded, gaussian, unit
from tests.protocol.round_pump import found, make_rules

SIZE = 3000
NAME = "expert.0"
LAYOUT = unit("b2", "bf16", SIZE)
BASE = base_of(LAYOUT, gaussian(SIZE, seed=1))
DELTAS = [encoded(LAYOUT, gaussian(SIZE, seed=seed, scale=1e-2)) for seed in (2, 3)]
PEERS = ("A", "B")


class Bench:
    """A store on a disk with a base and two deltas, and the reductions in it."""

    def __init__(self, folder: Path) -> None:
        self.store, self.told = BlobStore(folder), list[str]()
        self.base = self.store.put(BASE)
        self.inputs = tuple(
            (peer, self.store.put(blob)) for peer, blob in zip(PEERS, DELTAS, strict=True)
        )
        draft = partial(self.store.draft, on_finish=self.told.append)
        self.reducing = Reductions(self.store, Layout((LAYOUT,), {}), draft, self.told.append)

    def mean(self, carried: str | None = None, number: int = 2) -> Mean:
        effect = Reduce("roster", NAME, self.inputs[:number], None, self.base)
        mean = self.reducing.mean(effect, carried)
        assert mean
        return mean

    def rebuild(self, **changes: str) -> str | None:
        value = digest_of(applied(LAYOUT, BASE, DELTAS[0]))
        effect = Rebuild(NAME, self.base, self.inputs[0][1], value)
        return self.reducing.rebuild(replace(effect, **changes))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_mean_of_deltas_is_a_delta_and_the_value_that_it_makes(bench: Bench) -> None:
    mean = bench.mean()
    delta, value = mean.result.delta, bench.store.get(mean.result.digest)
    assert delta and value and mean.left
    assert bench.told == [delta, mean.result.digest]
    blob = bench.store.get(delta)
    assert blob and bytes(value) == applied(LAYOUT, BASE, blob)
    assert mean.result.num_bytes == LAYOUT.num_bytes
    again = bench.mean(mean.left)
    assert again.result.digest != mean.result.digest


def test_both_are_durable_before_anybody_hears_of_them(bench: Bench, tmp_path: Path) -> None:
    mean = bench.mean()
    again = BlobStore(tmp_path)
    assert mean.result.delta and mean.left
    assert again.has(mean.result.digest) and again.has(mean.result.delta)
    assert not again.has(mean.left), "a restart drops remainders"


def test_a_mean_whose_base_or_remainder_was_collected_is_not_made_up(bench: Bench) -> None:
    effect = Reduce("roster", NAME, bench.inputs, None, bench.base)
    assert bench.reducing.mean(effect, "0" * 64) is None
    assert bench.reducing.mean(replace(effect, base="0" * 64), None) is None
    assert bench.told == []


def test_a_value_is_rebuilt_of_base_and_delta(bench: Bench) -> None:
    assert bench.rebuild() is None
    (digest,) = bench.told
    bench.store.collect(set())
    assert bench.store.has(digest), "it is pinned until the machine has heard of it"


@pytest.mark.parametrize("missing", ["base", "delta"])
def test_a_value_is_not_rebuilt_of_what_is_not_here(bench: Bench, missing: str) -> None:
    problem = bench.rebuild(**{missing: "0" * 64})
    assert problem and "no longer here" in problem
    assert bench.told == []


def test_other_bits_are_not_kept(bench: Bench) -> None:
    problem = bench.rebuild(digest="0" * 64)
    assert problem and "makes" in problem
    assert bench.told == []
    bench.store.collect(set())
    assert len(bench.store) == 0


def test_a_delta_that_is_no_delta_is_a_problem_and_no_failure(bench: Bench) -> None:
    problem = bench.rebuild(delta=bench.store.put(b"\xff" * len(DELTAS[0])))
    assert problem and "scale" in problem
    problem = bench.rebuild(delta=bench.store.put(b"\x00" * 5))
    assert problem and "5 bytes" in problem
    bench.store.collect(set())
    assert len(bench.store) == 0


@pytest.mark.parametrize("has_deltas", [True, False])
def test_a_manifest_is_durable_with_its_deltas_or_without(
    bench: Bench, tmp_path: Path, has_deltas: bool
) -> None:
    """Its voters have the deltas. A peer that took its values instead need not have them."""
    blobs = {word: bench.store.put(word) for word in (b"c", b"v")}
    founding = replace(TIP.founding, config=blobs[b"c"], validation=blobs[b"v"])
    delta = bench.store.put(b"delta") if has_deltas else digest_of(b"delta")
    entry = Entry(bench.base, len(BASE), 1, "A", "bf16", "b" * 64, delta, "b2")
    sources = {NAME: (("A", delta),)}
    manifest = replace(TIP, founding=founding, entries={NAME: entry}, sources=sources)
    sync_manifest(bench.store, manifest)
    again = BlobStore(tmp_path)
    assert again.has(manifest.blob) and again.has(bench.base)
    assert again.has(delta) == has_deltas


# ------------------------------------------------ remainders


RULES = make_rules()
TIP = found(RULES, ["A", "B"])


def after(tip: Manifest, mean: Mean | None) -> Manifest:
    """A round with this mean, or with another one."""
    result = mean.result if mean else ReducedUnit("f" * 64, 8, "e" * 64)
    entry = Entry(result.digest, 8, 1, "A", "bf16", "b" * 64, result.delta, "b2")
    return replace(
        tip,
        height=tip.height + 1,
        round=tip.round + 1,
        kind=Kind.QUORUM,
        parent=tip.digest,
        entries={**tip.entries, NAME: entry},
        sources={NAME: (("A", "1" * 64), ("B", "2" * 64))},
    )


def test_what_is_left_over_is_carried_once_the_mean_is_agreed(bench: Bench) -> None:
    left_over = LeftOver(bench.store, TIP, RULES)
    effect, mean = Reduce("roster", NAME, bench.inputs, None, bench.base), bench.mean()
    left_over.found(TIP, NAME, mean)
    left_over.found(TIP, NAME, bench.mean())  # another attempt at the round, with the same bits
    assert left_over.of(effect) is None
    agreed = after(TIP, mean)
    left_over.applied(agreed)
    assert left_over.of(effect) == mean.left
    assert left_over.of(replace(effect, base=None)) is None
    bench.store.collect(set())
    assert mean.left and bench.store.has(mean.left)
    wanted = (gaussian(SIZE, seed=2, scale=1e-2) + gaussian(SIZE, seed=3, scale=1e-2)) / 2
    carried = values_in(bench.store.get(mean.left) or b"", "fp32")
    assert 0 < carried.norm() < wanted.norm()


def test_what_is_left_of_a_unit_that_is_due_every_fifth_round_is_there_then(bench: Bench) -> None:
    left_over = LeftOver(bench.store, TIP, make_rules(shared_every=5, stagger=True))
    mean, tip = bench.mean(), TIP
    left_over.found(TIP, NAME, mean)
    tip = after(TIP, mean)
    left_over.applied(tip)
    for _ in range(4):
        tip = replace(after(tip, mean), sources={})
        left_over.applied(tip)
    effect = Reduce("roster", NAME, bench.inputs, None, bench.base)
    assert mean.left and left_over.of(effect) == mean.left


def test_what_was_left_over_by_a_mean_that_is_not_agreed_is_let_go(bench: Bench) -> None:
    left_over = LeftOver(bench.store, TIP, RULES)
    mean = bench.mean()
    left_over.found(TIP, NAME, mean)
    left_over.applied(after(TIP, None))
    assert left_over.of(Reduce("roster", NAME, bench.inputs, None, bench.base)) is None
    bench.store.collect(set())
    assert mean.left and not bench.store.has(mean.left)


def test_what_comes_too_late_for_its_tip_is_let_go(bench: Bench) -> None:
    left_over = LeftOver(bench.store, TIP, RULES)
    left_over.applied(after(TIP, None))
    mean = bench.mean()
    left_over.found(TIP, NAME, mean)
    bench.store.collect(set())
    assert mean.left and not bench.store.has(mean.left)


def test_means_of_values_leave_nothing_over(bench: Bench) -> None:
    values = [BASE, applied(LAYOUT, BASE, DELTAS[0])]
    inputs = [(peer, bench.store.put(v)) for peer, v in zip(PEERS, values, strict=True)]
    mean = bench.reducing.mean(Reduce("roster", NAME, tuple(inputs)), None)
    assert mean and mean.left is None and mean.result.delta is None
    one, two = (values_in(value, "bf16").float() for value in values)
    found_value = values_in(bench.store.get(mean.result.digest) or b"", "bf16")
    assert torch.equal(found_value, ((one + two) / 2).bfloat16())
