"""How many threads are worth it, by times that are given."""

import pytest

from swarm.train.threads import (
    REST_S,
    WINDOW,
    StepWatch,
    Trial,
    budget_s,
    candidates,
    choose,
)


def trials(times: dict[int, float], share: float = 1.0) -> list[Trial]:
    """One trial of each number of threads; the calling thread had a core for `share` of it."""
    return [Trial(threads, seconds, share * seconds) for threads, seconds in times.items()]


@pytest.mark.parametrize(
    ("cores", "numbers"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))],
)
def test_powers_of_two_and_all_cores_are_tried(cores: int, numbers: tuple[int, ...]) -> None:
    assert candidates(cores) == numbers


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({1: 1.0, 2: 0.55, 4: 0.3}, 4),
        ({1: 1.0, 2: 0.95, 4: 0.92}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.56}, 2),
        ({1: 1.0, 2: 0.95, 4: 0.5}, 4),
        ({1: 1.0, 2: 3.0}, 1),
        ({2: 1.0}, 2),
    ],
)
def test_more_threads_are_taken_only_if_they_are_clearly_faster(
    times: dict[int, float], chosen: int
) -> None:
    choice = choose(trials(times))
    assert choice.threads == chosen
    assert f"{chosen}: {times[chosen] * 1e3:.1f} ms" in choice.reason


def test_where_a_core_is_shared_already_more_threads_only_take_from_others() -> None:
    faster_at_the_cost_of_others = trials({1: 1.0, 2: 0.5}, share=0.6)
    choice = choose(faster_at_the_cost_of_others)
    assert choice.threads == 1
    assert "only 60% of a core" in choice.reason
    assert choose(trials({1: 1.0, 2: 0.5}, share=0.9)).threads == 2


def test_the_median_of_several_trials_counts() -> None:
    odd = [*trials({1: 1.0, 2: 9.0}), *trials({1: 1.0, 2: 0.5}), *trials({1: 5.0, 2: 0.5})]
    assert choose(odd).threads == 2


def test_a_choice_that_is_in_use_is_kept_for_less() -> None:
    between = trials({1: 1.0, 2: 0.93})
    assert choose(between).threads == 1
    assert choose(between, current=2).threads == 2
    assert choose(between, current=1).threads == 1
    assert choose(trials({1: 1.0, 2: 0.97}), current=2).threads == 1


def test_measuring_takes_three_seconds_or_a_twentieth_of_a_round() -> None:
    assert budget_s(50, 0.01) == 3.0
    assert budget_s(50, 20.0) == 50.0


def test_steps_that_become_half_as_slow_again_are_measured_again_after_a_rest() -> None:
    watch = StepWatch(measured_s=0.0)
    now, answers = 0.0, []
    for seconds in [1.0] * 20 + [1.6] * 400:
        now += seconds
        answers.append((now, watch.saw(seconds, now)))
    first = next(now for now, answer in answers if answer)
    assert first >= REST_S
    assert all(answer is None for now, answer in answers if now < REST_S)
    assert "1.60 times" in next(answer for _, answer in answers if answer)


@pytest.mark.parametrize("factor", [1.0, 1.4, 0.7])
def test_steps_that_stay_about_as_fast_are_never_measured_again(factor: float) -> None:
    watch = StepWatch(measured_s=0.0)
    times = [1.0] * WINDOW + [factor] * 1000
    assert not any(watch.saw(seconds, 1e6 + k) for k, seconds in enumerate(times))


def test_single_slow_steps_do_not_count() -> None:
    watch = StepWatch(measured_s=0.0)
    times = [1.0] * WINDOW + [1.0, 1.0, 30.0] * 100
    assert not any(watch.saw(seconds, 1e6 + k) for k, seconds in enumerate(times))


def test_steps_that_become_much_faster_are_measured_again_too() -> None:
    watch = StepWatch(measured_s=0.0)
    times = [1.0] * WINDOW + [0.5] * WINDOW
    answers = [watch.saw(seconds, 1e6 + k) for k, seconds in enumerate(times)]
    assert answers[-1] is not None
    assert not any(answers[:-1])
