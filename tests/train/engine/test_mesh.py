"""The distribution of experts: even, and with the fewest moves."""

import itertools
import random

import pytest

from swarm.train.engine.mesh import Dealing, Mesh, Move, deal


def even(kind: tuple[tuple[int, ...], ...]) -> bool:
    sizes = [len(experts) for experts in kind]
    return max(sizes) - min(sizes) <= 1


def fewest_moves(experts: set[int], former: Dealing, ep: int) -> int:
    """Tries every even distribution of one kind, which differ in the seats with one more expert."""
    seats = former.seats
    there = [sum(seats[e] == seat for e in experts) for seat in range(ep)]
    least, more = divmod(len(experts), ep)
    stays = (
        sum(min(n, least + (seat in chosen)) for seat, n in enumerate(there))
        for chosen in itertools.combinations(range(ep), more)
    )
    return len(experts) - max(stays)


@pytest.mark.parametrize("ep", [1, 2, 3, 4, 8])
def test_dealings_are_even_and_a_change_moves_as_few_experts_as_possible(ep: int) -> None:
    random.seed(ep)
    for _ in range(60):
        num_experts = random.randint(1, 24)
        dealing = deal([], num_experts, ep)
        for _ in range(5):
            owned = set(random.sample(range(num_experts), random.randint(0, num_experts)))
            after = deal(owned, num_experts, ep, dealing)
            assert sorted(after.order) == list(range(num_experts))
            assert {e for experts in after.owned for e in experts} == owned
            assert even(after.owned) and even(after.frozen)
            assert max(after.counts) - min(after.counts) <= 2
            fewest = [
                fewest_moves(kind, dealing, ep) for kind in (owned, set(range(num_experts)) - owned)
            ]
            moves = dealing.moves(after)
            assert len(moves) == sum(fewest)
            assert all(dealing.seats[m.expert] == m.giver != m.taker for m in moves)
            dealing = after


def test_the_same_experts_again_move_nothing() -> None:
    first = deal([0, 1, 5], 8, 4, deal([2], 8, 4))
    assert deal([5, 1, 0], 8, 4, first) == first and first.moves(first) == ()


def test_of_experts_that_could_move_those_move_that_were_not_trained_before() -> None:
    before = Dealing(owned=((2,), (3,)), frozen=((0, 1), (4, 5)))
    after = deal([0, 2, 3], 6, 2, before)
    assert after.owned == ((0, 2), (3,)) and before.moves(after) == ()
    after = deal([0, 2], 6, 2, before)
    assert after.owned == ((2,), (0,)) and before.moves(after) == (Move(0, 0, 1), Move(3, 1, 0))


def test_a_first_dealing_gives_what_is_left_over_to_different_ranks() -> None:
    dealing = deal([0], 4, 2)
    assert dealing.counts == (2, 2) and even(dealing.frozen)


def test_ranks_of_a_group_follow_each_other_and_replicas_have_one_seat() -> None:
    mesh = Mesh(8, 2)
    assert mesh.sharers == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.replicas == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.stages == (tuple(range(8)),) and mesh.ends == tuple((rank,) for rank in range(8))
    with pytest.raises(AssertionError):
        Mesh(6, 4)


def test_the_ranks_of_a_stage_follow_each_other_and_each_seat_has_a_pipeline() -> None:
    mesh = Mesh(12, 2, 3)
    assert [mesh.stage(rank) for rank in range(12)] == 2 * [0, 0, 1, 1, 2, 2]
    assert mesh.sharers == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert mesh.pipelines == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert mesh.stages == ((0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11))
    assert mesh.replicas == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert mesh.ends == ((0, 4), (1, 5), (6, 10), (7, 11), (2,), (3,), (8,), (9,))
    with pytest.raises(AssertionError):
        Mesh(8, 2, 3)
