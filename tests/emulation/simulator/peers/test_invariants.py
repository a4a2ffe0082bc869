"""Thousands of swarms under random faults: none may break an invariant [I1-I11]."""

from functools import cache

import pytest

from swarm.emulation.simulator.fault_schedule import Outcome, run_schedule
from swarm.emulation.simulator.faults.faults import CLASSES
from swarm.protocol.messages.events import Purpose
from tests.emulation.simulator.schedules import as_found

SEEDS_PER_CLASS = 600
QUICK_SEEDS_PER_CLASS = 20
"""scripts/simulate tries hundreds of thousands. These find obvious faults at once."""
SEEDS_PER_TEST = 20
SEEDS = [
    pytest.param(first, marks=[pytest.mark.exhaustive] if first >= QUICK_SEEDS_PER_CLASS else [])
    for first in range(0, SEEDS_PER_CLASS, SEEDS_PER_TEST)
]


@cache
def outcome_of(fault_class: str, seed: int) -> Outcome:
    """The outcome of a schedule, cached for several tests."""
    return run_schedule(fault_class, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", SEEDS)
@pytest.mark.parametrize("fault_class", sorted(CLASSES))
def test_no_schedule_breaks_an_invariant(fault_class, first_seed):
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        outcome = outcome_of(fault_class, seed)
        assert outcome.violation is None, (
            f"{outcome.violation}; trace: scripts/simulate --replay {fault_class}:{seed}"
        )


HOLES = {
    "A:100527": "a fetched reform, held back by a quorum that returned, kept every manifest away",
    "C:401551": "a lone member's decision gave way to a chain that could then not be fetched",
    "C:402239": "two conveners deposed each other over the same old proposal, 641 times",
    "D:401898": "the end of an old sync was taken for that of blobs dropped and fetched again",
    "B:100938": "a member that had been deposed, on a bad link, was the first to depose others",
    "L:375": "the survivor of two stepped down, time and again, before the grace of its vote ended",
    "B:9214814": "attempts were given up after 25 s on lines that lose a third of the messages",
    "B:9304715": "a convener that heard one of five held its attempt while it waited for votes",
    "K:389": "an owner's older moments were taken although another owner had newer ones to come",
    "C:9801320": "a stranger kept its read text through a reform that dealt the text to others",
    "H:7300040": "the same",
    "A:20057": "of a swarm that lost all its members a stranger was left, and could not go on",
    "F:99": "strangers had reformed, which nobody believed, and did not come back",
    "F:21": "a voter of a reform lost its record and was shown another chain, as if it were new",
    "K:51": "the same, with a larger reform than that of the member",
    "K:70000138": "a trainee had reformed, and its chain was better than that of a voter",
    "M:7901545": "a convener heard by one alone was back each time before others were done",
    "K:52006049": "two conveners that refused each other began at the same moment forever",
    "L:52002120": "a lone voter's rounds were as short as others fetched its values",
    "L:52017008": "the same, and who came in time was left out for want of work",
    "L:52200310": "the same",
    "A:55119169": "the check's own: who left a generation needs not have kept its values",
    "C:55127031": "a proof began with an older head of the own chain, and was requested forever",
    "o:3056": "the check's own: who left a generation need not serve deltas that it voted for",
    "K:52110051": "the check's own: nobody asked for the heads that a proof had passed over",
    "A:8108159": "a fetch that stood still with its process ended the listening for another chain",
    "E:9462535": "the check's own: the value before a merge need not outlast the tip after that",
    "u:60031099": "steps on a reform were counted on another, which dealt their samples to others",
    "u:265": "the same",
    "u:60008221": "the simulator's own: an offer on a new tip came before the rest of its effects",
    "o:61032668": "the simulator's own: time went back to the end of steps that a pause outlasted",
    "V:70000028": "the check's own: four keys vanished one after another while a round lasted",
    "U:61048236": "the check's own: a stranger had the last rounds of an only voter, dead for good",
    "o:60337131": "a chain file lost the reforms of the record before, to which damage led back",
    "J:5001917": "the check's own: exactly T_reform ago, by a clock that is rounded otherwise",
}
"""Schedules that once broke an invariant, and why."""


@pytest.mark.parametrize("schedule", HOLES)
def test_a_hole_that_was_found_once_stays_closed(schedule):
    fault_class, _, seed = schedule.partition(":")
    assert as_found(fault_class, int(seed)).violation is None, HOLES[schedule]


def test_a_seed_stands_for_one_schedule():
    traces = []
    for _ in range(2):
        lines = []
        outcome = run_schedule("A", 5, trace=lines.append)
        traces.append((outcome, lines))
    assert traces[0] == traces[1]
    assert len(traces[0][1]) > 100


@pytest.mark.parametrize("fault_class", sorted(CLASSES))
def test_schedules_hold_what_they_are_meant_to_try(fault_class):
    outcomes = [outcome_of(fault_class, seed) for seed in range(12)]
    assert min(outcome.rounds for outcome in outcomes) >= 3
    assert sum(outcome.merges for outcome in outcomes) > 0
    if fault_class == "C":  # half of the survivors cannot continue without a reform
        assert sum(outcome.reforms > 0 for outcome in outcomes) >= 3


def test_the_schedules_contain_crashes_joins_leaves_pauses_partitions_and_fetching_ahead():
    """Also newcomers with, without or with a later invitation, and earned and lost votes."""
    lines = []
    for fault_class in sorted(CLASSES):
        for seed in range(6):
            run_schedule(fault_class, seed, trace=lines.append)
    text = "\n".join(lines)
    happenings = ("crashes", "is paused", "partition:", " is cut", "has left", "joined")
    newcomers = (", invited by ", " as a trainee", " vouches for ", " joined again, vouched for")
    votes = (" rounds have counted it", " has no vote any more: too few vouched members")
    fetched = f"fetch {Purpose.AHEAD.value}: "
    assert [what for what in (*happenings, *newcomers, *votes, fetched) if what not in text] == []
