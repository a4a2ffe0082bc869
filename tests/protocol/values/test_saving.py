"""The durable state before an offer in rounds with slices, and its use by a restart [P6]."""

from dataclasses import replace

import pytest

from swarm.protocol.rounds import Rules
from swarm.protocol.training import Applied, SavedWork, Training
from swarm.protocol.values.manifest import Kind, Manifest
from tests.protocol.values.test_training import (
    FIRST,
    SLICED,
    Done,
    Peer,
    after,
    applied,
    renewed,
    saved_on,
)

CYCLE = SLICED.schedule.cycle
CODED: Rules = replace(
    SLICED,
    unit_coding=dict.fromkeys(SLICED.unit_bytes, "b2"),
    delta_bytes=dict.fromkeys(SLICED.unit_bytes, 10),
)
OVERLAPPED: Rules = replace(CODED, overlaps=True)


def tips(number: int) -> list[Manifest]:
    """A chain of rounds, each with this peer's offer."""
    found = [FIRST]
    for _ in range(number):
        found.append(renewed(found[-1], ("me", "you")))
    return found


def offered_on(tip: Manifest) -> SavedWork:
    """A peer's durable state of its offer on a tip."""
    units = SLICED.schedule.due_of("me", tip)
    bases = {e: tip.entries[f"expert.{e}"].digest for e in tip.owners if "me" in tip.owners[e]}
    offered = {unit: f"offered.{unit}" for unit in units}
    return saved_on(tip, offered=offered, expert_bases=bases, data_position=3)


def test_the_private_state_is_saved_once_a_cycle_and_each_offer_by_itself() -> None:
    chain = tips(CYCLE + 1)
    peer = Peer([applied(tip) for tip in chain[1:]], at=Applied(FIRST, 0.0)).go(rules=CODED)
    saves = [call for call in peer.calls if call.name in ("save", "save_offer")]
    between = ["save_offer"] * (CYCLE - 1)
    assert [call.name for call in saves] == ["save", *between, "save", "save_offer"]
    assert [call.work.base_tip for call in saves] == [tip.digest for tip in chain]
    assert len(peer.offers) == len(saves)


def test_without_codings_each_round_saves_all_and_goes_on_in_the_same_bits() -> None:
    chain = tips(CYCLE)
    peer = Peer([applied(tip) for tip in chain[1:]], at=Applied(FIRST, 0.0)).go(rules=SLICED)
    assert len(peer.of("save")) == len(chain)
    assert peer.of("save_offer") == []


def test_an_offer_newer_than_the_private_state_is_offered_again_and_waited_for() -> None:
    first, second = tips(2)[1:]
    peer = Peer(
        [applied(second)], saved=saved_on(FIRST), offer=offered_on(first), at=Applied(first, 0.0)
    )
    peer.go(rules=CODED)
    begun = peer.names()[: peer.names().index("adopt", peer.names().index("submit"))]
    assert "train" not in begun, "the model does not contain the offer"
    offer = peer.offers[0]
    assert offer.tip == first.digest
    assert {u: value.digest for u, value in offer.units.items()} == offered_on(first).offered
    assert all(value.base == first.entries[unit].digest for unit, value in offer.units.items())
    decision = peer.of("adopt")[-1].decision
    assert decision.begins_anew(SLICED.schedule.due(first)), "others have steps that it lacks"
    assert peer.of("lose") == []
    assert peer.of("train")[0].tip == second


def test_an_offer_that_a_round_decided_on_is_not_made_again() -> None:
    first, second = tips(2)[1:]
    peer = Peer([], saved=saved_on(FIRST), offer=offered_on(first), at=Applied(second, 0.0))
    peer.go(rules=CODED)
    assert next(name for name in peer.names() if name in ("submit", "train")) == "train"


def test_an_offer_goes_to_a_reform_and_is_lost_if_a_round_leaves_it_out() -> None:
    first = tips(1)[1]
    reform = after(first, kind=Kind.REFORM, contributors=first.contributors)
    left_out = renewed(reform, ("you",))
    peer = Peer(
        [applied(reform), applied(left_out)],
        saved=saved_on(FIRST),
        offer=offered_on(first),
        at=Applied(first, 0.0),
    )
    peer.go(rules=CODED)
    again = peer.offers[:2]
    assert [offer.tip for offer in again] == [first.digest, reform.digest]
    assert again[0].units == again[1].units
    assert [lose.tokens for lose in peer.of("lose")] == [1000]
    assert peer.names().count("release") == 1, "its blobs are kept until it is decided"


def test_a_peer_that_is_to_offer_other_units_by_now_makes_no_old_offer() -> None:
    first = tips(1)[1]
    other = replace(offered_on(first), offered={"shared.0": "offered"})
    peer = Peer([], saved=saved_on(FIRST), offer=other, at=Applied(first, 0.0)).go(rules=CODED)
    units = peer.offers[0].units
    assert {unit: value.digest for unit, value in units.items()} == {
        unit: f"trained.{unit}" for unit in SLICED.schedule.due_of("me", first)
    }


@pytest.mark.parametrize("position", [0, 9])
def test_a_text_of_ones_own_is_not_read_twice(position: int) -> None:
    first = tips(1)[1]
    saved = saved_on(FIRST, data_position=position)
    peer = Peer([], saved=saved, offer=offered_on(first), at=Applied(first, 0.0))
    training = Training(peer, "me", CODED, 9)
    training.resume()
    assert training.reading.position == max(position, 3)


def test_a_peer_at_rest_saves_what_it_has_beyond_its_private_state() -> None:
    chain = tips(2)
    half = Done(steps=1, tokens=100, completed=False)
    peer = Peer(
        [applied(tip) for tip in chain[1:]],
        steps=[Done(), Done(), half],
        at=Applied(FIRST, 0.0),
    )
    training = Training(peer, "me", OVERLAPPED, 9)
    training.tip, training.is_unsaved = chain[2], True
    training.work = half
    rest = training.unsaved()
    assert rest is not None and not rest.is_offered
    assert (rest.base_tip, rest.steps, rest.tokens) == (chain[2].digest, 1, 100)
    training.ahead.flight = Done()
    assert training.unsaved() is None, "the offer is not decided"
    training.ahead.flight, training.is_unsaved = None, False
    assert training.unsaved() is None, "it was saved with the last offer"


def test_steps_that_were_saved_at_rest_are_behind_and_go_with_the_next_offer() -> None:
    rest = saved_on(FIRST, is_offered=False, steps=1, tokens=100)
    peer = Peer([], saved=rest, at=Applied(FIRST, 0.0))
    training = Training(peer, "me", OVERLAPPED, 9)
    training.resume()
    assert training.work is None
    assert (training.ahead.behind.steps, training.ahead.behind.tokens) == (1, 100)
