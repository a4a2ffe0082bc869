"""Which way is tried when: with times of the test's own."""

from __future__ import annotations

from swarm.network.routes import DIRECT_AGAIN_S, LONGEST_REST_S, RELAYS_PER_TRY, Routes

RELAYS = ["r1", "r2", "r3", "r4", "r5"]


def test_a_peer_is_dialled_first_and_others_are_asked_only_then() -> None:
    route = Routes().plan("p", RELAYS, 0.0)
    assert route.straight and len(route.relays) == RELAYS_PER_TRY


def test_a_peer_that_a_relay_reached_is_not_dialled_for_a_while() -> None:
    routes = Routes()
    routes.failed("p", 0.0, is_slow=False)
    assert not routes.needs_relay("p", 0.0), "no relay has reached it yet"
    routes.relayed("p", "r4", True, 0.0)
    route = routes.plan("p", RELAYS, 1.0)
    assert not route.straight and route.relays[0] == "r4"
    assert routes.plan("p", RELAYS, DIRECT_AGAIN_S).straight
    assert routes.plan("p", [], 1.0).straight, "without a relay it is dialled all the same"


def test_a_port_that_stays_closed_is_tried_ever_more_rarely_until_it_opens() -> None:
    routes, now_s, waits = Routes(), 0.0, []
    for _ in range(7):
        routes.failed("p", now_s, is_slow=True)
        routes.relayed("p", "r1", True, now_s)
        began_s = now_s
        while not routes.plan("p", RELAYS, now_s).straight:
            now_s += 10.0
        waits.append(now_s - began_s)
    assert waits == [30, 60, 120, 240, 480, 900, 900]
    routes.dialled("p")
    routes.failed("p", now_s, is_slow=False)
    assert routes.plan("p", RELAYS, now_s + DIRECT_AGAIN_S).straight


def test_a_peer_that_can_be_dialled_again_is() -> None:
    routes = Routes()
    routes.failed("p", 0.0, is_slow=False)
    routes.relayed("p", "r1", True, 0.0)
    routes.dialled("p")
    assert routes.plan("p", RELAYS, 0.0).straight


def test_failures_at_the_same_time_count_as_one() -> None:
    routes = Routes()
    for now_s in range(7):
        routes.failed("p", float(now_s), is_slow=True)
    routes.relayed("p", "r1", True, 7.0)
    assert routes.plan("p", RELAYS, DIRECT_AGAIN_S).straight


def test_a_stream_to_a_mute_peer_goes_through_others_until_it_answers_something() -> None:
    routes = Routes()
    routes.failed("p", 0.0, is_slow=True)
    assert routes.plan("p", RELAYS, 1.0).straight, "a message shows whether it answers again"
    assert not routes.plan("p", RELAYS, 1.0, is_stream=True).straight
    assert routes.plan("p", [], 1.0, is_stream=True).straight
    assert routes.plan("p", RELAYS, DIRECT_AGAIN_S, is_stream=True).straight
    routes.dialled("p")
    assert routes.plan("p", RELAYS, 1.0, is_stream=True).straight
    routes.failed("p", 2.0, is_slow=False)
    assert routes.plan("p", RELAYS, 3.0, is_stream=True).straight, "a refusal comes at once"


def test_a_relay_that_failed_rests_longer_each_time_for_this_peer_only() -> None:
    routes = Routes()
    rests = []
    now_s = 0.0
    for _ in range(6):
        routes.relayed("p", "r1", False, now_s)
        began_s = now_s
        while "r1" not in routes.plan("p", ["r1"], now_s).relays:
            now_s += 1.0
        rests.append(now_s - began_s)
    assert rests == [10, 20, 40, 80, LONGEST_REST_S, LONGEST_REST_S]
    assert routes.plan("q", ["r1"], 0.0).relays == ("r1",)


def test_a_peer_is_no_relay_to_itself_and_relays_share_the_load() -> None:
    routes = Routes()
    assert routes.plan("r1", ["r1"], 0.0).relays == ()
    firsts = {routes.plan(f"p{number}", RELAYS, 0.0).relays[0] for number in range(50)}
    assert firsts == set(RELAYS)
