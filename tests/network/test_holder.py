"""What a holder keeps: bounded, members first, then whoever takes least room."""

from __future__ import annotations

from collections import Counter

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.network import holder
from swarm.network.holder import (
    MAX_HELD_BYTES,
    MAX_LIFE_S,
    MAX_OWNER_BYTES,
    MAX_STRANGERS_BYTES,
    OVERHEAD_BYTES,
    HeldRecords,
)

KEY = DHTID.generate(source="a key")
OTHER = DHTID.generate(source="another key")
SMALL, LARGE = 1_000, 16_000


@pytest.fixture(autouse=True)
def owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subkey is the owner's name here."""
    monkeypatch.setattr(holder, "owner_of", lambda subkey: subkey.decode() or None)


class Holder:
    """A holder whose members' names begin with `m`."""

    def __init__(self, limits: dict[DHTID, int] | None = None) -> None:
        self.refused: Counter[str] = Counter()
        self.refuse = lambda reason: self.refused.update([reason])
        self.held = HeldRecords(lambda owner: owner.startswith("m"), self.refuse, limits or {})

    def store(self, owner: str, num_bytes: int, key: DHTID = KEY, life_s: float = 60.0) -> bool:
        value = bytes(num_bytes - len(owner) - OVERHEAD_BYTES)
        return self.held.store_subkey(key, owner.encode(), value, get_dht_time() + life_s)

    def flood(self, name: str, num_bytes: int, times: int) -> int:
        return sum(self.store(f"{name}{number}", num_bytes) for number in range(times))

    def owners(self, key: DHTID = KEY) -> set[str]:
        found = self.held.get(key)
        return {subkey.decode() for subkey, _ in found.value.items()} if found else set()


def test_a_record_is_replaced_by_its_owner_s_later_one_and_gone_when_it_expires() -> None:
    one = Holder()
    assert one.store("a", SMALL, life_s=30) and one.store("a", LARGE, life_s=60)
    assert not one.store("a", SMALL, life_s=45), "an older one never comes back"
    assert one.held.num_bytes == LARGE
    assert not one.store("b", SMALL, life_s=-1)
    assert one.owners() == {"a"} and one.owners(OTHER) == set()
    assert not one.held.store(KEY, b"of nobody", get_dht_time() + 60)


def test_what_all_take_is_bounded_whoever_writes() -> None:
    one = Holder()
    one.flood("s", LARGE, 200)
    assert one.held.num_bytes <= MAX_STRANGERS_BYTES
    one.flood("m", LARGE, 400)
    assert MAX_HELD_BYTES - LARGE < one.held.num_bytes <= MAX_HELD_BYTES
    packed = [MSGPackSerializer.dumps(found.value) for _, found in one.held.items()]
    assert sum(map(len, packed)) < MAX_HELD_BYTES, "the figure is that of the message"
    assert one.refused["record_room"] > 0


def test_strangers_neither_push_out_nor_shut_out_a_member() -> None:
    one = Holder()
    one.store("m-before", LARGE)
    one.flood("s", 300, 5_000)
    assert one.store("m-after", LARGE) and one.store("m-before", LARGE, life_s=90)
    assert {"m-before", "m-after"} <= one.owners()


def test_members_get_the_room_of_strangers_when_it_is_short() -> None:
    one = Holder()
    one.flood("s", LARGE, 100)
    assert one.flood("m", LARGE, MAX_HELD_BYTES // LARGE) == MAX_HELD_BYTES // LARGE
    assert all(owner.startswith("m") for owner in one.owners())


def test_among_strangers_whoever_takes_most_gives_way_and_the_first_stays() -> None:
    one = Holder()
    one.store("honest", SMALL)
    one.flood("greedy", LARGE, 200)
    assert "honest" in one.owners() and one.store("late", SMALL)
    equal = Holder()
    equal.store("honest", SMALL)
    kept = equal.flood("s", SMALL, 2_000)
    assert kept < 2_000 and "honest" in equal.owners(), "equals wait until there is room"
    assert equal.store("honest", SMALL, life_s=90), "it renews what it has"


def test_one_owner_has_a_bound_over_all_keys() -> None:
    one = Holder()
    keys = [DHTID.generate(source=str(number)) for number in range(10)]
    kept = sum(one.store("s", LARGE, key) for key in keys)
    assert kept == MAX_OWNER_BYTES // LARGE


def test_a_known_key_has_a_limit_of_its_own_and_no_record_lives_long() -> None:
    one = Holder({KEY: SMALL})
    assert not one.store("a", SMALL + 1) and one.store("a", SMALL + 1, OTHER)
    assert not one.store("b", SMALL, life_s=MAX_LIFE_S + 5)
    assert one.refused == {"record_size": 1, "record_expiration": 1}


def test_what_hivemind_s_own_storage_took_before_is_taken_over() -> None:
    before, one = DHTLocalStorage(), Holder()
    before.store_subkey(KEY, b"a", b"x", get_dht_time() + 60)
    before.store_subkey(OTHER, b"m", b"y", get_dht_time() + 60)
    one.held.take_over(before)
    assert one.owners() == {"a"} and one.owners(OTHER) == {"m"}
