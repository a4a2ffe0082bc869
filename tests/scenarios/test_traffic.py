"""The bytes of a round, counted on the wire, against the formula."""

import logging
from pathlib import Path
from statistics import mean

import pytest

from swarm.config import RunConfig
from swarm.emulation.local_swarm import applied
from swarm.model.cost import bytes_sent_per_peer_per_round, parameters
from tests.scenarios.swarms import finish, read_run, started_swarm

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]
logger = logging.getLogger(__name__)

NUM_PEERS = 4
COUNTED_ROUNDS = 10
WIDE_EXPERTS = [
    "model.vocab_size=260",
    "model.hidden_size=64",
    "model.num_experts=8",
    "model.moe_intermediate_size=144",
    "round.local_steps=1",
    "merging.alpha=0.0",
    f"run.rounds={COUNTED_ROUNDS + 2}",
]
"""Shared tensors are 12 % of the model, as in the 7B."""


def test_blob_bytes_equal_the_formula_and_owned_experts_save_a_third(tmp_path: Path) -> None:
    spes, run = sent_per_round(tmp_path / "spes", owners=1)
    averaged, _ = sent_per_round(tmp_path / "averaged", owners=NUM_PEERS)
    counted = parameters(run.model)
    assert counted.shared / counted.total == pytest.approx(0.12, abs=0.02)
    assert spes == pytest.approx(formula(run, 1), rel=0.03)
    assert averaged == pytest.approx(formula(run, NUM_PEERS), rel=0.03)
    assert 1 - spes / averaged >= 0.333


def sent_per_round(folder: Path, *, owners: int) -> tuple[float, RunConfig]:
    """Blob bytes that a peer sent in a round: mean over peers and rounds.

    The first round is left out, because its window includes the held-out tokens of joiners. The
    last round is left out too, because no manifest marks its end.
    """
    folder.mkdir()
    with started_swarm(
        folder, NUM_PEERS, [*WIDE_EXPERTS, f"ownership.owners_per_expert={owners}"]
    ) as swarm:
        finish(swarm, 240)
        histories = [applied(peer.events(), "quorum") for peer in swarm.peers]
    windows = [history[1 : COUNTED_ROUNDS + 1] for history in histories]
    for window in windows:
        assert len(window) == COUNTED_ROUNDS
        assert all(len(event["contributors"]) == NUM_PEERS for event in window)
    events = [event for window in windows for event in window]
    control = mean(event["control_bytes_sent"] for event in events)
    blobs = mean(event["blob_bytes_sent"] for event in events)
    logger.info(
        "owners=%d blob_bytes=%.0f control_bytes=%.0f a peer and round", owners, blobs, control
    )
    return blobs, read_run(swarm.run_file)


def formula(run: RunConfig, owners: int) -> float:
    """The expected bytes, by the number of owners."""
    ownership = run.ownership.model_copy(update={"owners_per_expert": owners})
    return bytes_sent_per_peer_per_round(run.model_copy(update={"ownership": ownership}), NUM_PEERS)
