"""Limits of a peer's cost: accounts of members, strangers and networks, and reserved shares."""

from __future__ import annotations

import pytest

from swarm.errors import TooCostly
from swarm.network.wire import ledger as ledgers
from swarm.network.wire.ledger import LIMITS, STRANGERS_SHARE, Cost, Ledger, Limit, Rate, prefix_of

FEW = {cost: Limit(Rate(80, 8), Rate(30, 3), Rate(6, 1)) for cost in Cost}
"""60 for members, 20 for strangers, 10 for one network of strangers."""
HELD = {cost: Limit(Rate(80), Rate(30), Rate(6)) for cost in Cost}


def spent(ledger: Ledger, peer: str, now_s: float = 0.0, cost: Cost = Cost.MESSAGES) -> int:
    """The number that a peer gets before a refusal."""
    count = 0
    while True:
        try:
            ledger.take(peer, cost, 1, now_s)
        except TooCostly:
            return count
        count += 1


def test_one_stranger_gets_little_and_is_told_which_account_is_empty() -> None:
    ledger = Ledger(FEW)
    assert spent(ledger, "S") == 6
    with pytest.raises(TooCostly) as refused:
        ledger.take("S", Cost.MESSAGES, 1, 0.0)
    assert refused.value.reason == "messages_of_stranger"


def test_all_strangers_together_get_a_quarter_and_members_three_whatever_strangers_do() -> None:
    ledger = Ledger(FEW)
    ledger.admit(["M-1", "M-2", "M-3"])
    for number in range(12):
        ledger.locate(f"S-{number}", f"/ip4/10.0.{number}.1/tcp/4001")
    assert sum(spent(ledger, f"S-{number}") for number in range(10)) == 80 * STRANGERS_SHARE
    with pytest.raises(TooCostly) as refused:
        ledger.take("S-11", Cost.MESSAGES, 1, 0.0)
    assert refused.value.reason == "messages_of_strangers"
    assert [spent(ledger, member) for member in ("M-1", "M-2", "M-3")] == [30, 30, 0]


def test_trainees_together_leave_voters_half_of_everything_whatever_they_do() -> None:
    ledger = Ledger(FEW)
    trainees = [f"T-{number}" for number in range(10)]
    ledger.admit(["M-1", "M-2", *trainees], trainees)
    assert sum(spent(ledger, trainee) for trainee in trainees) == 20
    with pytest.raises(TooCostly) as refused:
        ledger.take("T-1", Cost.MESSAGES, 1, 0.0)
    assert refused.value.reason in ("messages_of_member", "messages_of_trainees")
    assert [spent(ledger, member) for member in ("M-1", "M-2")] == [30, 10]


def test_keys_of_one_network_share_half_of_what_strangers_have() -> None:
    ledger = Ledger(FEW)
    for number in range(10):
        ledger.locate(f"S-{number}", f"/ip4/192.0.2.{number}/tcp/4001")
    ledger.locate("other", "/ip4/198.51.100.1/tcp/4001")
    assert sum(spent(ledger, f"S-{number}") for number in range(10)) == 10
    assert spent(ledger, "other") == 6


def test_strangers_whose_network_is_unknown_share_half_of_what_strangers_have() -> None:
    ledger = Ledger(FEW)
    assert sum(spent(ledger, f"S-{number}") for number in range(100)) == 10
    ledger.locate("other", "/ip4/198.51.100.1/tcp/4001")
    assert spent(ledger, "other") == 6


def test_members_of_one_network_do_not_share() -> None:
    ledger = Ledger(FEW)
    ledger.admit(["M-1", "M-2"])
    for peer in ("M-1", "M-2", "S"):
        ledger.locate(peer, "/ip4/192.0.2.1/tcp/4001")
    assert [spent(ledger, peer) for peer in ("M-1", "M-2", "S")] == [30, 30, 6]


def test_accounts_fill_again_with_time_and_never_over_their_edge() -> None:
    ledger = Ledger(FEW)
    assert spent(ledger, "S", 0.0) == 6
    assert spent(ledger, "S", 2.5) == 2
    assert spent(ledger, "S", 3.0) == 1, "halves are not lost"
    assert spent(ledger, "S", 1e6) == 6


def test_a_refusal_takes_nothing_out_of_any_account() -> None:
    ledger = Ledger(FEW)
    ledger.locate("S", "/ip4/192.0.2.1/tcp/4001")
    ledger.take("S", Cost.BYTES, 5, 0.0)
    for _ in range(100):
        with pytest.raises(TooCostly):
            ledger.take("S", Cost.BYTES, 2, 0.0)
    assert ledger.left("S", Cost.BYTES, 0.0) == 1
    assert ledger.left("other", Cost.BYTES, 0.0) == 6


def test_more_than_an_account_holds_is_taken_from_a_full_one_and_paid_off_later() -> None:
    """An honest convener's roster of many offers must not be refused forever."""
    ledger = Ledger(FEW)
    ledger.admit(["M"])
    ledger.take("M", Cost.BYTES, 50, 0.0)
    assert ledger.left("M", Cost.BYTES, 0.0) == -20
    with pytest.raises(TooCostly):
        ledger.take("M", Cost.BYTES, 50, 10.0)
    ledger.take("M", Cost.BYTES, 50, 17.0)


def test_what_was_spent_already_is_charged_and_nothing_left_is_refused() -> None:
    ledger = Ledger(FEW)
    ledger.charge("S", Cost.SECONDS, 8.0, 0.0)
    with pytest.raises(TooCostly):
        ledger.take("S", Cost.SECONDS, 0, 1.0)
    ledger.take("S", Cost.SECONDS, 0, 3.0)


def test_what_is_held_comes_back_only_when_it_is_given_back() -> None:
    ledger = Ledger(HELD)
    held = [ledger.take("S", Cost.STREAMS, 1, 0.0) for _ in range(6)]
    assert spent(ledger, "S", 1e6, Cost.STREAMS) == 0
    ledger.give_back(held[0], 1e6)
    assert spent(ledger, "S", 1e6, Cost.STREAMS) == 1


def test_what_a_stranger_holds_goes_back_where_it_came_from_when_it_is_a_member() -> None:
    ledger = Ledger(HELD)
    held = [ledger.take("P", Cost.STREAMS, 1, 0.0) for _ in range(6)]
    ledger.admit(["P"])
    ledger.locate("P", "/ip4/192.0.2.1/tcp/4001")
    assert ledger.left("P", Cost.STREAMS, 0.0) == 30
    for one in held:
        ledger.give_back(one, 0.0)
    assert ledger._balances == {}


def test_a_flood_of_keys_is_forgotten_but_not_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_KNOWN", 100)
    ledger = Ledger({**FEW, Cost.STREAMS: HELD[Cost.STREAMS]})
    held = [ledger.take("S", Cost.STREAMS, 1, 0.0) for _ in range(6)]
    for number in range(10_000):
        ledger.charge(f"K{number}", Cost.SECONDS, 1.0, 0.0)
        ledger.locate(f"K{number}", f"/ip4/10.{number // 256}.{number % 256}.1/tcp/1")
    assert len(ledger._balances) <= 101
    assert len(ledger._places) <= 100
    assert spent(ledger, "S", 0.0, Cost.STREAMS) == 0
    assert ledger.left("new", Cost.SECONDS, 0.0) < 0, "the strangers' shared account is kept"
    assert len(held) == 6


@pytest.mark.parametrize(
    ("address", "prefix"),
    [
        ("/ip4/192.0.2.7/tcp/4001", "192.0.2.0/24"),
        ("/ip4/192.0.2.200/udp/4001/quic", "192.0.2.0/24"),
        ("/ip6/2001:db8:1:2::3/tcp/4001", "2001:db8:1::/48"),
        ("/ip6/::ffff:192.0.2.7/tcp/4001", "192.0.2.0/24"),
        ("/dns4/example.org/tcp/4001", None),
        ("/ip4/nonsense/tcp/1", None),
        ("", None),
    ],
)
def test_the_network_of_an_address(address: str, prefix: str | None) -> None:
    assert prefix_of(address) == prefix


def test_limits_make_sense_and_leave_room_for_what_honest_peers_do() -> None:
    assert set(LIMITS) == set(Cost)
    for cost, limit in LIMITS.items():
        strangers = limit.shared.part(STRANGERS_SHARE)
        assert limit.stranger.most < limit.member.most <= limit.shared.most - strangers.most, cost
        assert limit.stranger.most <= strangers.most / 2, cost
        assert limit.stranger.per_s <= strangers.per_s / 2, cost
    assert LIMITS[Cost.STREAMS].stranger.most >= 3, "two to fetch, one to measure"
    assert LIMITS[Cost.MESSAGES].shared.part(1 - STRANGERS_SHARE).per_s >= 1024 / 1.5


def test_a_host_is_a_members_while_one_is_connected_from_it() -> None:
    ledger = Ledger(FEW)
    for peer, host in (("M", "192.0.2.7"), ("S", "192.0.2.8")):
        ledger.locate(peer, f"/ip4/{host}/tcp/4001")
    assert ledger.member_at("/ip4/192.0.2.7/tcp/0") is None
    ledger.admit(["M", "unlocated"])
    assert ledger.member_at("/ip4/192.0.2.7/tcp/0") == "M"
    assert ledger.member_at("/ip4/192.0.2.8/tcp/0") is None, "of its network, and no member"
    ledger.locate("M", "/ip4/198.51.100.9/tcp/4001")
    assert ledger.member_at("/ip4/192.0.2.7/tcp/0") is None
