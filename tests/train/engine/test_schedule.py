import math

import pytest

from swarm.model.routing import RoutingControls
from swarm.train.engine.local_steps import learning_rate, routing_controls_at, schedule_step
from tests.train.runs import tiny_run

RUN = tiny_run(optimizer={"lr": 4e-4, "warmup_steps": 10, "schedule_steps": 110})


def test_warm_up_starts_at_a_tenth_and_rises_in_a_line():
    # Products of a few doubles: the last bits depend on the order of the factors.
    assert learning_rate(0, RUN) == pytest.approx(4e-5, rel=1e-12)
    assert learning_rate(5, RUN) == pytest.approx(4e-4 * 0.55, rel=1e-12)
    assert learning_rate(10, RUN) == pytest.approx(4e-4, rel=1e-12)


def test_the_cosine_ends_at_a_tenth_and_stays_there():
    assert learning_rate(60, RUN) == pytest.approx(4e-4 * 0.55, rel=1e-12)
    assert learning_rate(35, RUN) == pytest.approx(
        4e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi / 4))), rel=1e-12
    )
    assert learning_rate(110, RUN) == pytest.approx(4e-5, rel=1e-12)
    assert learning_rate(10_000, RUN) == learning_rate(110, RUN)


def test_it_rises_and_then_falls():
    rates = [learning_rate(step, RUN) for step in range(111)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_without_warm_up_it_starts_at_the_top():
    run = tiny_run(optimizer={"lr": 1e-3, "warmup_steps": 0, "schedule_steps": 50})
    assert learning_rate(0, run) == 1e-3


def test_the_schedule_is_rounds_times_local_steps_by_default():
    run = tiny_run(run={"rounds": 5}, round={"local_steps": 20}, optimizer={"lr": 1.0})
    assert learning_rate(100, run) == pytest.approx(0.1, rel=1e-12)
    assert learning_rate(99, run) > 0.1


def test_a_schedule_that_is_all_warm_up_divides_by_nothing():
    run = tiny_run(optimizer={"lr": 1.0, "warmup_steps": 50, "schedule_steps": 50})
    assert learning_rate(49, run) < learning_rate(50, run) == pytest.approx(1.0, rel=1e-12)
    assert learning_rate(51, run) == pytest.approx(0.1, rel=1e-12)


def test_own_expert_bias_falls_to_zero_over_its_share_of_the_schedule():
    run = tiny_run(
        optimizer={"schedule_steps": 200},
        routing={"own_expert_bias": 3.0, "own_expert_bias_share": 0.5},
    )
    found = [
        routing_controls_at(step, run, "A", 0).own_expert_bias for step in (0, 25, 50, 99, 100, 199)
    ]
    assert found == pytest.approx([3.0, 2.25, 1.5, 0.03, 0.0, 0.0])
    assert found[-2:] == [0.0, 0.0]


def test_the_balance_factor_rises_to_one_as_in_spes():
    run = tiny_run(optimizer={"schedule_steps": 500}, routing={"balance_factor": 0.7})
    found = [
        routing_controls_at(step, run, "A", 0).balance_factor for step in (0, 50, 99, 100, 400)
    ]
    # start + (end - start) * step / (20 % of all steps), in the reference code.
    assert found == pytest.approx([0.7, 0.85, 0.997, 1.0, 1.0])
    assert found[-2:] == [1.0, 1.0]


def test_noise_differs_between_samples_peers_and_runs_and_comes_back():
    seeds = {
        routing_controls_at(7, tiny_run(run={"seed": seed}), peer, sample).noise_seed
        for sample in range(5)
        for seed in range(5)
        for peer in "ABCDE"
    }
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert routing_controls_at(3, RUN, "A", 2) == routing_controls_at(3, RUN, "A", 2)


def test_by_default_nothing_guides_the_routing():
    controls = routing_controls_at(5, RUN, "A", 1)
    assert controls == RoutingControls(noise_seed=controls.noise_seed)
    assert routing_controls_at(5, RUN, "A", 1, probe=True).probe
    assert routing_controls_at(5, tiny_run(loss={"similarity_weight": 0.1}), "A", 1).draw_apart


def test_a_round_of_an_agreed_time_is_trained_at_one_point_of_the_schedule():
    """Otherwise a peer with ten times the steps would be ten times as far in the cosine."""
    timed = tiny_run(round={"seconds": 60.0}, optimizer={"schedule_steps": 100})
    assert [schedule_step(40, local_step, timed) for local_step in (0, 1, 500)] == [40, 40, 40]
    assert [schedule_step(40, local_step, RUN) for local_step in (0, 1, 50)] == [40, 41, 90]
