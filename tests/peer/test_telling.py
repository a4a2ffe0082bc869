"""What a round decided is told in few lines, without long names and without empty reasons."""

from swarm.peer.telling import because, told

ME, GONE = "12D3KooW" + "a" * 44, "12D3KooW" + "b" * 38 + "cdefgh"


def test_experts_of_which_the_same_is_said_share_a_line() -> None:
    reasons = [f"expert {k}: peer {GONE} left, adopted by {ME}, load 3/3" for k in (0, 1, 2, 5)]
    assert told([f"{GONE} removed: it asked to leave", *reasons]) == [
        "…cdefgh removed: it asked to leave",
        "experts 0-2,5: peer …cdefgh left, adopted by …aaaaaa, load 3/3",
    ]


def test_one_expert_is_named_alone() -> None:
    assert told([f"expert 7: given to {ME}, load 1/1"]) == ["expert 7: given to …aaaaaa, load 1/1"]


def test_a_hundred_decisions_are_not_a_hundred_lines() -> None:
    lines = told([f"peer-{k} joined as a trainee" for k in range(100)], max_lines=4)
    assert lines[:3] == [f"peer-{k} joined as a trainee" for k in range(3)]
    assert lines[3:] == ["and 97 more such decisions"]


def test_no_reason_is_not_shown_as_an_empty_one() -> None:
    assert because("") == ""
    assert because(f"{ME} convenes") == " reason='…aaaaaa convenes'"
