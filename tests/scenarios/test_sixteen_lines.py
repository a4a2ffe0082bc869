"""A whole run of sixteen peers, each in its own namespace with a different line."""

import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from swarm.emulation.links import LINKS
from swarm.emulation.local_swarm import LocalSwarm, applied, summary
from swarm.emulation.networks import NamespaceLinks, why_not_here
from tests.scenarios.swarms import finish, peer_id, write_run

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.exhaustive,
    pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here())),
]

ROUNDS = 8
SIZES = ["model.num_experts=16", "model.hidden_size=64", "model.moe_intermediate_size=64"]


def test_one_digest_everywhere_at_every_height(tmp_path: Path) -> None:
    """From 3 to 1,000 Mbit/s up, 1 to 200 ms, six with packet loss, and no shared files."""
    assert len(LINKS) == 16
    run_file = write_run(tmp_path, [*SIZES, f"run.rounds={ROUNDS}", "merging.interval_steps=24"])
    with (
        closing(NamespaceLinks(list(LINKS.values()))) as links,
        LocalSwarm(tmp_path / "swarm", run_file, len(LINKS), links=links) as swarm,
    ):
        swarm.start()
        finish(swarm, 900)
        verdict = summary(swarm)
        done = {peer_id(peer): applied(peer.events()) for peer in swarm.peers}
    rounds = [event for event in next(iter(done.values())) if event["kind"] == "quorum"]
    counted = Counter(peer for event in rounds for peer in event["contributors"])
    each = {name: counted[peer] for name, peer in zip(LINKS, done, strict=True)}
    sys.stdout.write(f"{verdict}\nrounds that counted each: {each}\n")
    assert set(verdict["digests_per_height"]) == {1}
    assert verdict["rounds"] == ROUNDS and verdict["merges"] == 2
    last = [events[-1]["round"] for events in done.values()]  # of the merge, if it came first
    assert set(last) == {ROUNDS}
    assert len(counted) == len(LINKS), "every line carries work into the model"
