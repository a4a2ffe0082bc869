"""Reading fault plans: valid plans, errors, and due times of faults."""

import itertools
import random
import statistics

import pytest

from swarm.emulation.fault_plan import At, Kill, Partition, Pause, drawn_s, moments, parse_plan
from swarm.errors import ConfigError

PLAN = """
seed = 7
max_down = 2
[[fault]]
kind = "kill"
peer = "convener"
at = { round = 5, phase = "propose" }
for_s = 5.0
[[fault]]
kind = "pause"
peer = "random"
at = { every_s = 60.0, times = 3 }
for_s = [5, 20.0]
[[fault]]
kind = "partition"
groups = [[0, 1], [2, 3]]
at = { after_s = 30.0 }
"""


def test_a_plan_becomes_frozen_faults_in_its_order() -> None:
    plan = parse_plan(PLAN, source="plan.toml")
    kill, pause, partition = plan.fault
    assert isinstance(kill, Kill) and (kill.peer, kill.at.phase) == ("convener", "propose")
    assert isinstance(pause, Pause) and pause.for_s == (5.0, 20.0)
    assert isinstance(partition, Partition) and partition.groups == ((0, 1), (2, 3))
    assert plan.needs_links and plan.max_down == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[fault]]\nkind = "kil"', "fault[0].kind = 'kil'; allowed: kill, restart, pause"),
        ("[[fault]]\nat = {}", "fault[0].kind is missing; allowed: kill"),
        ('[[fault]]\nkind = "heal"\nat = {}', "fault[0].at: needs one of round, after_s, every_s"),
        (
            '[[fault]]\nkind = "leave"\npeer = "boss"\nat = { round = 1 }',
            "fault[0].peer = 'boss': a number of a peer, convener, reducer, ",
        ),
        (
            '[[fault]]\nkind = "leave"\npeer = "owner"\nat = { round = 1 }',
            "fault[0].peer: 'owner' needs at.round and at.phase",
        ),
        (
            '[[fault]]\nkind = "leave"\npeer = 1\nat = { round = 1, fase = "x" }',
            "unknown key fault[0].at.fase; allowed: round, phase, after_s, every_s, times",
        ),
        (
            '[[fault]]\nkind = "leave"\npeer = 1\nat = { round = 1, phase = "vote" }',
            "fault[0].at.phase = 'vote': input should be 'local_steps', 'save', 'offer'",
        ),
        (
            '[[fault]]\nkind = "heal"\nfor_s = 3.0\nat = { round = 1 }',
            "unknown key fault[0].for_s; allowed: at, kind",
        ),
        (
            '[[fault]]\nkind = "pause"\npeer = 1\nfor_s = -3.0\nat = { round = 1 }',
            "fault[0].for_s = -3.0: input should be greater than 0",
        ),
        (
            '[[fault]]\nkind = "pause"\npeer = 1\nat = { round = 1 }',
            "fault[0].for_s is missing",
        ),
        (
            '[[fault]]\nkind = "partition"\ngroups = [[0, 1]]\nat = { round = 1 }',
            "fault[0].groups: needs two groups or more",
        ),
        (
            '[[fault]]\nkind = "heal"\nat = { round = 1, times = 2 }',
            "fault[0].at.times: needs at.every_s",
        ),
        ("sed = 1", "unknown key sed; allowed: seed, max_down, in_order, step_s, fault"),
        ("seed 1", "not valid TOML"),
    ],
)
def test_an_error_names_file_key_value_and_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan(text, source="plan.toml")
    assert str(caught.value).startswith("plan.toml: ")
    assert said in str(caught.value)


def test_random_moments_follow_the_seed_and_the_mean_interval() -> None:
    at = At(every_s=10.0)
    due = moments(at, random.Random(3), 20_000.0)
    assert due == moments(at, random.Random(3), 20_000.0) == sorted(due)
    gaps = [after - before for before, after in itertools.pairwise(due)]
    # The mean of about 2000 exponential gaps has a standard error of 2.2 %.
    assert statistics.fmean(gaps) == pytest.approx(10.0, rel=0.1)
    assert due[-1] <= 20_000.0


def test_times_bounds_how_often_and_one_moment_is_due_once() -> None:
    assert len(moments(At(every_s=1.0, times=4), random.Random(0), 1e6)) == 4
    assert moments(At(after_s=5.0), random.Random(0), 10.0) == [5.0]
    assert moments(At(after_s=5.0), random.Random(0), 4.0) == []
    assert moments(At(round=3), random.Random(0), 10.0) == []


def test_a_span_is_drawn_between_its_ends() -> None:
    draw = random.Random(1)
    assert all(2.0 <= drawn_s((2.0, 3.0), draw) <= 3.0 for _ in range(50))
    assert drawn_s(4.0, draw) == 4.0
