"""The order of several founders, and their answers until a run can be announced."""

from itertools import permutations

import pytest

from swarm.network.runs.run_search import decode_preparing, encode_preparing, is_forestalled

OURS, OTHER = "a" * 64, "b" * 64


def test_an_answer_is_of_a_founder_only_if_every_byte_is_right() -> None:
    sound = encode_preparing(OURS)
    assert decode_preparing(sound) == OURS
    for spoilt in (b"", sound[:-1], sound + b"a", sound + b"\n", sound.upper(), b" " + sound):
        assert decode_preparing(spoilt) is None


@pytest.mark.parametrize("peers", [("A", "B"), ("A", "B", "C", "D")])
def test_of_all_that_found_at_the_same_time_one_goes_on(peers: tuple[str, ...]) -> None:
    preparing = dict.fromkeys(peers, OURS)
    for me, *others in permutations(peers):
        seen = {peer: preparing[peer] for peer in others}
        assert forestalled(me, seen) == (me != "A")


def forestalled(
    me: str, preparing: dict[str, str], *announced: str, is_beside: bool = False
) -> bool:
    return is_forestalled(me, OURS, preparing=preparing, announced=announced, is_beside=is_beside)


def test_a_run_that_was_announced_is_joined_or_refused_whoever_announced_it() -> None:
    assert forestalled("A", {}, OURS) and forestalled("A", {}, OTHER)
    assert not forestalled("A", {})


def test_where_a_run_beside_others_is_meant_only_the_same_one_counts() -> None:
    assert not forestalled("B", {"A": OTHER}, OTHER, is_beside=True)
    assert forestalled("B", {"A": OURS}, is_beside=True)
    assert forestalled("A", {}, OTHER, OURS, is_beside=True)
