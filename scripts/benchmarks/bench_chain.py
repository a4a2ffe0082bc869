#!/usr/bin/env python
"""The cost of the chain of heads after many rounds: memory, disk, seconds to start, proofs.

Voters are replaced by new voters at a steady rate. A smallest quorum, drawn by lot, signs each
round. The chain and its file grow and are pruned as at a peer.

Real: keys, heads and their digests, the quorums, every growth and pruning, every written line. The
    links in the final file get real signatures, and a peer starts from this file. A newcomer, and
    peers with tips from 1 round to all rounds ago, check each signature of their proofs.

Shortened: signatures of rounds are zeros until the end, because no rule of the chain reads them.
There are no manifests, no messages, and no other branches. A round takes no time, and 1,440 rounds
count as a day. Use a --folder in memory (/dev/shm) if fsync is slow, because a line is synced each
round.

    python scripts/benchmarks/bench_chain.py [--rounds 100000] [--voters 256] [--changes-a-day 10]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.network.rounds.record_file import RecordFile
from swarm.network.wire.identity import KEY_BYTES, Identity, peer_id_of, verify
from swarm.protocol.chain.trust import RECENT, Chain, Foothold, proof_problem
from swarm.protocol.messages import signatures
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.message_bytes import MAX_PROOF_BYTES, Proof, encode_proof
from swarm.protocol.messages.messages import UNSIGNED, Ballot, Certificate, Link, accept_statement
from swarm.protocol.values.manifest import Head, Kind

RUN = "spes-7b-0123456789abcdef"
ROUNDS_A_DAY = 1440
AWAY = (1, 64, 1000, 10_000)
"""Rounds for which the returning peers were away. A further peer was away for all rounds."""


class Run:
    """A run that consists of heads only."""

    def __init__(self, num_voters: int, seed: int = 0) -> None:
        self.random = Random(seed)
        self.identities = dict[str, Identity]()
        self.voters = [self._peer() for _ in range(num_voters)]
        self.founder = self.voters[0]
        self.head = self._head(None)

    def _peer(self) -> str:
        key = Ed25519PrivateKey.from_private_bytes(self.random.randbytes(KEY_BYTES))
        public = key.public_key().public_bytes_raw()
        peer = peer_id_of(public)
        assert peer
        self.identities[peer] = Identity(Path(), peer, public, key)
        return peer

    def _head(self, parent: Head | None) -> Head:
        digits = -(-len(self.voters) // 4)
        return Head(
            run=RUN if parent else "",
            generation="0",
            height=parent.height + 1 if parent else 0,
            kind=Kind.QUORUM if parent else Kind.FOUNDING,
            parent=parent.digest if parent else None,
            lineage=(),
            founder=self.founder,
            voters=tuple(sorted(self.voters)),
            anchors="0" * digits,
            contributed=f"{self.random.getrandbits(len(self.voters)):0{digits}x}",
            seed=None,
            body=f"{self.random.getrandbits(256):064x}",
        )

    def next(self, *, is_change: bool) -> Link:
        """The next link. In a change, its head has one replaced voter."""
        signers = sorted(self.random.sample(self.voters, len(self.voters) // 2 + 1))
        if is_change:
            self.voters[self.random.randrange(len(self.voters))] = self._peer()
        self.head = self._head(self.head)
        return Link(self.head, Certificate(Ballot(0, signers[0]), dict.fromkeys(signers, UNSIGNED)))

    def signed(self, link: Link) -> Link:
        """The link with a real signature of each of its signers."""
        certificate = link.certificate
        if certificate is None:
            return link
        statement = accept_statement(RUN, certificate.ballot, link.head.digest)
        made = {peer: self.identities[peer].sign(statement) for peer in certificate.signatures}
        return replace(link, certificate=replace(certificate, signatures=made))


def record_at(link: Link) -> Record:
    """The part of a record that a chain reads."""
    tip = SimpleNamespace(head=link.head)
    parent = SimpleNamespace(head=link.parent) if link.parent else None
    return cast(Record, SimpleNamespace(tip=tip, parent=parent, certificate=link.certificate))


@dataclass
class Growth:
    """A chain that grows round by round, in memory and on disk.

    Attributes:
        file: file of the chain.
        run: the run of the chain.
        earlier: the chains that the returning peers had when they went away.
        longest_s: the longest growth by one round.
        most_bytes: the largest size of the file.
    """

    file: RecordFile
    run: Run
    earlier: list[Chain] = field(default_factory=list)
    longest_s: float = 0.0
    most_bytes: int = 0

    def grown(self, rounds: int, changes_a_day: float) -> Chain:
        """The chain after a number of rounds."""
        chain, appended = Chain((Link(self.run.head),)), 0
        self.file.chain.append(chain.links)
        for number in range(1, rounds + 1):
            changes = [int(at * changes_a_day / ROUNDS_A_DAY) for at in (number - 1, number)]
            link, before = self.run.next(is_change=changes[0] != changes[1]), chain
            begun_s = time.perf_counter()
            chain = before.grown([link])
            self.longest_s = max(self.longest_s, time.perf_counter() - begun_s)
            self.file.chain.append(chain.beyond(before))
            self.most_bytes = max(self.most_bytes, self.num_bytes)
            appended += 1
            if appended >= max(RECENT, len(chain.links)):
                appended = 0
                self.file.chain.rewrite(partial(tuple, chain.links))
            if number == 1 or rounds - number in AWAY:
                self.earlier.append(chain)
        return chain

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.stat(self.file.chain.path).st_size

    def sign(self) -> None:
        """Gives each link of the file its signatures, including those that are no longer needed."""
        links = [self.run.signed(link) for link in self.file.chain.read()]
        self.file.chain.path.unlink()
        self.file.chain.append(links)


def checked_s(trusting: Chain, path: Sequence[Link], tip: Head) -> float:
    """Seconds to check a proof with all of its signatures, for a peer with its own tip."""
    sound, begun_s = partial(signatures.sound, run=RUN, holds=verify), time.perf_counter()
    proved = Foothold(trusting).proved(path, tip.body, None, sound)
    assert proved
    assert proved[-1].head.digest == tip.digest
    return time.perf_counter() - begun_s


def proofs(chain: Chain, founding: Head, earlier: Sequence[Chain]) -> dict[str, float]:
    """The cost of proofs for a newcomer and for returning peers. Each proof is checked."""
    path = chain.proof(founding.digest)
    assert proof_problem(path, chain.tip, {founding.digest}, is_new=True) is None
    proof_bytes = len(encode_proof(Proof(None, path)))
    assert proof_bytes <= MAX_PROOF_BYTES
    newcomer_s = checked_s(Chain((Link(founding),)), path, chain.tip)
    for each in earlier:
        checked_s(each, chain.proof(each.tip.code), chain.tip)
    return {
        "links_of_a_proof_from_manifest_0": len(path),
        "proof_mb": proof_bytes / 1e6,
        "newcomer_checks_s": newcomer_s,
        "returners_convinced": len(earlier),
    }


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--voters", type=int, default=256)
    parser.add_argument("--changes-a-day", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, help="folder for the file, which is not kept")
    given = parser.parse_args()
    run = Run(given.voters)
    founding = run.head
    with TemporaryDirectory(dir=given.folder) as folder:
        growth = Growth(RecordFile(Path(folder) / "record"), run)
        file, chain = growth.file, growth.grown(given.rounds, given.changes_a_day)
        growth.sign()
        record, num_links, num_bytes = (
            record_at(chain.links[-1]),
            len(chain.links),
            growth.num_bytes,
        )
        del chain
        begun_s = time.perf_counter()
        file.read_chain(record, founding)
        start_s = time.perf_counter() - begun_s
        gc.collect()
        tracemalloc.start()
        again = file.read_chain(record, founding)
        memory_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(again.links) == num_links
    figures = {
        "rounds": given.rounds,
        "voters": given.voters,
        "links": num_links,
        **proofs(again, founding, growth.earlier),
        "memory_mb": memory_bytes / 1e6,
        "disk_mb": num_bytes / 1e6,
        "most_disk_mb": growth.most_bytes / 1e6,
        "start_s": start_s,
        "longest_growth_ms": 1e3 * growth.longest_s,
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
