"""A peer's link: its rates are measured, saved, announced, and compared with the run's needs.

Policies: balanced uploads, slow-link exclusion.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from random import sample
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from swarm import durable
from swarm.config import RunConfig
from swarm.errors import LinkTooSlow, NobodyReachable, SwarmError, Unreachable
from swarm.model.cost import cost_of
from swarm.model.link_plan import TRANSFERS_ALONE, needed_mbit, plan_link, setting_of
from swarm.network.node.node import Node
from swarm.network.node.peer_probe import measure_mbit, measure_uplink
from swarm.network.runs.joiner import present_peers
from swarm.network.wire.upload_rate import agreed_mbit
from swarm.peer.machine.forecast import WANTED_UTILISATION
from swarm.peer.start.host import Host
from swarm.peer.status.round_log import up_mbit
from swarm.peer.status.status import PeerStatus
from swarm.protocol.records.records import PeerRecord
from swarm.protocol.timing import fitness
from swarm.protocol.timing.pace import DAY_S
from swarm.protocol.values.manifest import Manifest, PeerId

logger = logging.getLogger(__name__)

ASKED = 2
MEASURED_BYTES = 4 * 2**20
MEASURE_S = 1.5
"""Limit for each peer that is asked."""
UPLINK_S = 2.5
"""Limit for an uplink probe. By then a slow uplink has been full for a second."""
TRIES = 4
RETRY_S = 10.0
"""Pause before a second try, since members in a round have little bandwidth left for probes."""

Rates = tuple[float | None, float | None]
"""Download and upload rate in Mbit/s; None if nobody answered."""


async def measured_rates(
    node: Node, present: Mapping[PeerId, PeerRecord], known: Rates = (None, None)
) -> Rates:
    """The best rates to a few peers that listen, as the rates of this machine's own link.

    Moves up to 4 MiB per peer and direction. Earlier rates count too. The probed peers are drawn at
    random, since otherwise all peers that start a run together would probe the same two.
    """
    listening = _listening(node, present)
    best: dict[bool, float | None] = dict(zip((True, False), known, strict=True))
    for peer in sample(listening, min(ASKED, len(listening))):
        for is_down, before in best.items():
            if rate := await _rate(node, peer, is_down=is_down):
                best[is_down] = max(rate, before or 0.0)
    node.lines.down_mbit = best[True]
    if uplink := best[False]:
        node.lines.tested(uplink)
    return best[True], best[False]


async def measure_full_uplink(node: Node, present: Mapping[PeerId, PeerRecord]) -> None:
    """Measures this machine's uplink to a few peers, or to more until a slow rate is confirmed.

    The best rate counts as one test, even if the measurement is cancelled. The downlink is not
    measured, since that would load the uplinks of these peers, which may be slow. Some peers may be
    busy or not answer in time. If only one peer listens, a second reading from that peer may
    confirm the first.
    """
    listening, lines, rates = _listening(node, present), node.lines, list[float]()
    if len(listening) == 1:
        lines.full_by_one(listening[0])
    try:
        for peer in sample(listening, min(TRIES, len(listening))):
            rate = await _rate(node, peer, is_down=False)
            if rate is None:
                continue
            rates.append(rate)
            is_known = max(rates) > fitness.HOME_MBIT or agreed_mbit(lines.full_mbit) is not None
            if is_known or (len(rates) >= ASKED and not lines.full_mbit):
                return
    finally:
        if rates:
            lines.tested(max(rates))


def _listening(node: Node, present: Mapping[PeerId, PeerRecord]) -> list[PeerId]:
    return [p for p in sorted(present) if present[p].addresses and p != node.peer_id]


async def _rate(node: Node, peer: PeerId, *, is_down: bool) -> float | None:
    try:
        if is_down:
            return await measure_mbit(
                node, peer, is_down=True, limit_s=MEASURE_S, num_bytes=MEASURED_BYTES
            )
        rate, full = await measure_uplink(node, peer, limit_s=UPLINK_S, num_bytes=MEASURED_BYTES)
    except Unreachable as error:
        logger.debug("rate of peer=%s not measured: %s", peer[-6:], error)
        return None
    logger.debug("uplink to peer=%s: %.3g Mbit/s, full at %s", peer[-6:], rate, full)
    if full:
        node.lines.full(peer, full)
    return rate


def verdict_for(
    run: RunConfig, tip: Manifest, present: Mapping[PeerId, PeerRecord], rates: Rates
) -> fitness.LinkVerdict:
    """Judges these rates for a further peer in this run, and adds the share of time computing."""
    phase = run.phase_at(tip.tokens)
    num_bytes = cost_of(run, len(tip.members) + 1).bytes_sent_per_peer_per_round
    round_s = run.round.seconds or fitness.training_s(
        phase.local_steps * phase.batch_tokens,
        [record.tokens_per_s for record in present.values()],
    )
    verdict = fitness.link_verdict(num_bytes, round_s, *rates)
    if round_s is None or verdict.fitness is fitness.Fitness.UNKNOWN:
        return verdict
    return replace(verdict, text=verdict.text + _share_computing(run, tip, round_s, rates))


def _share_computing(run: RunConfig, tip: Manifest, round_s: float, rates: Rates) -> str:
    """Share of time computing, by `swarm-plan --link` for transfers alone; "" if the run fits."""
    down, up = (rate or inf for rate in rates)
    setting, num_peers = setting_of(run), len(tip.members) + 1
    compute_s, wanted = round_s * setting.rounds, WANTED_UTILISATION
    plan = plan_link(
        run, setting, (up, down),
        compute_s=compute_s, num_peers=num_peers, assumed=TRANSFERS_ALONE,
    )  # fmt: skip
    if plan.utilisation >= wanted:
        return ""
    mbit = needed_mbit(run, setting, compute_s=compute_s, num_peers=num_peers, wanted=wanted)
    return (
        f"; so the peer computes {plan.utilisation:.0%} of the time, and {wanted:.0%} needs "
        f"{mbit:.3g} Mbit/s each way, {mbit / min(up, down):.3g} times as much, or other settings "
        "(swarm-plan --link)"
    )


async def measured_verdict(
    node: Node, run: RunConfig, tip: Manifest, present: Mapping[PeerId, PeerRecord]
) -> fitness.LinkVerdict:
    """Judges this machine's link for a run; a link that looks hopeless is measured again.

    The better rate counts.
    """
    best: Rates = (None, None)
    for tries_left in reversed(range(TRIES)):
        best = await measured_rates(node, present, best)
        verdict = verdict_for(run, tip, present, best)
        if verdict.fitness is not fitness.Fitness.HOPELESS or not tries_left:
            break
        logger.info("link=hopeless, measured again in %.0f s: %s", RETRY_S, verdict.text)
        await asyncio.sleep(RETRY_S)
    return verdict


def require_link(verdict: fitness.LinkVerdict) -> None:
    """Logs the verdict, and refuses a link with which the peer would always be late.

    Raises:
        LinkTooSlow: the link is hopeless; the message has the figures.
    """
    if verdict.fitness is fitness.Fitness.HOPELESS:
        raise LinkTooSlow(
            f"this machine's link cannot carry the run: {verdict.text}",
            hint="use another link, or a run with a smaller model or more local steps",
        )
    level = logging.WARNING if verdict.fitness is fitness.Fitness.SLOW else logging.INFO
    logger.log(level, "link=%s %s", verdict.fitness.value, verdict.text)


VALID_S = 3600.0
"""Seconds for which a saved measurement is valid: links change with the hour, and machines move."""


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class SavedLink:
    """A measurement of the link, and its time.

    Attributes:
        up_mbit: measured upload rate.
        cap_mbit: the cap on uploads; None for none.
        at: when the uplink was tested, in seconds since 1970.
    """

    up_mbit: Rate
    cap_mbit: Rate | None
    at: float


_SCHEMA = TypeAdapter(SavedLink)


def read_line(path: Path) -> SavedLink | None:
    """The saved measurement; None if it is missing, damaged or older than `VALID_S`."""
    try:
        line = _SCHEMA.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("%s is ignored, and the link is measured: %s", path, error)
        return None
    return line if 0 <= time.time() - line.at < VALID_S else None


def write_line(path: Path, line: SavedLink) -> None:
    """Saves a measurement. If the disk fails, the next start measures again."""
    try:
        durable.write_file(path, _SCHEMA.dump_json(line))
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)


MEASURED_WITHIN_S = 15.0
"""Limit of one measurement: a silent network must delay neither a start nor publications."""
QUIET_S = 5.0
"""A link is idle, and may be measured, after this long without sending."""
AGAIN_S = VALID_S
"""A known uplink is measured again after this long."""
QUIET_TRIES = 5
"""Measurements at idle moments before the next pause."""
DOUBT = 0.5
"""The link is tested again if peers receive less than this share of the known rate."""
DOUBT_AGAIN_S = 600.0
"""Least time between two tests because of `DOUBT`, since the peers' own links may be slow."""


async def measure_line(host: Host, run_id: str, members: Collection[PeerId] | None = None) -> None:
    """Measures the link with members of a run, or with all peers that gather; caps uploads.

    Takes at most `MEASURED_WITHIN_S` and 16 MiB. Nothing is measured if nobody listens there. The
    same holds if the link is known, by a joiner's measurement or from a recent start.
    """
    node = host.node
    try:
        async with asyncio.timeout(MEASURED_WITHIN_S):
            if not (node.lines.up_mbit or node.traffic.sent.mbit or _recall(host)):
                await _measure_with(node, run_id, members)
    except (SwarmError, TimeoutError) as error:
        logger.info("the link was not measured: %s", str(error) or "no answer in time")
    if node.traffic.up.mbit is None:  # no person has set a cap
        hold_uploads(node)
    await _keep(host)


def _recall(host: Host) -> bool:
    """Restores the link's rate and cap from a recent start; returns whether there was one."""
    line, own_cap = read_line(host.state.line_path), host.config.network.max_upload_mbit
    if line is None or not (line.up_mbit > fitness.HOME_MBIT or line.cap_mbit or own_cap):
        return False
    host.node.lines.recall(line.up_mbit, time.time() - line.at)
    if own_cap is None:
        host.node.traffic.up.hold(line.cap_mbit)
    return True


async def _keep(host: Host) -> None:
    """Saves the measurement for the next start, but no cap that a person has set."""
    own_cap, traffic = host.config.network.max_upload_mbit, host.node.traffic
    cap = traffic.up.mbit if own_cap is None else None
    lines = host.node.lines
    if mbit := lines.up_mbit:
        line = SavedLink(mbit, cap, time.time() - lines.test_age_s)
        await asyncio.to_thread(write_line, host.state.line_path, line)


async def _measure_with(node: Node, run_id: str, members: Collection[PeerId] | None) -> None:
    """Measures with members only, if the run has any, since any key may claim to be in the run."""
    present = await present_peers(node, run_id)
    asked = present if members is None else {p: present[p] for p in present if p in members}
    await measure_full_uplink(node, asked)


def hold_uploads(node: Node) -> bool:
    """Caps uploads below the rate of a slow uplink; returns whether the need is known.

    Nothing changes while no two measurements agree.
    """
    lines, up = node.lines, node.traffic.up
    is_fast = (lines.up_mbit or 0.0) > fitness.HOME_MBIT
    uplink = agreed_mbit(lines.full_mbit)
    if is_fast:
        up.hold(None)
    if is_fast or uplink is None:
        return is_fast
    lines.forget_full()
    up.hold(fitness.cap_for(uplink, node.traffic.sent.mbit_since(lines.settled_s)))
    logger.info(
        "link: %.3g Mbit/s up, uploads are capped at %.3g to keep the router's queue short "
        "(--max-upload sets another cap)",
        uplink,
        up.mbit,
    )
    return True


class LinkMonitor:
    """Measures the link again, at idle moments or when rounds leave this peer out.

    There are three reasons. First, several rounds in a row were decided without this peer. In such
    rounds it sends nothing, and so learns nothing about its link. A rate that was measured too low,
    because of other transfers, would exclude the peer for good. Second, the cap is unknown or old,
    or a person has set the cap and the last test is more than half a day old. Third, others receive
    much less than the measured rate.
    """

    def __init__(
        self,
        host: Host,
        status: PeerStatus,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measures nothing yet.

        Args:
            host: host of this peer. A cap that a person has set is kept.
            status: the status that the peer publishes.
            run_id: id of the run.
            clock: clock in seconds.
        """
        self._host, self._node = host, host.node
        self._status, self._run_id = status, run_id
        self._measured_at = 0
        self._holds, self._clock = host.config.network.max_upload_mbit is None, clock
        is_known = self._node.traffic.up.mbit is not None and not self._node.lines.is_recalled
        self._pause_s = AGAIN_S if self._holds else DAY_S / 2
        self._tries_left, self._next_s = QUIET_TRIES, clock() + (self._pause_s if is_known else 0.0)
        self._sent, self._sent_s = 0, clock()
        self._doubt_s = clock()

    async def measure_again(self) -> None:
        """Measures if there is a new reason; called at each heartbeat."""
        missed, now_s, sent = self._status.missed, self._clock(), self._node.traffic.bytes_sent
        if sent != self._sent:
            self._sent, self._sent_s = sent, now_s
        if is_due_again(missed, self._measured_at):
            self._measured_at = missed
            await self._measure()
        elif now_s >= self._sent_s + QUIET_S and self._is_due(now_s):
            await self._measure()
            self._tries_left -= 1
            is_held = hold_uploads(self._node) if self._holds else True
            if (is_held and self._node.lines.is_agreed) or not self._tries_left:
                self._tries_left, self._next_s = QUIET_TRIES, self._clock() + self._pause_s
            await _keep(self._host)

    def _is_due(self, now_s: float) -> bool:
        """Whether the link, which is idle now, is due for a test."""
        if now_s >= self._next_s:
            return True
        lines, sent = self._node.lines, self._node.traffic.sent
        known, shown = up_mbit(lines, self._node.traffic), sent.shown_since(lines.tested_s)
        if not known or shown is None or shown >= DOUBT * known or now_s < self._doubt_s:
            return False
        logger.info("link: others receive %.3g of %.3g Mbit/s; measuring again", shown, known)
        self._doubt_s, self._next_s = now_s + DOUBT_AGAIN_S, now_s
        return True

    async def _measure(self) -> None:
        """Lifts this peer's own cap while it measures, which takes some seconds."""
        up, tip = self._node.traffic.up, self._status.manifest
        before, members = up.mbit, tip.members if tip else ()
        if self._holds:
            up.hold(None)
        try:
            async with asyncio.timeout(MEASURED_WITHIN_S):
                await _measure_with(self._node, self._run_id, members)
        except (NobodyReachable, TimeoutError):
            logger.debug("the link was not measured in time")
        finally:
            up.hold(before)


def is_due_again(missed: int, measured_at: int) -> bool:
    """Whether to measure the link again, after further rounds that were decided without the peer.

    Args:
        missed: number of rounds in a row without the peer.
        measured_at: `missed` at the last measurement.
    """
    return missed > 0 and missed % fitness.ALWAYS_LATE == 0 and missed != measured_at
