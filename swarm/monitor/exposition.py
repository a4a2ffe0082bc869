"""`/metrics`: the figures of `swarm.monitor.metrics`, in the text format of Prometheus.

The help text of a family is the definition of its metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from swarm.monitor import metrics
from swarm.monitor.metrics import Metric

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
Row = Mapping[str, Any]
Sample = tuple[Sequence[str], float | int | None]


@dataclass(frozen=True)
class Family:
    """One metric under its name for Prometheus.

    Attributes:
        labels: names of the labels.
        read: yields the samples of a snapshot. Samples without a value are left out.
    """

    metric: Metric
    name: str
    labels: tuple[str, ...]
    read: Callable[[Row], Iterator[Sample]]
    kind: Literal["gauge", "counter"] = "gauge"


def exposition(state: Row) -> bytes:
    """All families of a snapshot. Without a snapshot, only the health.

    Only peers that speak for the run are included. Otherwise sums over samples would count
    strangers, and each key that a stranger makes would be a new series.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(_speaking(state)))
    return generate_latest(registry)


def _speaking(state: Row) -> Row:
    """The snapshot with only the peers of `Snapshot.speaking`."""
    if "peers" not in state or state["members"] is None or not state["live"]:
        return state
    return {**state, "peers": [peer for peer in state["peers"] if peer["votes"] is not None]}


class _Collector(Collector):
    def __init__(self, state: Row) -> None:
        self._state = state

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for family in FAMILIES if "peers" in self._state else FAMILIES[:1]:
            kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
            found = kind(family.name, help_of(family.metric), labels=family.labels)
            for labels, value in family.read(self._state):
                if value is not None:
                    found.add_metric(labels, float(value))
            yield found


def help_of(metric: Metric) -> str:
    """The definition of a metric, in one line."""
    return f"{metric.title}, {metric.unit}: {metric.counts}; {metric.is_not}."


PEER = ("peer", "name")


def _run(*path: str) -> Callable[[Row], Iterator[Sample]]:
    def read(state: Row) -> Iterator[Sample]:
        yield (), _at(state, path)

    return read


def _peers(*path: str) -> Callable[[Row], Iterator[Sample]]:
    def read(state: Row) -> Iterator[Sample]:
        for peer in state["peers"]:
            yield (peer["peer_id"], peer["name"]), _at(peer, path)

    return read


def _experts(field: str) -> Callable[[Row], Iterator[Sample]]:
    def read(state: Row) -> Iterator[Sample]:
        for expert in state["experts"]:
            yield (str(expert["expert"]),), expert[field]

    return read


def _at(row: Row, path: Sequence[str]) -> float | None:
    value: Any = row
    for field in path:
        value = None if value is None else value[field]
    return None if value is None else float(value)


def _health(state: Row) -> Iterator[Sample]:
    yield (state["health"]["word"],), 1


def _tip(state: Row) -> Iterator[Sample]:
    yield (state["manifest_digest"], state["generation"]), 1


def _val_loss(state: Row) -> Iterator[Sample]:
    for _, loss in state["losses"][-1:]:
        yield (), loss


def _owned(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        yield (peer["peer_id"], peer["name"]), len(peer["owned_experts"])


def _refused(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        yield (peer["peer_id"], peer["name"]), sum(peer["refused"].values())


def _shares(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        for expert, share in enumerate((peer["routing"] or {}).get("shares", ())):
            yield (peer["peer_id"], peer["name"], str(expert)), share


def _phases(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        for phase, seconds in sorted((peer["last_round"] or {}).get("phases", {}).items()):
            yield (peer["peer_id"], peer["name"], phase), seconds


def _seen(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        published = peer["published"]
        ago_s = None if published is None else max(state["at"] - published, 0.0)
        yield (peer["peer_id"], peer["name"]), ago_s


def _scores(state: Row) -> Iterator[Sample]:
    """The scores of each publisher's newest scored round, since rounds are not labels."""
    newest: dict[tuple[str, str, str], Row] = {}
    for score in state["scores"]:
        labels = (score["task"], score["metric"], score["publisher"])
        if labels not in newest or newest[labels]["round"] < score["round"]:
            newest[labels] = score
    for labels, score in newest.items():
        yield labels, score["value"]


def _coverage(state: Row) -> Iterator[Sample]:
    found = state["coverage"]
    yield (), found and 100 * (found["laps"] + found["share"])


def _dropped(state: Row) -> Iterator[Sample]:
    for labels, value in _peers("routing", "dropped")(state):
        yield labels, None if value is None else 100 * value


def _causes(state: Row) -> Iterator[Sample]:
    names = {peer["peer_id"]: peer["name"] for peer in state["peers"]}
    for cause in state["causes"]:
        yield (cause["peer"], names.get(cause["peer"], ""), cause["fault"]), 1


def _round_trips(state: Row) -> Iterator[Sample]:
    for labels, value in _peers("link", "rtt_ms")(state):
        yield labels, None if value is None else value / 1000


def _rates(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        for direction in ("down", "up"):
            labels = (peer["peer_id"], peer["name"], direction)
            yield labels, _at(peer, ("link", f"{direction}_mbit"))


def _engines(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        yield (peer["peer_id"], peer["name"], peer["engine"]), 1 if peer["engine"] else None


def _between(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        for kind, share in sorted((peer["workers"] or {}).get("shares", {}).items()):
            yield (peer["peer_id"], peer["name"], kind), share


def _pairs(state: Row) -> Iterator[Sample]:
    for peer in state["peers"]:
        for first, second, alike in (peer["routing"] or {}).get("pairs", ()):
            yield (peer["peer_id"], peer["name"], str(first), str(second)), alike


FAMILIES = (
    Family(metrics.HEALTH, "swarm_health", ("word",), _health),
    Family(metrics.ROUND, "swarm_round", (), _run("round")),
    Family(metrics.ROUND_S, "swarm_round_seconds", (), _run("pace", "round_s")),
    Family(metrics.ETA, "swarm_eta_seconds", (), _run("pace", "eta_s")),
    Family(
        metrics.COMMITTED, "swarm_committed_tokens_per_second", (), _run("pace", "committed_per_s")
    ),
    Family(metrics.UTILISATION, "swarm_utilisation", (), _run("pace", "utilisation")),
    Family(metrics.DIGEST, "swarm_tip_info", ("digest", "generation"), _tip),
    Family(metrics.OWNED, "swarm_peer_experts", PEER, _owned),
    Family(metrics.LOSS, "swarm_peer_loss", PEER, _peers("loss")),
    Family(metrics.VAL_LOSS, "swarm_held_out_loss", (), _val_loss),
    Family(metrics.TOKENS_PER_S, "swarm_peer_tokens_per_second", PEER, _peers("tokens_per_s")),
    Family(metrics.SENT, "swarm_peer_sent_bytes", PEER, _peers("blob_bytes_sent"), "counter"),
    Family(
        metrics.RECEIVED,
        "swarm_peer_received_bytes",
        PEER,
        _peers("blob_bytes_received"),
        "counter",
    ),
    Family(
        metrics.MOMENTS,
        "swarm_peer_moments_sent_bytes",
        PEER,
        _peers("moments_bytes_sent"),
        "counter",
    ),
    Family(
        metrics.ZERO_MOMENTS, "swarm_peer_zero_moments", PEER, _peers("zero_moments"), "counter"
    ),
    Family(metrics.SKIPPED, "swarm_peer_steps_skipped", PEER, _peers("steps_skipped"), "counter"),
    Family(metrics.REFUSED, "swarm_peer_refused", PEER, _refused, "counter"),
    Family(metrics.MAX_LOAD, "swarm_peer_busiest_expert_load", PEER, _peers("routing", "max_load")),
    Family(metrics.IDLE, "swarm_peer_idle_experts", PEER, _peers("routing", "idle_experts")),
    Family(metrics.DROPPED, "swarm_peer_dropped_percent", PEER, _dropped),
    Family(
        metrics.SIMILARITY, "swarm_peer_expert_similarity", PEER, _peers("routing", "similarity")
    ),
    Family(metrics.SPIKES, "swarm_peer_gradient_spikes", PEER, _peers("grad_spikes"), "counter"),
    Family(metrics.SHARE, "swarm_peer_expert_share_permille", (*PEER, "expert"), _shares),
    Family(metrics.PHASE, "swarm_peer_phase_seconds", (*PEER, "phase"), _phases),
    Family(metrics.SEEN, "swarm_peer_seen_seconds_ago", PEER, _seen),
    Family(metrics.AGE, "swarm_expert_age_rounds", ("expert",), _experts("age")),
    Family(metrics.CAUSE, "swarm_peer_cause", (*PEER, "fault"), _causes),
    Family(metrics.COUNTED, "swarm_peer_counted", PEER, _peers("last_round", "counted")),
    Family(metrics.TOKENS_LOST, "swarm_peer_tokens_lost", PEER, _peers("tokens_lost"), "counter"),
    Family(metrics.RTT, "swarm_peer_round_trip_seconds", PEER, _round_trips),
    Family(metrics.RATE, "swarm_peer_line_mbit_per_second", (*PEER, "direction"), _rates),
    Family(metrics.ENGINE, "swarm_peer_engine_info", (*PEER, "engine"), _engines),
    Family(metrics.BETWEEN, "swarm_peer_worker_share", (*PEER, "kind"), _between),
    Family(metrics.BUBBLE, "swarm_peer_bubble_share", PEER, _peers("workers", "bubble")),
    Family(metrics.ALIKE, "swarm_peer_pair_permille", (*PEER, "first", "second"), _pairs),
    Family(metrics.COVERAGE, "swarm_text_percent", (), _coverage),
    Family(metrics.SCORE, "swarm_score", ("task", "metric", "publisher"), _scores),
)
"""Every metric once. The first metric is exported even when there is no snapshot."""
