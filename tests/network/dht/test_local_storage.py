"""Records that a peer stores for others: bounded, members first, then the smallest users."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.network.dht import local_storage
from swarm.network.dht.local_storage import (
    LEAST_BYTES,
    MAX_HELD_BYTES,
    MAX_LIFE_S,
    MAX_OF_KEY,
    MAX_OWNER_BYTES,
    MAX_STRANGERS_BYTES,
    OVERHEAD_BYTES,
    LocalStorage,
)
from swarm.network.wire.ledger import LIMITS, Cost, Ledger, Limit, Rate

KEY = DHTID.generate(source="a key")
OTHER = DHTID.generate(source="another key")
SMALL, LARGE = 1_000, 16_000


@pytest.fixture(autouse=True)
def owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subkey is the owner's name here."""
    monkeypatch.setattr(local_storage, "owner_of", lambda subkey: subkey.decode() or None)


class Holder:
    """A holder whose members' names begin with `m`."""

    def __init__(
        self, limits: dict[DHTID, int] | None = None, ledger: Ledger | None = None
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.refuse = lambda reason: self.refused.update([reason])
        self.ledger = ledger or Ledger()
        self.ledger.admit(["m", "m-before", "m-after", *[f"m{number}" for number in range(400)]])
        self.located: list[str] = []
        self.held = LocalStorage("me", self.ledger, self.located.append, self.refuse, limits or {})

    def store(self, owner: str, num_bytes: int, key: DHTID = KEY, life_s: float = 60.0) -> bool:
        value = bytes(num_bytes - len(owner) - OVERHEAD_BYTES)
        return self.held.store_subkey(key, owner.encode(), value, get_dht_time() + life_s)

    def store_from(self, network: int, owner: str, num_bytes: int, life_s: float = 60.0) -> bool:
        """A store by a peer of that network, charged before any record is checked."""
        sender = f"sender{network}"
        self.ledger.locate(sender, f"/ip4/10.{network // 256}.{network % 256}.1/tcp/1")
        with self.held.stored_by(sender, num_bytes) as may_store:
            return may_store and self.store(owner, num_bytes, life_s=life_s)

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
    assert equal.store("honest", SMALL, life_s=90), "it renews its own record"


def test_one_owner_has_a_bound_over_all_keys() -> None:
    one = Holder()
    keys = [DHTID.generate(source=str(number)) for number in range(10)]
    assert sum(one.store("s", LARGE, key) for key in keys) == MAX_OWNER_BYTES // LARGE


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


def test_small_records_count_as_2_kib() -> None:
    one = Holder()
    assert one.flood("s", 100, 5_000) == MAX_STRANGERS_BYTES // LEAST_BYTES
    assert one.flood("m", 100, 400) == 400
    assert one.held.num_bytes == 400 * LEAST_BYTES + MAX_STRANGERS_BYTES


def test_who_reads_a_flooded_key_gets_few_records_of_strangers_and_1024_in_all() -> None:
    one, names = Holder(), [f"m{number}" for number in range(1_100)]
    one.flood("s", 150, 4_700)
    assert len(one.owners()) == MAX_STRANGERS_BYTES // LEAST_BYTES
    one.ledger.admit(names)
    assert all(one.store(name, 150) for name in names)
    assert len(one.held._keys[KEY]) > MAX_OF_KEY
    assert len(one.owners()) == MAX_OF_KEY and one.owners() <= set(names), "members go first"


def test_what_is_summed_up_is_the_sum_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one, chance, now_s = Holder(ledger=Ledger(UNPAID)), random.Random(7), get_dht_time()
    monkeypatch.setattr(local_storage, "dht_clock", lambda: lambda: now_s)
    for number in range(3_000):
        owner = chance.choice(["m", "s"]) + str(chance.randrange(300))
        key = chance.choice([KEY, OTHER])
        life_s = now_s - get_dht_time() + chance.uniform(1, 60)
        one.held._network = f"network {chance.randrange(5)}"
        one.store(owner, chance.choice([100, 3_000, LARGE]), key, life_s)
        now_s += chance.expovariate(20)
        if number % 500 == 499:
            one.ledger.admit([f"m{n}" for n in range(number % 300)] + ["s1", "s2"])
        if number % 50 == 0:
            assert_sums_hold(one.held)
    assert min(one.held._sums[True].total, one.held._sums[False].total) > 100_000
    now_s += MAX_LIFE_S
    assert not one.store("m", SMALL, life_s=-1)
    assert one.held.num_bytes == 0 and not one.held._used and not one.held._places


def assert_sums_hold(held: LocalStorage) -> None:
    held._tell_apart()
    all_held = [each for records in held._keys.values() for each in records.values()]
    for is_member, sums in held._sums.items():
        by_origin: Counter[tuple[str, str]] = Counter()
        for each in all_held:
            if held._is_member(each.owner) == is_member:
                by_origin[each.network, each.owner] += each.num_bytes
        networks: Counter[str] = Counter()
        for (network, _), used in by_origin.items():
            networks[network] += used
        assert (sums.total, sums.networks) == (sum(by_origin.values()), networks)
        assert by_origin == {(n, o): u for n, of in sums.owners.items() for o, u in of.items()}
    assert sum(map(len, held._places.values())) == len(all_held)
    assert held.num_bytes == sum(held._used.values()) == sum(each.num_bytes for each in all_held)


# ---------------------------------------------------------------- networks of senders

UNPAID = {**LIMITS, Cost.RECORDS: Limit(*[Rate(1e12)] * 3)}
"""Limits without rate limits, which would stop a flood."""


def test_a_flood_from_one_network_pushes_out_nothing_of_another() -> None:
    one = Holder(ledger=Ledger(UNPAID))
    assert one.store_from(1, "honest", LARGE)
    for number in range(3_000):
        one.store_from(2, f"s{number}", SMALL)
    assert one.held.num_bytes > MAX_STRANGERS_BYTES - LARGE
    assert "honest" in one.owners() and one.store_from(1, "honest", LARGE, life_s=90)
    assert one.store_from(3, "late", LARGE), "the flood gives way"
    assert {"honest", "late"} <= one.owners()


def test_many_networks_have_to_flood_with_as_much_as_an_honest_one_has() -> None:
    one = Holder(ledger=Ledger(UNPAID))
    assert one.store_from(0, "honest", SMALL)
    for number in range(4_000):
        one.store_from(1 + number % 200, f"s{number}", SMALL)
    assert one.store_from(201, "late", SMALL)
    assert {"honest", "late"} <= one.owners()
    assert one.held.num_bytes <= MAX_STRANGERS_BYTES


def test_what_one_sender_and_its_network_may_store_is_bounded_whatever_keys_it_makes() -> None:
    one = Holder()
    limit = LIMITS[Cost.RECORDS]
    kept = sum(one.store_from(1, f"s{number}", LARGE) for number in range(165))
    assert kept == limit.stranger.most // LARGE
    assert one.refused == {"records_of_stranger": 165 - kept}
    senders = 100
    for sender in range(senders):
        name = f"other{sender}"
        one.ledger.locate(name, "/ip4/10.0.1.9/tcp/1")
        with one.held.stored_by(name, int(limit.stranger.most)) as may_store:
            kept += may_store
    assert one.refused["records_of_prefix"] > senders / 2
    assert one.store_from(2, "honest", LARGE), "another network is heard"
    with one.held.stored_by("m", 3 * 2**20) as may_store:
        assert may_store, "a member that meets this node sends it all records"


def test_a_sender_from_nowhere_is_looked_up_and_counts_as_of_one_unknown_network() -> None:
    one = Holder(ledger=Ledger(UNPAID))
    for number in range(2_000):
        with one.held.stored_by(f"unknown{number}", SMALL):
            one.store(f"s{number}", SMALL)
    assert one.located[0] == "unknown0"
    assert one.store_from(1, "honest", LARGE)
