"""Tables about peers do not grow with strangers' invented keys."""

from dataclasses import dataclass

from swarm.network.wire.bounded_tables import recalled


@dataclass
class Known:
    is_busy: bool = False


def test_the_last_used_and_those_in_use_stay() -> None:
    known: dict[str, Known] = {}

    def recall(peer: str) -> Known:
        return recalled(known, peer, Known, 3, is_in_use=lambda each: each.is_busy)

    first = recall("a")
    recall("b").is_busy = True
    recall("c")
    assert recall("a") is first
    recall("d")
    assert list(known) == ["b", "a", "d"]
    for each in known.values():
        each.is_busy = True
    recall("e").is_busy = True
    assert list(known) == ["b", "a", "d"], "nobody holds the new one yet"
