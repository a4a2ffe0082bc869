"""Swarms of many peers: short schedules, and the script that measures their cost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.emulation.simulator.peers.participant import Character
from swarm.protocol.rounds.policies.slow_links import Relays
from tests.emulation.simulator.schedules import require_sound

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_scale.py"


@pytest.mark.parametrize("seed", [0, 1])
def test_64_peers_with_faults_agree(seed):
    assert require_sound("S", seed).rounds >= 3


def test_64_peers_whose_lines_are_known_agree_on_what_relays_pass_on(monkeypatch):
    """Like any other source, a relay may lack an expert or die with it (blob relays)."""
    drawn = []

    def of(relays, digest, writer):
        drawn.append(draw(relays, digest, writer))
        return drawn[-1]

    draw = Relays.of
    monkeypatch.setattr(Relays, "of", of)
    monkeypatch.setattr(Character, "uplink", property(lambda _: 20))
    assert require_sound("S", 0).rounds >= 3
    assert any(drawn)


def test_what_a_swarm_costs_is_measured_at_every_size():
    command = [sys.executable, SCRIPT, "--peers", "4,16", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    tables = json.loads(ended.stdout.splitlines()[-1])
    assert tables.keys() == {"messages", "decisions", "records", "round", "summary"}
    for rows in tables.values():
        assert {row["peers"] for row in rows} == {4, 16}
    kinds = {row["message"] for row in tables["messages"] if row["bytes"] > 0}
    assert kinds == {
        *("HELLO", "PREPARE", "READY", "ROSTER"),
        *("REDUCED", "PROPOSE", "ACCEPT", "COMMIT"),
    }
    assert all(row["message_bytes"] > 0 for row in tables["round"])
    small, large = (row["manifest_bytes"] for row in tables["summary"])
    assert small < large
