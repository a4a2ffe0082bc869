"""Figures: defined once, and added up over the right peers."""

from dataclasses import replace

from swarm.monitor import metrics
from swarm.protocol.records.records import PeerState
from tests.monitor.small_swarm import snapshot_with
from tests.peer_records import peer_record


def test_every_metric_is_listed_once_and_fully_defined() -> None:
    defined = [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]
    assert sorted(m.title for m in defined) == sorted(m.title for m in metrics.METRICS)
    assert len({metric.title for metric in metrics.METRICS}) == len(metrics.METRICS)
    for metric in metrics.METRICS:
        assert metric.unit and metric.counts and metric.is_not.startswith("not ")
        assert f"{metric.title} ({metric.unit}): {metric.counts}" in metrics.glossary()


def test_only_peers_that_train_add_to_the_swarms_tokens_per_second() -> None:
    states = {
        "QmA": PeerState.TRAINING,
        "QmB": PeerState.AVERAGING,
        "QmC": PeerState.FINISHED,
        "QmD": PeerState.JOINING,
    }
    peers = {p: peer_record(p, state=s, tokens_per_s=10.0) for p, s in states.items()}
    seen = snapshot_with(peers=peers)
    assert metrics.swarm_tokens_per_s(seen) == 20.0


def test_bytes_per_round_are_the_mean_over_peers() -> None:
    peers = {
        "QmA": peer_record("QmA", round_blob_bytes_sent=100, round_blob_bytes_received=10),
        "QmB": peer_record("QmB", round_blob_bytes_sent=300, round_blob_bytes_received=30),
    }
    seen = snapshot_with(peers=peers)
    assert metrics.bytes_per_round(seen) == (200.0, 20.0)
    nobody = replace(seen, peers=())
    assert metrics.bytes_per_round(nobody) is None, "unknown is not zero"
