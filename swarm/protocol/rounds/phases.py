"""What a machine is doing, for people: read off its records, one function for each question."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from swarm.protocol.manifest import PeerId
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.reduction import Job
from swarm.protocol.rounds.standing import Standing
from swarm.protocol.rounds.state import Life, Work
from swarm.protocol.rounds.succession import Succession


class Phase(Enum):
    """What a machine is doing, for people."""

    LISTENING = "listening"  # just started: hears what the others have before it says anything
    TRAINING = "training"  # a member without an offer yet
    OFFERED = "offered"  # waits for the roster
    REDUCING = "reducing"  # averages units for the others
    MERGING = "merging"  # a merge is due or being agreed on
    ACCEPTING = "accepting"  # fetches a proposal, or has accepted it
    CATCHING_UP = "catching_up"  # fetches a decided manifest
    JOINING = "joining"  # has the tip and asks to become a member
    LEAVING = "leaving"  # asked to be left out
    LEFT = "left"  # no longer a member, and done


@dataclass(frozen=True)
class CampaignInfo:
    """Who convenes this height, for people."""

    convener: PeerId
    attempt: int
    stage: str
    """Of this peer's own campaign; empty when another convenes."""
    age_s: float


def phase_of(life: Life, standing: Standing, blobs: Blobs, work: Work, job: Job | None) -> Phase:
    """The most important of what goes on at the same time."""
    if life.has_left:
        return Phase.LEFT
    if life.is_listening:
        return Phase.LISTENING
    if blobs.catch_up:
        return Phase.CATCHING_UP
    if life.is_leaving:
        return Phase.LEAVING
    if not standing.is_member:
        return Phase.JOINING
    if standing.is_due(standing.tip):
        return Phase.MERGING
    if blobs.proposal or standing.record.accepted:
        return Phase.ACCEPTING
    if job and not job.is_done:
        return Phase.REDUCING
    return Phase.OFFERED if work.offer else Phase.TRAINING


def campaign_info(succession: Succession) -> CampaignInfo:
    """Who convenes this height as far as this peer knows."""
    own, top = succession.campaign, succession.highest
    return CampaignInfo(
        convener=top.convener,
        attempt=top.attempt,
        stage=own.stage.value if own else "",
        age_s=succession.now - (own.started_at if own else succession.top_since),
    )
