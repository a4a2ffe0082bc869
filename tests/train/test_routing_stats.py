"""How the tokens of some steps were spread."""

import pytest

from swarm.train.engine import StepStats
from swarm.train.routing_stats import routing_stats


def step(*layers, dropped=0, similarity=None):
    return StepStats(
        2.0, 2.0, 0.0, 0.0, 0.0, 1.0, 8, layers, False, dropped=dropped, similarity=similarity
    )


def test_counts_of_all_steps_are_added_before_they_are_judged():
    first, second = step((8, 0, 4, 4), (4, 4, 4, 4)), step((0, 8, 4, 4), (8, 0, 8, 0))
    assert routing_stats([first]).max_load == pytest.approx(2.0)
    assert routing_stats([first]).idle_experts == 1
    both = routing_stats([first, second])
    assert both.max_load == pytest.approx(12 / 8)  # of the second layer
    assert both.idle_experts == 0


def test_shares_are_of_all_layers_and_zero_only_where_there_was_no_token():
    steps = [step((3000, 0, 1, 999), (2000, 0, 0, 2000))]
    assert routing_stats(steps).shares == (625, 0, 1, 375)


def test_a_collapsed_layer_is_not_hidden_by_an_even_one():
    stats = routing_stats([step((16, 0, 0, 0), (4, 4, 4, 4))])
    assert (stats.max_load, stats.idle_experts) == (4.0, 3)


def test_dropped_choices_are_a_share_and_the_last_similarity_counts():
    steps = [step((4, 4), dropped=2, similarity=0.9), step((4, 4), similarity=0.5), step((8, 0))]
    stats = routing_stats(steps)
    assert stats.dropped == pytest.approx(2 / 24)
    assert stats.similarity == 0.5
    assert routing_stats(steps[2:]).similarity is None
