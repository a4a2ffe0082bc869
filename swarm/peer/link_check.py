"""Tells a joiner whether its link can carry the run, before it downloads anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from random import sample

from swarm.config import RunConfig
from swarm.errors import LinkTooSlow, Unreachable
from swarm.model.cost import cost_of
from swarm.model.link_plan import TRANSFERS_ALONE, needed_mbit, plan_link, setting_of
from swarm.network.full_line import agreed_mbit
from swarm.network.node import Node
from swarm.network.probing import measure_mbit, measure_uplink
from swarm.peer.forecast import WANTED_UTILISATION
from swarm.protocol.fitness import HOME_MBIT, Fitness, LinkVerdict, link_verdict, training_s
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.records import PeerRecord

logger = logging.getLogger(__name__)

ASKED = 2
MEASURED_BYTES = 4 * 2**20
MEASURE_S = 1.5
"""For each asked peer, at most."""
UPLINK_S = 2.5
"""For an uplink, whose cap follows from it: a thin one is full for a second by then."""
TRIES = 4
RETRY_S = 10.0
"""Members that are in the middle of a round leave little of their links to others."""

Rates = tuple[float | None, float | None]
"""Down and up, in Mbit/s; None where nobody answered."""


async def measured_rates(
    node: Node, present: Mapping[PeerId, PeerRecord], known: Rates = (None, None)
) -> Rates:
    """The best rates to a few peers that listen: what this machine's own link allows.

    Moves up to 4 MiB each way and peer. Rates known from before count too. Each asks others, or
    all that start a run together would measure each other at the same two.
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
    """Measures this machine's uplink to a few peers; goes on while it is thin, but not agreed.

    The best rate is one test of it, also if it is broken off. The other direction would take the
    uplinks of these, whose own may be thin. Some may not answer in time, or be busy. One alone may
    agree with itself: nobody else takes anything.
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
            is_known = max(rates) > HOME_MBIT or agreed_mbit(lines.full_mbit) is not None
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
) -> LinkVerdict:
    """What these rates mean for one peer more in this run, and how much of the time it computes."""
    phase = run.phase_at(tip.tokens)
    num_bytes = cost_of(run, len(tip.members) + 1).bytes_sent_per_peer_per_round
    round_s = run.round.seconds or training_s(
        phase.local_steps * phase.batch_tokens,
        [record.tokens_per_s for record in present.values()],
    )
    verdict = link_verdict(num_bytes, round_s, *rates)
    if round_s is None or verdict.fitness is Fitness.UNKNOWN:
        return verdict
    return replace(verdict, text=verdict.text + _share_computing(run, tip, round_s, rates))


def _share_computing(run: RunConfig, tip: Manifest, round_s: float, rates: Rates) -> str:
    """By the formulas of `swarm-plan --link`, of transfers alone; "" where the run fits."""
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
        f"; so {plan.utilisation:.0%} of the time is computed, and {wanted:.0%} takes "
        f"{mbit:.3g} Mbit/s each way, {mbit / min(up, down):.3g} times as much, or other settings "
        "(swarm-plan --link)"
    )


async def measured_verdict(
    node: Node, run: RunConfig, tip: Manifest, present: Mapping[PeerId, PeerRecord]
) -> LinkVerdict:
    """What this machine's link means in a run; what looks hopeless is measured again, and again.

    The best rate that was seen counts.
    """
    best: Rates = (None, None)
    for tries_left in reversed(range(TRIES)):
        best = await measured_rates(node, present, best)
        verdict = verdict_for(run, tip, present, best)
        if verdict.fitness is not Fitness.HOPELESS or not tries_left:
            break
        logger.info("link=hopeless, measured again in %.0f s: %s", RETRY_S, verdict.text)
        await asyncio.sleep(RETRY_S)
    return verdict


def require_link(verdict: LinkVerdict) -> None:
    """Says what was found, and refuses a link with which the peer would always be late.

    Raises:
        LinkTooSlow: names the numbers.
    """
    if verdict.fitness is Fitness.HOPELESS:
        raise LinkTooSlow(
            f"this machine's link cannot carry the run: {verdict.text}",
            hint="use another link, or a run with a smaller model or more local steps",
        )
    level = logging.WARNING if verdict.fitness is Fitness.SLOW else logging.INFO
    logger.log(level, "link=%s %s", verdict.fitness.value, verdict.text)
