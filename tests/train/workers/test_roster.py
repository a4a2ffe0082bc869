"""Pure decisions: ranks, sufficient numbers of workers, and launchers' settings."""

import pytest

from swarm.errors import BadMessage, ConfigError
from swarm.train.workers.roster import (
    Launch,
    Node,
    Wanted,
    address_of,
    launched_by,
    node_of,
    objection,
    pause_s,
    seats,
)

VERSIONS = ("1.0", "2.13.0")


def node(workers=1, gpus=0, rank=None):
    return Node(workers, gpus, rank, VERSIONS)


def test_ranks_of_nodes_follow_those_of_the_peers_own_machine():
    both = [node(8), node(8)]
    assert seats(both, Wanted(8, 16), is_late=False) == [range(8, 16), range(16, 24)]


def test_a_launchers_order_goes_before_the_order_in_which_nodes_came():
    found = seats([node(), node(rank=5), node(rank=2)], Wanted(1, 3), is_late=False)
    assert found == [range(3, 4), range(2, 3), range(1, 2)]


def test_workers_are_waited_for_until_all_are_there():
    assert seats([node(8)], Wanted(8, 16), is_late=False) is None
    assert seats([], Wanted(8, 8), is_late=False) is None


def test_one_more_node_than_needed_is_a_spare_and_the_last_one_may_give_a_part():
    found = seats([node(3), node(3), node(3)], Wanted(1, 4), is_late=False)
    assert found == [range(1, 4), range(4, 5), range(5, 5)]
    assert not found[2]


def test_when_it_is_late_those_that_are_there_have_to_do():
    assert seats([node(8)], Wanted(8, 16), is_late=True) == [range(8, 16)]
    assert seats([], Wanted(8, 16), is_late=True) == []
    # Experts distributed over 16 workers need 16, over 4 a multiple of 4.
    assert seats([], Wanted(8, 8, unit=16), is_late=True) is None
    assert seats([node(3), node(3)], Wanted(2, 9, unit=4), is_late=True) == [
        range(2, 5),
        range(5, 8),
    ]
    assert seats([node(1)], Wanted(2, 9, unit=2), is_late=True) == [range(2, 2)]


def test_a_node_of_another_version_or_without_gpus_is_not_wanted():
    assert objection(node(), "cpu", VERSIONS) is None
    assert objection(node(8, gpus=8), "cuda", VERSIONS) is None
    for other, device, why in (
        (Node(1, 0, None, ("1.1", "2.13.0")), "cpu", "the node runs swarm 1.1 with torch 2.13.0"),
        (Node(1, 0, None, ("1.0", "2.14.0")), "cpu", "both need the same"),
        (node(), "cuda", "PyTorch finds none on the node"),
        (node(9, gpus=8), "cuda", "9 workers and has 8 GPUs"),
    ):
        assert why in objection(other, device, VERSIONS)


def test_what_a_node_says_of_itself_comes_back():
    for each in (node(), node(8, 8, rank=3)):
        assert node_of(each.message()) == each


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 0},
        {"workers": True},
        {"workers": 1e300},
        {"workers": 2000},
        {"gpus": -1},
        {"rank": "0"},
        {"versions": ["1.0"]},
        {"versions": "10"},
        {"versions": [1, 2]},
    ],
)
def test_a_node_that_does_not_say_what_it_has_is_refused(change):
    with pytest.raises(BadMessage):
        node_of({**node().message(), **change})


def test_torchrun_starts_a_process_for_each_gpu():
    said = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"}
    assert launched_by(said) == Launch(3, 11, "10.0.0.1")


def test_srun_starts_one_process_a_node_or_one_a_gpu():
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert launched_by({**step, "SLURM_STEP_NUM_TASKS": "2"}) == Launch(None, 1, None)
    several = {**step, "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "13", "SLURM_LOCALID": "5"}
    assert launched_by(several) == Launch(5, 13, None)


def test_without_a_launcher_a_process_speaks_for_its_machine():
    assert launched_by({}) == Launch()
    assert launched_by({"LOCAL_RANK": "x", "SLURM_PROCID": "1"}) == Launch()


def test_an_address_is_a_host_and_a_port():
    assert address_of("10.0.0.1:31400", "--controller") == ("10.0.0.1", 31400)
    assert address_of("head", "--controller") == ("head", 31340)
    for wrong in ("", ":1", "head:", "head:x", "head:70000", "[::1]:31340"):
        with pytest.raises(ConfigError, match=r"--controller = .* is no HOST:PORT"):
            address_of(wrong, "--controller")


def test_a_controller_is_dialled_again_after_pauses_that_stay_short():
    pauses = [pause_s(failures) for failures in range(12)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.5, 15.0)
