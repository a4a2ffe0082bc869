"""A run of many peers as a monitor sees it round by round, with the same figures every time."""

import random

from swarm.monitor.snapshot import Sighting, Snapshot
from swarm.protocol.records.records import (
    TOO_LATE,
    LinkFigures,
    MergeRecord,
    PeerRecord,
    PeerState,
    RoundFigures,
    RoutingFigures,
    Score,
    ScoreRecord,
    ValidationRecord,
    WorkersFigures,
)
from swarm.protocol.values.manifest import Entry, Founding, Kind, Manifest, Member, Text
from tests.monitor.small_swarm import project, remembered
from tests.peer_records import DIGEST, peer_record

BEGAN_S = 1_790_000_000.0
WHY = "worker 2 computes 3.1 s a step, others 2.2: stage 3 of 4"
WORKERS = WorkersFigures(4, 3.9, {"numbers": 0.01, "sums": 0.06}, 0.21, 0.16, (3,), 2, WHY)
ROUND_S = 20.0
STRANGER = "12D3KooW" + "1" * 44
TEXT = Text("wikipedia-en", "byte-0", DIGEST, 500, 64_000_000, 60_000)
HOSTS = ("atlas", "borealis", "cirrus", "dune", "ember", "fjord", "granite", "harbour")


def peer_id(number: int) -> str:
    letters = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    rng = random.Random(number)
    return "12D3KooW" + "".join(rng.choice(letters) for _ in range(44))


def crowd(peers: int, experts: int, rounds: int, *, seen_rounds: int = 4) -> Snapshot:
    """The view of a monitor that has seen the last decisions."""
    looks = range(max(rounds - seen_rounds, 0) + 1, rounds + 1)
    return remembered(*(project(sighting(peers, experts, round_)) for round_ in looks))


def sighting(peers: int, experts: int, round_: int) -> Sighting:
    """One look, right after a round was decided. Now and then a peer is late or has left."""
    rng = random.Random(round_)
    ids = sorted(peer_id(k) for k in range(peers))
    out = ids[round_ % peers] if round_ % 3 == 0 and peers > 2 else None
    gone = ids[-1] if round_ % 7 > 4 and peers > 3 else None
    tip = manifest(ids, experts, round_, [peer for peer in ids if peer != out])
    records = {
        peer: record(peer, k, experts, tip, out, rng) for k, peer in enumerate(ids) if peer != gone
    }
    now = BEGAN_S + ROUND_S * round_
    recent = tuple((r, loss(r)) for r in range(max(1, round_ - 99), round_))
    merges = {
        peer: MergeRecord("0", round_, round_ // 4, 50 * round_, 0.05, donors(tip, peer, experts))
        for peer in ids
        if round_ // 4
    }
    return Sighting(
        run=tip.run,
        name="moe-7b",
        peers=records,
        merges=merges,
        validations={
            tip.order[0]: ValidationRecord(round_, tip.digest, loss(round_), 4096, 4096, recent)
        },
        tip=tip,
        scores={
            peer: ScoreRecord((Score(tip.digest, round_, "arc_easy", "acc", 0.25 + k / 99, 2376),))
            for k, peer in enumerate((ids[0], STRANGER))
        },
        published={peer: now - 7 * rng.random() for peer in records},
        at=now,
    )


def loss(round_: int) -> float:
    return 2.1 + 3.4 * 0.93**round_ + 0.01 * (round_ % 3)


def donors(tip: Manifest, peer: str, experts: int) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Donors of the peer's experts, for 16 layers."""
    return {
        expert: tuple(
            tuple((expert + d + layer // 9) % experts for d in (3, 1, 7)) for layer in range(16)
        )
        for expert, owners in tip.owners.items()
        if peer in owners
    }


def manifest(ids: list[str], experts: int, round_: int, contributors: list[str]) -> Manifest:
    count = len(ids)
    told = f"expert 1: {ids[1]} took it over from {ids[-1]}, which was silent for 3 rounds"
    return Manifest(
        run="moe-7b-0123456789abcdef",
        generation="0",
        height=round_,
        round=round_,
        kind=Kind.QUORUM,
        parent=DIGEST,
        founding=Founding(ids[0], "nonce", DIGEST, 10, DIGEST, 10, TEXT),
        step=50 * round_,
        tokens=16_000 * count * round_,
        merged=round_ // 4,
        members={
            peer: Member(0, 1.0, votes=k % 9 != 8, vouched=k % 9 != 8, counted=4)
            for k, peer in enumerate(ids)
        },
        contributors=tuple(contributors),
        sources={},
        owners={
            e: tuple(sorted({ids[e * count // experts % count], ids[e * 7 % count]}))
            for e in range(experts)
        },
        entries={
            f"expert.{e}": Entry(DIGEST, 10, max(round_ - age(e), 0), ids[0], "bf16")
            for e in range(experts)
        },
        cursor=900 * round_,
        dealt={ids[0]: ((900 * round_ - 600, 900 * round_),)},
        holes=((3, 40),),
        reasons=(told,) if round_ % 4 == 2 else (),
    )


def age(expert: int) -> int:
    return (expert % 5 == 4) * (expert % 4) * 2 + (expert % 3 == 2)


def record(
    peer: str, k: int, experts: int, tip: Manifest, out: str | None, rng: random.Random
) -> PeerRecord:
    late = int(peer == out)
    training_s = 11.0 + 3.0 * rng.random() + 4.0 * late
    why_not = f"{TOO_LATE}: still training" if late else ""
    phases = {
        "training": training_s,
        "offering": 0.8 + rng.random(),
        "averaging": max(18.0 - training_s, 0.4),
        "adopting": 0.5,
    }
    return peer_record(
        peer,
        name=f"{HOSTS[k % len(HOSTS)]}-{k:02}",
        addresses=() if k % 5 == 3 else (f"/ip4/198.51.100.{k % 250}/tcp/4001/p2p/{peer}",),
        state=PeerState.TRAINING if k % 6 else PeerState.AVERAGING,
        height=tip.height - late,
        round=tip.round - late,
        rounds_total=400,
        manifest_digest=DIGEST if late else tip.digest,
        owned_experts=tuple(e for e, owners in tip.owners.items() if peer in owners),
        step=tip.step + rng.randrange(50),
        tokens=16_000 * tip.round,
        loss=loss(tip.round) - 0.2 + 0.3 * rng.random(),
        val_loss=loss(tip.round),
        tokens_per_s=1200.0 + 400 * rng.random(),
        refused={"size": 2} if k % 11 == 5 else {},
        reason=f"round {tip.round} decided by {len(tip.contributors)} of {len(tip.members)}",
        routing=RoutingFigures(1.8, 1, 0.0, 0.31, shares(experts, rng), ((0, 1, 310),)),
        grad_norm=0.8,
        last_round=RoundFigures(
            tip.round - late, not late, 20.0, phases, 2_200_000, 2_300_000, why_not
        ),
        tokens_lost=700 * late,
        link=LinkFigures(20.0 + k, 90.0, None, {}),
        workers=None if k else WORKERS,
    )


def shares(experts: int, rng: random.Random) -> tuple[int, ...]:
    """Shares with one hot expert and one dead expert."""
    weights = [rng.gammavariate(6.0, 1.0) for _ in range(experts)]
    weights[experts // 3] *= 3.2
    weights[experts * 2 // 3] = 0.0
    return tuple(round(1000 * weight / sum(weights)) for weight in weights)
