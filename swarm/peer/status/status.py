"""A peer's report about itself: one log line and one event per round, and its record."""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.network.node.node import Node
from swarm.network.rounds.round_driver import RoundDriver
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.status import round_log
from swarm.peer.status.observing import UNOBSERVED, PeerObserver, RoundReport
from swarm.progress import Reporter
from swarm.protocol.exchange.handover import Moments
from swarm.protocol.records import records
from swarm.protocol.rounds.state import room_for_all
from swarm.protocol.timing.fitness import lateness
from swarm.protocol.values.manifest import Code, Kind, Manifest, PeerId, is_ancestor
from swarm.train.engine.engine import StepStats
from swarm.train.engine.host_memory import return_free_memory
from swarm.train.engine.local_steps import LocalStats
from swarm.train.engine.rank_figures import folded
from swarm.version import __version__

logger = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
"""Written to `/proc/self/clear_refs`, it resets the peak of resident memory; see proc(5)."""
STARTING = "starting"


@dataclass(frozen=True)
class PhaseFigures:
    """Figures of one phase, or of several phases of the same name together.

    Attributes:
        seconds: duration of the phase.
        peak_rss_bytes: peak of the resident memory of the whole process, all threads included; 0
            if the system does not give it.
    """

    seconds: float
    peak_rss_bytes: int


class PhaseMeter:
    """Follows one thread through its phases; an inner phase pauses the outer one."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        peak: Callable[[], int] | None = None,
        between: Callable[[], None] = return_free_memory,
    ) -> None:
        """Begins with the phase `STARTING`.

        Args:
            clock: monotonic seconds.
            peak: the peak of resident memory since the last call, in bytes.
            between: called between phases, so that memory freed by one phase is not in the peak
                of the next.
        """
        self._clock, self._peak, self._between = clock, peak or take_peak_rss, between
        self._name = STARTING
        self._since_s = clock()
        self._found: dict[str, PhaseFigures] = {}

    def begin(self, name: str) -> None:
        """Ends the current phase and begins this one."""
        if name != self._name:
            self._between()
        now_s, peak = self._clock(), self._peak()
        before = self._found.get(self._name, PhaseFigures(0.0, 0))
        self._found[self._name] = PhaseFigures(
            before.seconds + now_s - self._since_s, max(before.peak_rss_bytes, peak)
        )
        self._name, self._since_s = name, now_s

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase within the current one."""
        outer = self._name
        self.begin(name)
        try:
            yield
        finally:
            self.begin(outer)

    def take(self) -> dict[str, dict[str, float]]:
        """All phases since the last call, including the current one so far."""
        self.begin(self._name)
        found, self._found = self._found, {}
        return {name: asdict(figures) for name, figures in found.items() if figures.seconds > 0}


def take_peak_rss() -> int:
    """Peak of this process's resident memory in bytes since the last call; 0 if unknown.

    Each call resets the peak, so a process can have one meter only.
    """
    try:
        line = next(each for each in _STATUS.read_text().splitlines() if each.startswith("VmHWM"))
        _CLEAR_REFS.write_text(_FORGET_PEAK)
    except (OSError, StopIteration) as error:
        logger.debug("no peak of memory: %s", error)
        return 0
    return int(line.split()[1]) * 1024


class StepProgress:
    """Follows the local steps of each round.

    Attributes:
        tokens_per_s: of the current round's steps so far; None before the first.
        loss: mean cross-entropy of the finite losses, nats per token; None before the first.
    """

    def __init__(
        self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Follows no steps yet.

        Args:
            say: called with each progress line.
            clock: clock in seconds.
        """
        self._say, self._clock = say, clock
        self._reporter = Reporter("", "step", clock)
        self._done = self._to_do = self._tokens = self._finite = 0
        self._begin_s = clock()
        self._loss_sum = 0.0
        self.tokens_per_s: float | None = None
        self.loss: float | None = None

    def begin(self, number: int, rounds: int) -> None:
        """The local steps of a round begin, or continue after an interruption."""
        self._reporter = Reporter(f"round {number}/{rounds}", "step", self._clock)
        self._begin_s = self._clock()
        self._done = self._to_do = self._tokens = self._finite = 0
        self._loss_sum, self.tokens_per_s, self.loss = 0.0, None, None

    def planned(self, done: int, to_do: int) -> None:
        """Sets how many steps of this round are done, and how many remain."""
        self._done, self._to_do = done, to_do

    def stepped(self, stats: StepStats) -> None:
        """A step was done, after `planned`."""
        seconds = max(self._clock() - self._begin_s, 1e-9)
        self._tokens += stats.tokens
        self.tokens_per_s = self._tokens / seconds
        if not stats.skipped:
            self._finite += 1
            self._loss_sum += stats.cross_entropy
            self.loss = self._loss_sum / self._finite
        loss = "none" if self.loss is None else f"{self.loss:.4f}"
        step_s = seconds * stats.tokens / max(self._tokens, 1)
        done, total = self._done + 1, self._done + self._to_do
        details = f"loss {loss}, {self.tokens_per_s:,.0f} tokens/s"
        if said := self._reporter.at(done, total, details, step_s * (total - done)):
            self._say(str(said))


def told_workers(stats: LocalStats) -> records.WorkersFigures | None:
    """Figures of the workers for the record; also logs them. None without workers."""
    found = folded(stats.workers)
    if found is None:
        return None
    logger.info("%s", found.words())
    return records.workers_figures(
        {**asdict(found), "why": records.shortened(found.why, records.MAX_BRIEF)}
    )


def workers_event(stats: LocalStats | None) -> dict[str, Any] | None:
    """Figures of the workers for the event, with those of each worker; None without workers."""
    found = folded(stats.workers) if stats else None
    if stats is None or found is None:
        return None
    return {**asdict(found), "ranks": [asdict(rank) for rank in stats.workers]}


NO_DIGEST = "0" * 64
MAX_RECENT = 200
MAX_COUNTED = 4096
"""A rollback of more rounds than this counts no further tokens as lost."""
MAX_NORMS = 64


class PeerStatus:
    """The status of this peer, as others can see it."""

    def __init__(
        self,
        node: Node,
        run: RunConfig,
        *,
        name: str,
        capacity: float,
        directory: RunDirectory | None = None,
        observer: PeerObserver = UNOBSERVED,
        room_of: Callable[[], int] = room_for_all,
    ) -> None:
        self.node, self.run, self.directory, self.observer = node, run, directory, observer
        self.name, self.capacity = name, capacity
        self.changed = threading.Event()
        """Set when a record should be published before the next heartbeat."""
        node.lines.when_cut = self.changed.set
        self.reason_of: Callable[[], str] = str
        self.refused_of: Callable[[], Counter[str]] = Counter
        self.room_of = room_of
        """Experts that fit this machine."""
        self.fetched_of: Callable[[], float] = float
        """Rate of fetches in bytes per second; 0 if none was measured."""
        self.engine_of: Callable[[], str] = str
        self.manifest: Manifest | None = None
        self.validation: records.ValidationRecord | None = None
        self.tokens = self.tokens_lost = self.skipped = 0
        self.tokens_per_s = 0.0
        self.zero_moments = 0
        self.moments_reason = ""
        self.progress = StepProgress(lambda text: self._event("progress", text=text))
        """Figures of the current local steps."""
        self.phases = PhaseMeter()
        """Phases of the trainer's thread."""
        self.account = round_log.RoundAccount(node.peer_id)
        self._state = records.PeerState.STARTING
        self._since_s = time.monotonic()
        self._steps_done = 0
        self._loss: float | None = None
        self._routing: records.RoutingFigures | None = None
        self._workers: records.WorkersFigures | None = None
        self._last_round: records.RoundFigures | None = None
        self._grad_norms: tuple[float, ...] = ()
        self.grad_spikes = 0
        self._counted: list[tuple[Code, int]] = []
        """This peer's tokens in applied manifests that may still be rolled back."""
        self.missed = 0
        """Rounds in a row in which this peer trained and was not counted."""
        self._round_s = time.monotonic()
        self._at_round_start = self._round_traffic = self.traffic()

    def watch(self, driver: RoundDriver, run_id: str) -> None:
        """Connects this status to the driver of rounds."""
        self.reason_of = lambda: driver.last_reason
        self.refused_of = lambda: driver.refused + self.node.traffic.refused
        self.account.reasons_of = lambda: tuple(driver.reasons)
        self.fetched_of = lambda: driver.transfers.rate_bytes_per_s
        self.manifest = tip = driver.tip
        self._event(
            "started",
            run=run_id,
            peer_id=self.node.peer_id,
            height=tip.height,
            digest=tip.digest,
            **asdict(self.traffic()),
        )

    def finished(self) -> None:
        """All rounds are done; from now on the peer only serves others."""
        manifest = self.manifest
        assert manifest is not None
        self._event("finished", round=manifest.round, digest=manifest.digest)

    def follow(self, tip: Manifest) -> None:
        """Follows a tip that changes after the end, for example when survivors reform."""
        if self.manifest is None or tip.digest != self.manifest.digest:
            self.manifest = tip
            self.changed.set()

    def ended(self) -> None:
        """Writes the last event of the process, with totals since its start."""
        self._event(
            "ended",
            **asdict(self.traffic()),
            refused=dict(self.refused_of()),
            phases=self.phases.take(),
            tokens_lost=self.tokens_lost,
        )

    # ------------------------------------------------ called by the trainer

    def begin(self, state: records.PeerState) -> None:
        """The peer enters another state."""
        self._state, self._since_s = state, time.monotonic()
        self.phases.begin(state.value)
        self.changed.set()
        self.observer.on_state(state)

    def waits(self, why: str) -> None:
        """Logs why the peer has waited for a while."""
        said = round_log.because(why)
        logger.info("waiting state=%s%s", self._state.value, said)
        self._event("progress", text=f"waiting: {self._state.value}{said}")

    def since_begin_s(self) -> float:
        """Seconds since the last `begin`."""
        return time.monotonic() - self._since_s

    def on_step(self, step: int, stats: StepStats) -> None:
        """One local step was done."""
        self._steps_done += 1
        self.grad_spikes += stats.spike
        self._grad_norms = (*self._grad_norms, stats.grad_norm)[-MAX_NORMS:]
        self.progress.stepped(stats)
        self.tokens_per_s = self.progress.tokens_per_s or 0.0
        if self._loss is None:  # the first round may take long
            self._loss = self.progress.loss
        if stats.skipped:
            logger.warning("step=%d skipped: loss or gradient is not finite", step)
        self.observer.on_step(step, stats)

    def end_steps(self, stats: LocalStats) -> None:
        """The local steps of a round are done, or a newer tip ended them."""
        self.tokens += stats.tokens
        self.skipped += stats.skipped
        self._loss = stats.cross_entropy
        if stats.routing:
            self._routing = records.routing_figures(asdict(stats.routing))
        self._workers = told_workers(stats)
        self.tokens_per_s = stats.tokens / max(stats.seconds, 1e-9)

    def refused(self, unit: str, reason: str) -> None:
        """A value of this peer is outside the bound, so no peer would accept it."""
        self._event("refused", unit=unit, reason=reason)

    def lose_tokens(self, tokens: int, why: str) -> None:
        """Counts tokens of local steps that entered no manifest."""
        self.tokens_lost += tokens
        logger.warning("tokens_lost=%d%s", tokens, round_log.because(why))

    def gave_moments(self, moments: Moments, peers: Sequence[PeerId]) -> None:
        """Moments of an expert are offered to its next owners."""
        self._event("moments_given", **asdict(moments), to=list(peers))

    def took_moments(self, expert: int, moments: Moments | None, reason: str) -> None:
        """An expert that this peer took over starts with these moments; None means zeros."""
        if moments is None:
            self.zero_moments += 1
        self.moments_reason = f"expert {expert}: {reason}"
        logger.info("moments %s", self.moments_reason)
        self._event(
            "moments_taken",
            expert=expert,
            round=moments.round if moments else None,
            digest=moments.digest if moments else None,
            reason=reason,
        )
        self.changed.set()

    def validated(self, manifest: Manifest, val_loss: float, held_out: HeldOut) -> None:
        """The held-out loss of an agreed state was measured here, in nats per token."""
        if not math.isfinite(val_loss):  # no record may contain it
            logger.warning("round=%d has a held-out loss of %s", manifest.round, val_loss)
            return
        before = self.validation
        recent = (*before.recent, (before.round, before.val_loss)) if before else ()
        self.validation = records.ValidationRecord(
            manifest.round,
            manifest.digest,
            val_loss,
            held_out.num_tokens,
            held_out.num_bytes,
            recent[-MAX_RECENT:],
        )
        bits_per_byte = held_out.bits_per_byte(val_loss)
        logger.debug(
            "round=%d val_loss=%.4f nats/token bits_per_byte=%.4f",
            manifest.round, val_loss, bits_per_byte,
        )  # fmt: skip
        self._event(
            "validation",
            round=manifest.round,
            digest=manifest.digest,
            val_loss=val_loss,
            bits_per_byte=bits_per_byte,
        )
        self.changed.set()
        self.observer.on_validation(manifest.round, val_loss, bits_per_byte)

    def applied(self, report: RoundReport) -> None:
        """A manifest was applied: the round's log line and event."""
        manifest, stats = report.manifest, report.stats
        now, traffic, phases = time.monotonic(), self.traffic(), self.phases.take()
        self._round_traffic = traffic - self._at_round_start
        seconds, self._round_s, self._at_round_start = now - self._round_s, now, traffic
        self.manifest, self._steps_done = manifest, 0
        owned = self.owned_experts()
        loss = stats.cross_entropy if stats else None
        line = round_log.round_line(
            manifest,
            self.run.run.rounds,
            loss=loss,
            held_out=self._newest_loss(manifest.round),
            seconds=seconds,
            sent_bytes=self._round_traffic.blobs_sent,
        )
        logger.info("%s", line)
        logger.debug(
            "round=%d/%d kind=%s height=%d digest=%s members=%d contributors=%d owned=%s "
            "loss=%s %s wait_s=%.2f round_s=%.2f tokens_per_s=%.0f sent_bytes=%d%s",
            manifest.round, self.run.run.rounds, manifest.kind.value, manifest.height,
            manifest.digest[:12], len(manifest.members), len(manifest.contributors),
            ",".join(map(str, owned)) or "none", "none" if loss is None else f"{loss:.4f}",
            self._routing_words(stats),
            report.wait_s, seconds, self.tokens_per_s, self._round_traffic.blobs_sent,
            round_log.because(report.reason),
        )  # fmt: skip
        for line in round_log.told(manifest.reasons):
            logger.info("round %d: %s", manifest.round, line)
        self._tell_lateness(report, seconds)
        self._follow_chain(report)
        why_not = ""
        if manifest.kind is Kind.QUORUM:
            took = {name: figures["seconds"] for name, figures in phases.items()}
            self._last_round = self.account.close(report, seconds, took, self._round_traffic)
            why_not = self._last_round.why_not
        self._event(
            "applied",
            generation=manifest.generation, height=manifest.height, round=manifest.round,
            kind=manifest.kind.value, digest=manifest.digest, step=manifest.step,
            tokens=manifest.tokens, members=sorted(manifest.members),
            contributors=list(manifest.contributors), owned=list(owned),
            owners={str(expert): list(who) for expert, who in sorted(manifest.owners.items())},
            trained_tokens=stats.tokens if stats else 0, counted=report.counted,
            tokens_lost=self.tokens_lost, wait_s=round(report.wait_s, 3),
            steps=stats.steps if stats else 0,
            training_s=round(stats.seconds, 3) if stats else 0.0,
            seconds=round(seconds, 3), blob_bytes_sent=self._round_traffic.blobs_sent,
            blob_bytes_received=self._round_traffic.blobs_received,
            control_bytes_sent=self._round_traffic.control_sent,
            moments_bytes_sent=self._round_traffic.moments_sent, reason=report.reason,
            routing=asdict(stats.routing) if stats and stats.routing else None,
            grad_norm=self._median_norm(), grad_spikes=self.grad_spikes,
            phases=phases, why_not=why_not, workers=workers_event(stats),
        )  # fmt: skip
        self.changed.set()
        self.observer.on_round(report)

    def _newest_loss(self, round_: int) -> float | None:
        """Held-out loss of this round or the previous one; other peers measure other rounds."""
        found = self.validation
        return found.val_loss if found and found.round >= round_ - 1 else None

    def _follow_chain(self, report: RoundReport) -> None:
        """Counts tokens as lost whose manifests gave way to another chain."""
        code = report.manifest.code
        kept = [own for own in self._counted if is_ancestor(own[0], code)]
        if len(kept) < len(self._counted):
            tokens = sum(n for _, n in self._counted) - sum(n for _, n in kept)
            self.lose_tokens(tokens, "their rounds gave way to another chain")
        self._counted = kept[-MAX_COUNTED:]
        if report.counted and report.stats:
            self._counted.append((code, report.stats.tokens))

    def _tell_lateness(self, report: RoundReport, round_s: float) -> None:
        if report.counted:
            self.missed = 0
        if report.counted or not report.stats or not report.stats.tokens:
            return  # a peer that catches up applies several rounds but trains for one
        self.missed += 1
        if self.run.round.seconds:
            return  # the steps fit the round, so fewer steps would not help
        phase = self.run.phase_at(report.manifest.tokens)
        words = lateness(
            self.missed,
            report.stats.tokens,
            phase.local_steps * phase.batch_tokens,
            self.tokens_per_s,
            round_s,
            up_mbit=round_log.up_mbit(self.node.lines, self.node.traffic),
        )
        if words:
            logger.warning("%s", words)

    def _routing_words(self, stats: LocalStats | None) -> str:
        if stats is None or stats.routing is None:
            return "max_load=none"
        found = stats.routing
        similarity = "none" if found.similarity is None else f"{found.similarity:.2f}"
        return (
            f"max_load={found.max_load:.2f} idle_experts={found.idle_experts} "
            f"dropped={found.dropped:.3f} similarity={similarity} grad_spikes={self.grad_spikes}"
        )

    def _event(self, kind: str, /, **fields: object) -> None:
        if not self.directory:
            return
        try:
            self.directory.append_event(kind, **fields)
        except OSError as error:  # events inform people; training does not wait for them
            logger.error("event %s was not written: %s", kind, error)

    # ------------------------------------------------ read by others

    def owned_experts(self) -> tuple[int, ...]:
        """Experts that this peer owns by its tip."""
        owners = self.manifest.owners if self.manifest else {}
        return tuple(sorted(e for e, peers in owners.items() if self.node.peer_id in peers))

    def traffic(self) -> round_log.Moved:
        """Bytes that this peer has moved since its start."""
        return round_log.Moved.of(self.node.traffic)

    def record(self) -> records.PeerRecord:
        """Presence, progress and ownership, as published."""
        manifest, traffic = self.manifest, self.traffic()
        return records.PeerRecord(
            peer_id=self.node.peer_id,
            name=self.name,
            addresses=self.node.addresses,
            state=self._state,
            capacity=self.capacity,
            room=self.room_of(),
            generation=manifest.generation if manifest else "0",
            height=manifest.height if manifest else 0,
            round=manifest.round if manifest else 0,
            rounds_total=self.run.run.rounds,
            manifest_digest=manifest.digest if manifest else NO_DIGEST,
            owned_experts=self.owned_experts(),
            step=(manifest.step if manifest else 0) + self._steps_done,
            tokens=self.tokens,
            loss=self._loss,
            val_loss=self.validation.val_loss if self.validation else None,
            tokens_per_s=self.tokens_per_s,
            blob_bytes_sent=traffic.blobs_sent,
            blob_bytes_received=traffic.blobs_received,
            round_blob_bytes_sent=self._round_traffic.blobs_sent,
            round_blob_bytes_received=self._round_traffic.blobs_received,
            control_bytes_sent=traffic.control_sent,
            control_bytes_received=traffic.control_received,
            steps_skipped=self.skipped,
            refused=dict(self.refused_of().most_common(records.MAX_REFUSED)),
            reason=records.shortened(self.reason_of()),
            version=__version__,
            moments_bytes_sent=traffic.moments_sent,
            moments_bytes_received=traffic.moments_received,
            zero_moments=self.zero_moments,
            moments_reason=records.shortened(self.moments_reason),
            routing=self._routing,
            grad_norm=self._median_norm(),
            grad_spikes=self.grad_spikes,
            last_round=self._last_round,
            tokens_lost=self.tokens_lost,
            engine=records.shortened(self.engine_of(), records.MAX_BRIEF),
            trouble=self.account.trouble(),
            link=round_log.link_figures(self.node.lines, self.fetched_of(), self.node.traffic),
            workers=self._workers,
            possession="",
        )

    def _median_norm(self) -> float | None:
        norms = [norm for norm in self._grad_norms if math.isfinite(norm)]
        return statistics.median(norms) if norms else None
