"""The drill: peers are killed -9 at random moments of the round. And the parts of its verdict."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import digests_by_height, tokens_lost

ROOT = Path(__file__).parents[2]
KILLS = 4
KILL_S = 120.0
"""A kill with the return of its victim takes 10 to 20 s on two idle cores."""


def applied(height: int, digest: str, **fields: object) -> dict[str, object]:
    return {"event": "applied", "kind": "quorum", "height": height, "digest": digest} | fields


@pytest.mark.exhaustive  # takes 1.5 minutes; the matrix kills peers in every run of the tests
@pytest.mark.scenario
def test_four_kills_leave_one_chain_and_no_round_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/benchmarks/drill.py", "--kills", str(KILLS)]
    command += ["--seed", "1", "--json"]
    drill = subprocess.run(
        command,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=KILLS * KILL_S + 120,
        check=False,
    )
    assert drill.returncode == 0, drill.stderr[-3000:]
    verdict = json.loads(drill.stdout.splitlines()[-1])
    assert (verdict["kills"], verdict["inconsistent"]) == (KILLS, 0)
    assert verdict["hangs"] == verdict["ended"] == []
    assert verdict["rounds"] > KILLS


def test_a_height_with_two_digests_is_seen_also_when_only_a_start_tells_of_it() -> None:
    one = [applied(1, "a"), applied(2, "b")]
    other = [applied(1, "a"), {"event": "started", "height": 2, "digest": "c"}]
    assert digests_by_height([one, other]) == {1: {"a"}, 2: {"b", "c"}}


def test_tokens_lost_add_up_over_the_lives_of_a_peer() -> None:
    lives = [
        {"event": "started"},
        applied(1, "a", tokens_lost=0),
        applied(2, "b", tokens_lost=5),
        {"event": "started"},
        applied(3, "c", tokens_lost=2),
    ]
    assert tokens_lost(lives) == 7
