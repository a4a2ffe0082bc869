"""Figures: defined once, and added up over the right peers."""

from collections.abc import Callable
from dataclasses import replace

from swarm.monitor import metrics
from swarm.monitor.snapshot import Sighting, snapshot_of
from swarm.protocol.records.records import PeerRecord, PeerState


def test_every_metric_is_listed_once_and_fully_defined() -> None:
    defined = [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]
    assert sorted(m.title for m in defined) == sorted(m.title for m in metrics.METRICS)
    assert len({metric.title for metric in metrics.METRICS}) == len(metrics.METRICS)
    for metric in metrics.METRICS:
        assert metric.unit and metric.counts and metric.is_not.startswith("not ")
        assert f"{metric.title} ({metric.unit}): {metric.counts}" in metrics.glossary()


def test_only_peers_that_train_add_to_the_swarms_tokens_per_second(
    make_sighting: Callable[..., Sighting], make_peer: Callable[..., PeerRecord]
) -> None:
    states = {
        "QmA": PeerState.TRAINING,
        "QmB": PeerState.AVERAGING,
        "QmC": PeerState.FINISHED,
        "QmD": PeerState.JOINING,
    }
    peers = {p: make_peer(p, state=s, tokens_per_s=10.0) for p, s in states.items()}
    snapshot = snapshot_of(make_sighting(peers=peers))
    assert snapshot and metrics.swarm_tokens_per_s(snapshot) == 20.0


def test_bytes_per_round_are_the_mean_over_peers(
    make_sighting: Callable[..., Sighting], make_peer: Callable[..., PeerRecord]
) -> None:
    peers = {
        "QmA": make_peer("QmA", round_blob_bytes_sent=100, round_blob_bytes_received=10),
        "QmB": make_peer("QmB", round_blob_bytes_sent=300, round_blob_bytes_received=30),
    }
    snapshot = snapshot_of(make_sighting(peers=peers))
    assert snapshot and metrics.bytes_per_round(snapshot) == (200.0, 20.0)
    nobody = replace(snapshot, peers=())
    assert metrics.bytes_per_round(nobody) is None, "unknown is not zero"
