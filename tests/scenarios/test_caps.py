"""A peer with a cap and a quota: counted though slow, and it leaves in order at its quota."""

import itertools
import time
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalSwarm, digests_by_height
from swarm.errors import DataQuotaSpent
from tests.scenarios.swarms import ROUND_S, peer_id, rounds, write_run

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

CAP_MBIT = 2.0
SIZES = ["run.rounds=100000", "model.hidden_size=128", "model.moe_intermediate_size=128"]
QUOTA_MB = 60
"""Some rounds of 3 MB each way, and the bytes of leaving."""


def test_a_capped_peer_is_counted_and_leaves_before_its_quota_is_spent(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, SIZES)
    with LocalSwarm(tmp_path / "swarm", run_file, 3) as swarm:
        founder = swarm.add(["--run", str(run_file), "--wait-for-peers", "3"])
        join = founder.join_options()
        swarm.add(join)
        limits = ["--max-upload", f"{CAP_MBIT:g}mbit", "--data-quota", f"{QUOTA_MB}MB"]
        began_s = time.time()
        capped = swarm.add([*join, *limits])
        assert capped.wait(20 * ROUND_S) == DataQuotaSpent.exit_code
        swarm.peers.remove(capped)
        done = rounds(capped)
        me = peer_id(capped)
        counted = [event for event in done if me in event["contributors"]]
        assert len(counted) >= 2 and len(counted) >= len(done) / 2
        sent = sum(event["blob_bytes_sent"] for event in done)
        took_s = done[-1]["time"] - began_s
        assert sent * 8 / 1e6 <= 1.05 * CAP_MBIT * took_s
        moved = sent + sum(event["blob_bytes_received"] for event in done)
        assert moved < QUOTA_MB * 1e6
        output = capped.output()
        assert "data quota: " in output and "; leaving" in output and "left: " in output
        last = done[-1]["round"]
        swarm.wait_until(
            lambda _: all(rounds(peer)[-1]["round"] >= last + 2 for peer in swarm.peers),
            what="rounds of the others",
            timeout_s=3 * ROUND_S,
        )
        assert me not in rounds(founder)[-1]["members"]
        assert len(rounds(founder)[-1]["owners"]) == len(rounds(founder)[0]["owners"])
        capped.start()
        assert capped.wait(ROUND_S) == DataQuotaSpent.exit_code, "not again in this month"
        histories = [peer.events() for peer in itertools.chain(swarm.peers, [capped])]
        assert {len(digests) for digests in digests_by_height(histories).values()} == {1}
