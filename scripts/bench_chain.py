#!/usr/bin/env python
"""What the chain of heads takes after so many rounds: memory, disk, seconds to start, proofs.

Each round is signed by a smallest quorum by lot; signatures are random bytes of the right size.
Voters leave and others come at a steady rate, one for one. The chain grows as a peer's does, and
its file is appended to and replaced as a peer does it.

    python scripts/bench_chain.py [--rounds 100000] [--voters 256] [--changes-a-day 10]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import tracemalloc
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

from swarm.network.record_file import RecordFile
from swarm.protocol.events import Record
from swarm.protocol.manifest import Head, Kind
from swarm.protocol.messages import Ballot, Certificate, Link
from swarm.protocol.proofs import Proof, encode_proof
from swarm.protocol.trust import RECENT, Chain, proof_problem

ROUNDS_A_DAY = 1440
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class Run:
    """A run of which only heads are made."""

    def __init__(self, num_voters: int, seed: int = 0) -> None:
        self.random = Random(seed)
        self.voters = [self._peer() for _ in range(num_voters)]
        self.head = self._head(None)

    def _peer(self) -> str:
        return "12D3KooW" + "".join(self.random.choices(ALPHABET, k=44))

    def _digest(self) -> str:
        return f"{self.random.getrandbits(256):064x}"

    def _head(self, parent: Head | None) -> Head:
        digits = -(-len(self.voters) // 4)
        return Head(
            run="spes-7b-0123456789abcdef" if parent else "",
            generation="0",
            height=parent.height + 1 if parent else 0,
            kind=Kind.QUORUM if parent else Kind.FOUNDING,
            parent=parent.digest if parent else None,
            lineage=(),
            founder="12D3KooW" + "z" * 44,
            voters=tuple(sorted(self.voters)),
            anchors="0" * digits,
            contributed=f"{self.random.getrandbits(len(self.voters)):0{digits}x}",
            seed=None,
            body=self._digest(),
        )

    def next(self, *, is_change: bool) -> Link:
        """The next link; one voter has been replaced in its head if there is a change."""
        signers = sorted(self.random.sample(self.voters, len(self.voters) // 2 + 1))
        if is_change:
            self.voters[self.random.randrange(len(self.voters))] = self._peer()
        signatures = {peer: self.random.randbytes(64) for peer in signers}
        self.head = self._head(self.head)
        return Link(self.head, Certificate(Ballot(0, signers[0]), signatures))


def record_at(link: Link) -> Record:
    """As much of a record as a chain looks at."""
    tip = SimpleNamespace(head=link.head)
    parent = SimpleNamespace(head=link.parent) if link.parent else None
    return cast(Record, SimpleNamespace(tip=tip, parent=parent, certificate=link.certificate))


def grown(run: Run, rounds: int, changes_a_day: float, file: RecordFile) -> tuple[Chain, float]:
    """The chain after so many rounds, on the disk as well; and the longest round's share, in s."""
    chain, appended, longest_s = Chain((Link(run.head),)), 0, 0.0
    file.chain.append(chain.links)
    for number in range(1, rounds + 1):
        changes = [int(at * changes_a_day / ROUNDS_A_DAY) for at in (number - 1, number)]
        link, before = run.next(is_change=changes[0] != changes[1]), chain
        begun_s = time.perf_counter()
        chain = before.grown([link])
        longest_s = max(longest_s, time.perf_counter() - begun_s)
        file.chain.append(chain.beyond(before))
        appended += 1
        if appended >= max(RECENT, len(chain.links)):
            appended = 0
            file.chain.rewrite(partial(tuple, chain.links))
    return chain, longest_s


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--voters", type=int, default=256)
    parser.add_argument("--changes-a-day", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, help="where the file is written; not kept")
    given = parser.parse_args()
    run = Run(given.voters)
    founding = run.head
    with TemporaryDirectory(dir=given.folder) as folder:
        file = RecordFile(Path(folder) / "record")
        chain, longest_s = grown(run, given.rounds, given.changes_a_day, file)
        tip, num_links = chain.links[-1], len(chain.links)
        path = chain.proof(founding.digest)
        assert proof_problem(path, tip.head, {founding.digest}) is None
        record, num_bytes = record_at(tip), os.stat(file.chain.path).st_size
        proof_bytes = len(encode_proof(Proof(None, path)))
        del chain, path
        begun_s = time.perf_counter()
        file.read_chain(record, founding)
        start_s = time.perf_counter() - begun_s
        gc.collect()
        tracemalloc.start()
        again = file.read_chain(record, founding)
        assert again.proof(founding.digest)
        memory_bytes, _ = tracemalloc.get_traced_memory()
    figures = {
        "rounds": given.rounds,
        "voters": given.voters,
        "links": num_links,
        "links_of_a_proof_from_manifest_0": len(again.proof(founding.digest)),
        "proof_mb": proof_bytes / 1e6,
        "memory_mb": memory_bytes / 1e6,
        "disk_mb": num_bytes / 1e6,
        "start_s": start_s,
        "longest_growth_ms": 1e3 * longest_s,
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
