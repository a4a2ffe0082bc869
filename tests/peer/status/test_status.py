"""A peer's status: totals, differences between rounds, and nothing about others."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm import durable
from swarm.data.held_out import HeldOut
from swarm.network.node.node import Node
from swarm.network.rounds.round_driver import RoundDriver
from swarm.network.wire.link_health import LinkHealth
from swarm.network.wire.traffic import Throttle, Traffic
from swarm.peer.machine import state_directory
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.status.observing import RoundReport
from swarm.peer.status.round_log import round_line
from swarm.peer.status.status import MAX_RECENT, NO_DIGEST, PeerStatus, PhaseMeter, take_peak_rss
from swarm.protocol.records.life_events import EventReader
from swarm.protocol.records.records import (
    PeerRecord,
    PeerState,
    RoutingFigures,
    WorkersFigures,
    decode_record,
    encode_record,
)
from swarm.protocol.values.manifest import Kind, Manifest
from swarm.train.engine.engine import StepStats
from swarm.train.engine.local_steps import LocalStats, RoutingStats
from swarm.train.engine.rank_figures import RankFigures
from tests.protocol.round_pump import found, make_rules
from tests.train.runs import tiny_run

HELD_OUT = HeldOut((), num_tokens=64, num_bytes=128)
TIP = replace(found(make_rules(), ["A", "B"]), run="run-1")
STATS = LocalStats(
    steps=3,
    tokens=192,
    seconds=0.5,
    skipped=1,
    loss=2.5,
    cross_entropy=2.0,
    completed=True,
    routing=RoutingStats(
        max_load=1.5,
        idle_experts=2,
        dropped=0.125,
        similarity=0.4,
        shares=(250, 750),
        pairs=((0, 1, 0.4),),
    ),
)


def step(**changes: Any) -> StepStats:
    stats = StepStats(
        loss=2.5, cross_entropy=2.0, balance=0.0, router_z=0.0, output_z=0.0, grad_norm=1.0,
        tokens=64, expert_tokens=((1,),), skipped=False,
    )  # fmt: skip
    return replace(stats, **changes)


def successor(tip: Manifest) -> Manifest:
    number = tip.round + 1
    return replace(
        tip, height=number, round=number, step=3 * number, kind=Kind.QUORUM, parent=tip.digest
    )


def report(manifest: Manifest, stats: LocalStats | None = STATS) -> RoundReport:
    return RoundReport(manifest, stats, counted=stats is not None, wait_s=0.25, reason="applied")


@pytest.fixture
def node() -> SimpleNamespace:
    return SimpleNamespace(
        peer_id="A",
        addresses=("/ip4/1.2.3.4/tcp/5/p2p/A",),
        traffic=Traffic(),
        lines=LinkHealth(),
    )


@pytest.fixture
def status(node: SimpleNamespace, tmp_path: Path) -> PeerStatus:
    here = RunDirectory(tmp_path)
    return PeerStatus(cast(Node, node), tiny_run(), name="me", capacity=2.0, directory=here)


def watch(status: PeerStatus, **refused: int) -> None:
    driver = SimpleNamespace(
        tip=TIP,
        refused=Counter(refused),
        last_reason="roster closed",
        reasons=[],
        transfers=SimpleNamespace(rate_bytes_per_s=0.0),
    )
    status.watch(cast(RoundDriver, driver), "run-1")


def events(status: PeerStatus) -> list[dict[str, Any]]:
    assert status.directory is not None
    lines = status.directory.events_path.read_text().splitlines()
    schemas, reader = EventReader(), EventReader()
    for line in lines:
        schemas.parse(line)
    return [reader.read(line) for line in lines]


def test_a_cap_is_the_rate_of_a_link_that_is_faster_or_was_not_measured(
    status: PeerStatus, node: SimpleNamespace
) -> None:
    node.traffic.up, node.traffic.down = Throttle(20.0), Throttle(100.0)
    node.lines.down_mbit = 900.0
    link = status.record().link
    assert link is not None and (link.up_mbit, link.down_mbit) == (20.0, 100.0)
    node.lines.down_mbit = 50.0
    node.lines.tested(10.0)
    link = status.record().link
    assert link is not None and (link.up_mbit, link.down_mbit) == (10.0, 50.0)


def test_before_the_run_begins_a_peer_is_present_without_a_tip(status: PeerStatus) -> None:
    record = status.record()
    assert (record.state, record.round, record.manifest_digest) == (
        PeerState.STARTING,
        0,
        NO_DIGEST,
    )
    assert (record.name, record.capacity) == ("me", 2.0)
    assert record.owned_experts == ()


def test_a_record_is_one_that_others_can_read(status: PeerStatus) -> None:
    watch(status, bad_signature=2)
    status.end_steps(STATS)
    record = status.record()
    assert decode_record(PeerRecord, encode_record(record)) == record


def test_generation_round_digest_and_experts_come_from_one_manifest(status: PeerStatus) -> None:
    watch(status)
    status.applied(report(successor(TIP)))
    record = status.record()
    assert (record.generation, record.round) == (TIP.generation, 1)
    assert record.manifest_digest == successor(TIP).digest
    assert record.owned_experts == tuple(e for e, peers in TIP.owners.items() if "A" in peers)


def test_steps_under_way_count_from_the_tip(status: PeerStatus) -> None:
    watch(status)
    one = successor(TIP)
    status.applied(report(one))
    status.on_step(4, step())
    assert status.record().step == one.step + 1
    status.applied(report(successor(one)))
    assert status.record().step == successor(one).step


def test_a_round_s_event_says_how_much_of_it_was_training(status: PeerStatus) -> None:
    watch(status)
    status.applied(report(successor(TIP)))
    last = events(status)[-1]
    assert (last["steps"], last["training_s"], last["wait_s"]) == (3, 0.5, 0.25)
    status.applied(report(successor(successor(TIP)), None))
    assert (events(status)[-1]["steps"], events(status)[-1]["training_s"]) == (0, 0.0)


@pytest.mark.parametrize("most_bytes", [900, 1300, 1700])
def test_each_file_of_a_bounded_history_is_whole_by_itself(
    status: PeerStatus, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """Lines that another line refers to are removed with the previous file."""
    monkeypatch.setattr(state_directory, "MAX_EVENTS_BYTES", most_bytes)
    watch(status)
    tip, seen = TIP, set[int]()
    for number in range(12):
        tip = successor(tip)
        status.applied(report(tip))
        if number % 3 == 0:
            status.waits("a reason")
        assert status.directory is not None
        path = status.directory.events_path
        for file in (durable.older(path), path):
            reader = EventReader()
            for line in file.read_text().splitlines() if file.exists() else ():
                _, _, event = reader.parse(line)
                seen.add(getattr(event, "round", 0))
    assert seen >= set(range(TIP.round + 1, tip.round + 1))


def test_a_round_s_bytes_are_those_since_the_manifest_before(
    status: PeerStatus, node: SimpleNamespace
) -> None:
    watch(status)
    node.traffic.blob_bytes_sent += 1000  # a joiner's configuration, before any round
    status.applied(report(successor(TIP)))
    node.traffic.blob_bytes_sent += 70
    node.traffic.blob_bytes_received += 60
    node.traffic.control_bytes_sent += 5
    status.applied(report(successor(successor(TIP))))
    last = events(status)[-1]
    sent, received = last["blob_bytes_sent"], last["blob_bytes_received"]
    assert (sent, received, last["control_bytes_sent"]) == (70, 60, 5)
    record = status.record()
    assert (record.round_blob_bytes_sent, record.blob_bytes_sent) == (70, 1070)
    status.ended()
    assert events(status)[-1]["blobs_sent"] == 1070


def test_refusals_of_protocol_and_network_add_up(status: PeerStatus, node: SimpleNamespace) -> None:
    watch(status, protocol=1, bad_signature=2)
    node.traffic.refuse("bad_signature")
    node.traffic.refuse("blob_digest")
    expected = {"protocol": 1, "bad_signature": 3, "blob_digest": 1}
    assert status.record().refused == expected
    status.ended()
    assert events(status)[-1]["refused"] == expected


def test_tokens_add_up_and_lost_ones_are_told_apart(status: PeerStatus, caplog) -> None:
    watch(status)
    for _ in range(2):
        status.begin(PeerState.TRAINING)
        status.end_steps(STATS)
    status.lose_tokens(192, "it was left out")
    status.applied(report(successor(TIP), None))
    record = status.record()
    assert (record.tokens, record.steps_skipped, record.loss) == (384, 2, 2.0)
    last = events(status)[-1]
    assert (last["tokens_lost"], last["trained_tokens"], last["counted"]) == (192, 0, False)
    assert "it was left out" in caplog.text
    status.lose_tokens(5, "no time was left")
    status.ended()
    assert events(status)[-1]["tokens_lost"] == 197


def test_a_held_out_loss_is_said_in_nats_and_in_bits_of_the_text(
    status: PeerStatus, caplog: pytest.LogCaptureFixture
) -> None:
    watch(status)
    with caplog.at_level("DEBUG"):
        status.validated(TIP, 3 * math.log(2), HELD_OUT)
    assert "val_loss=2.0794 nats/token bits_per_byte=1.5000" in caplog.text
    assert status.validation is not None
    assert (status.validation.tokens, status.validation.text_bytes) == (64, 128)
    assert status.validation.bits_per_byte_of_nat * 3 * math.log(2) == pytest.approx(1.5)
    assert events(status)[-1]["bits_per_byte"] == pytest.approx(1.5)


@pytest.mark.parametrize("val_loss", [math.nan, math.inf])
def test_a_held_out_loss_that_no_record_has_is_said_and_not_published(
    status: PeerStatus, val_loss: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a record once ended the thread that publishes all others."""
    status.validated(TIP, 2.0, HELD_OUT)
    status.validated(successor(TIP), val_loss, HELD_OUT)
    assert status.validation is not None and status.validation.val_loss == 2.0
    assert f"round=1 has a held-out loss of {val_loss}" in caplog.text


def test_the_history_of_held_out_losses_is_bounded_without_the_newest(status: PeerStatus) -> None:
    manifest = TIP
    for _ in range(MAX_RECENT + 5):
        manifest = successor(manifest)
        status.validated(manifest, float(manifest.round), HELD_OUT)
    validation = status.validation
    assert validation is not None
    assert validation.val_loss == validation.round == MAX_RECENT + 5
    assert [round_ for round_, _ in validation.recent] == list(range(5, MAX_RECENT + 5))


def test_what_others_should_hear_of_soon_asks_for_publication(status: PeerStatus) -> None:
    watch(status)
    for tell in (
        lambda: status.begin(PeerState.AVERAGING),
        lambda: status.applied(report(successor(TIP))),
        lambda: status.validated(successor(TIP), 2.0, HELD_OUT),
    ):
        status.changed.clear()
        tell()
        assert status.changed.is_set()


def test_how_the_tokens_were_spread_is_in_record_event_and_log(status: PeerStatus, caplog) -> None:
    watch(status)
    assert status.record().routing is None
    status.end_steps(STATS)
    with caplog.at_level("DEBUG"):
        status.applied(report(successor(TIP)))
    figures = {"max_load": 1.5, "idle_experts": 2, "dropped": 0.125, "similarity": 0.4}
    assert status.record().routing == RoutingFigures(
        **figures, shares=(250, 750), pairs=((0, 1, 400),)
    )
    told = {"shares": [250, 750], "pairs": [[0, 1, 0.4]]}
    assert events(status)[-1]["routing"] == figures | told
    assert "max_load=1.50 idle_experts=2 dropped=0.125 similarity=0.40" in caplog.text


def test_what_the_workers_wait_for_is_in_record_event_and_log(status: PeerStatus, caplog) -> None:
    watch(status)
    status.end_steps(STATS)
    status.applied(report(successor(TIP)))
    assert status.record().workers is events(status)[-1]["workers"] is None
    quick = RankFigures(
        steps=2,
        seconds=4.0,
        micro_batches=2,
        idle=2,
        operations={"sums": 4},
        num_bytes={"sums": 64},
        waited_s={"sums": 3.0},
    )
    stats = replace(STATS, workers=(quick, replace(quick, micro_batches=4, idle=0, waited_s={})))
    with caplog.at_level("INFO"):
        status.end_steps(stats)
    status.applied(report(successor(successor(TIP)), stats))
    why = "worker 1 computes 2 s a step, others 0.5: 2 micro-batches, not 1"
    assert "2 workers, 2 s a step; between them: sums 38%; fewer" in caplog.text
    assert why in caplog.text
    told = {"number": 2, "step_s": 2.0, "shares": {"sums": 0.375}, "idle": (0,), "slowest": 1}
    record = status.record()
    assert record.workers == WorkersFigures(**told, bubble=None, expected=None, why=why)
    assert decode_record(PeerRecord, encode_record(record)) == record
    event = events(status)[-1]["workers"]
    assert event["ranks"][0] == asdict(quick)
    assert {name: event[name] for name in told} == {**told, "idle": [0]}


def test_a_record_of_a_very_large_model_leaves_out_the_shares(status: PeerStatus) -> None:
    routing = replace(cast(RoutingStats, STATS.routing), shares=(1,) * 300)
    status.end_steps(replace(STATS, routing=routing))
    record = status.record()
    assert record.routing and record.routing.shares == ()
    assert decode_record(PeerRecord, encode_record(record)) == record


def test_the_last_training_round_is_published_and_no_merge_hides_it(status: PeerStatus) -> None:
    watch(status)
    assert status.record().last_round is None
    status.begin(PeerState.TRAINING)
    status.node.traffic.blob_bytes_sent += 700
    status.applied(report(successor(TIP)))
    told = status.record().last_round
    assert told and (told.round, told.counted) == (1, True)
    assert (told.blob_bytes_sent, told.blob_bytes_received) == (700, 0)
    assert "training" in told.phases and sum(told.phases.values()) <= told.seconds + 0.01
    assert decode_record(PeerRecord, encode_record(status.record())) == status.record()
    merge = replace(successor(successor(TIP)), kind=Kind.MERGE)
    status.applied(report(merge, None))
    assert status.record().last_round == told


def test_gradient_spikes_and_the_median_norm_are_published(status: PeerStatus) -> None:
    watch(status)
    for norm in [1.0] * 10 + [30.0, 1.0, float("nan"), 2.0]:
        status.on_step(1, step(skipped=norm != norm, grad_norm=norm, spike=norm == 30.0))
    record = status.record()
    assert (record.grad_spikes, record.grad_norm) == (1, 1.0)
    assert decode_record(PeerRecord, encode_record(record)) == record


def test_a_peer_without_a_run_directory_keeps_no_history(node: SimpleNamespace) -> None:
    status = PeerStatus(cast(Node, node), tiny_run(), name="me", capacity=1.0)
    watch(status)
    status.applied(report(successor(TIP)))
    status.ended()
    assert status.directory is None


def test_the_record_of_a_finished_peer_follows_its_tip(status: PeerStatus) -> None:
    watch(status)
    status.changed.clear()
    status.follow(TIP)
    assert not status.changed.is_set(), "nothing is new"
    reformed = replace(successor(TIP), kind=Kind.REFORM, generation="ab")
    status.follow(reformed)
    assert status.changed.is_set()
    assert (status.record().generation, status.record().manifest_digest) == ("ab", reformed.digest)


def test_a_peer_that_no_round_waits_for_is_told_so(
    status: PeerStatus, caplog: pytest.LogCaptureFixture
) -> None:
    status.tokens_per_s, tip = 10.0, TIP
    for number in range(1, 8):
        tip = successor(tip)
        status.applied(replace(report(tip), counted=number == 4))
        told = [r.message for r in caplog.records if "went on without this peer" in r.message]
        assert len(told) == (0 if number < 3 else 1 if number < 7 else 2)
    status.applied(replace(report(successor(tip), None), counted=False))  # it catches up
    assert status.missed == 3, "a starved peer applies several rounds for each that it trains in"
    status.applied(replace(report(successor(tip)), counted=True))
    assert status.missed == 0


def test_tokens_of_rounds_that_were_rolled_back_are_lost(status: PeerStatus) -> None:
    """Two rounds after a reform at height 1 are replaced by those of the former generation."""
    one = successor(TIP)
    left = replace(one, lineage=((1, (2, "62")),), generation="62")
    for manifest in (one, replace(left, height=2), replace(left, height=3)):
        status.applied(report(manifest))
    assert status.tokens_lost == 0
    status.applied(report(replace(one, height=5, round=5), None))
    assert status.tokens_lost == 2 * STATS.tokens
    status.applied(report(replace(one, height=6, round=6), None))
    assert status.tokens_lost == 2 * STATS.tokens


def test_a_first_round_that_takes_long_has_figures_before_its_end(status: PeerStatus) -> None:
    """Otherwise the monitor shows 0 tokens/s for minutes."""
    watch(status)
    assert status.record().tokens_per_s == 0.0
    status.begin(PeerState.TRAINING)
    status.progress.begin(1, 8)
    status.progress.planned(0, 50)
    status.on_step(1, step(cross_entropy=4.5))
    record = status.record()
    assert record.tokens_per_s > 0.0
    assert record.loss == 4.5


def test_a_peer_that_waits_says_for_what_also_in_its_history(
    status: PeerStatus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch(status)
    status.begin(PeerState.AVERAGING)
    status.waits("")
    status.waits("3 of 4 have offered")
    assert caplog.messages == [
        "waiting state=averaging",
        "waiting state=averaging reason='3 of 4 have offered'",
    ]
    said = [event["text"] for event in events(status) if event["event"] == "progress"]
    assert said[1] == "waiting: averaging reason='3 of 4 have offered'"


def test_a_round_without_a_reason_does_not_show_an_empty_one(
    status: PeerStatus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    watch(status)
    status.applied(replace(report(successor(TIP)), reason=""))
    assert "reason" not in caplog.text


def test_a_round_is_one_line_that_fits_a_terminal(
    status: PeerStatus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch(status)
    status.validated(TIP, 7.29, HELD_OUT)
    status.end_steps(STATS)
    status.applied(report(successor(TIP)))
    assert len(caplog.messages) == 1
    (line,) = caplog.messages
    assert re.fullmatch(
        r"round 1/\d+  loss [\d.]+  held-out 7.29  \d of \d peers  [\d.]+ s  [\d.]+ MB", line
    )
    assert len(line) < 80
    caplog.clear()
    status.applied(report(successor(successor(TIP))))
    assert "held-out" not in caplog.messages[0], "it is that of a round long before"


def test_a_round_of_a_peer_that_left_with_it_counts_it() -> None:
    tip = successor(TIP)
    left = replace(tip, members={"A": tip.members["A"]}, contributors=("A", "B"))
    line = round_line(left, 4, loss=None, held_out=None, seconds=1.0, sent_bytes=0)
    assert "  2 of 2 peers  " in line


class Scripted:
    """A clock and a peak that the test sets."""

    def __init__(self) -> None:
        self.now, self.peak = 0.0, 0

    def meter(self) -> PhaseMeter:
        return PhaseMeter(lambda: self.now, lambda: self.peak)

    def passes(self, seconds: float, peak: int) -> None:
        self.now += seconds
        self.peak = peak


def test_each_phase_has_its_own_seconds_and_peak() -> None:
    script = Scripted()
    meter = script.meter()
    meter.begin("training")
    script.passes(5, 700)
    meter.begin("averaging")
    script.passes(2, 300)
    found = meter.take()
    assert found["training"] == {"seconds": 5, "peak_rss_bytes": 700}
    assert found["averaging"] == {"seconds": 2, "peak_rss_bytes": 300}
    assert "starting" not in found  # it took no time


def test_a_phase_within_another_pauses_it_and_the_same_phase_adds_up() -> None:
    script = Scripted()
    meter = script.meter()
    meter.begin("averaging")
    script.passes(1, 10)
    with meter.within("adopting"):
        script.passes(3, 90)
    script.passes(1, 20)
    found = meter.take()
    assert found["averaging"] == {"seconds": 2, "peak_rss_bytes": 20}
    assert found["adopting"] == {"seconds": 3, "peak_rss_bytes": 90}


def test_what_was_taken_is_not_told_again_and_the_phase_goes_on() -> None:
    script = Scripted()
    meter = script.meter()
    meter.begin("training")
    script.passes(4, 5)
    meter.take()
    script.passes(6, 7)
    assert meter.take() == {"training": {"seconds": 6, "peak_rss_bytes": 7}}


def held(num_bytes: int) -> Iterator[None]:
    tensor = torch.ones(num_bytes // 4)
    yield
    del tensor


def test_the_peak_of_the_process_is_forgotten_once_it_was_told() -> None:
    size = 256 * 2**20
    take_peak_rss()
    before = take_peak_rss()
    for _ in held(size):
        pass
    assert before + 0.9 * size < take_peak_rss() < before + 1.2 * size
    assert take_peak_rss() < before + 0.1 * size
