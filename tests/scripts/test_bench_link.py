"""The measurement of link use: its links and its figures, without a swarm."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from swarm.emulation.links import Link
from swarm.errors import ConfigError

LOG = """2026-11-25T12:00:01Z DEBUG topic=round roster closed with 4 of 4 offers: nobody else
2026-11-25T12:00:02Z INFO waiting state=averaging reason='roster closed with 4 of 4 offers'
2026-11-25T12:02:06Z DEBUG topic=round height 1 decided with 3 of 4 votes under attempt 0
2026-11-25T12:02:09Z DEBUG topic=round height 2 decided with 3 of 4 votes under attempt 0
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    sys.modules.pop("bench_link", None)
    import bench_link  # the folder is on the path in this test alone

    return bench_link


def test_the_data_phase_lasts_from_a_roster_to_its_decision(script: ModuleType) -> None:
    other = LOG.replace("height 1", "height 7").replace("12:02:06", "12:00:11")
    assert script.data_phases_s([LOG, "", other]) == {1: 125.0, 7: 10.0}


def test_the_direction_that_needs_longer_counts(script: ModuleType) -> None:
    link = Link(up_mbit=20, down_mbit=100, rtt_ms=50)
    sent = {"blob_bytes_sent": 10_000_000, "blob_bytes_received": 10_000_000}
    assert script.needed_s(link, sent) == pytest.approx(4.0)
    received = sent | {"blob_bytes_received": 100_000_000}
    assert script.needed_s(link, received) == pytest.approx(8.0)


def test_links_are_named_or_described(script: ModuleType) -> None:
    first, second = script.links_of("home-20,home-100-20", 2.0)
    assert (first.up_mbit, second.down_mbit, second.rtt_ms) == (10, 50, 100)
    assert script.links_of("10/1mbit,60ms", 1.0) == [Link(1, 10, 60)]
    with pytest.raises(ConfigError):
        script.links_of("home-20,nix", 1.0)
