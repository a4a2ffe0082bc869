"""Looks at a run, joins it, and leaves after two rounds that counted this peer's work.

    .venv/bin/python scripts/examples/join_run.py ADDRESS out/joiner

ADDRESS is from the line that every peer prints: /ip4/.../tcp/.../p2p/...
"""

import sys

import swarm

ROUNDS = 2


class Rounds(swarm.PeerObserver):
    """Counts rounds, and stops the peer after some."""

    def __init__(self) -> None:
        self.counted = 0
        self.peer: swarm.Peer | None = None

    def on_round(self, report: swarm.RoundReport) -> None:
        manifest = report.manifest
        self.counted += report.counted
        print(f"round {manifest.round}: {len(manifest.members)} members, counted {report.counted}")
        if self.counted == ROUNDS and self.peer:
            self.peer.stop()


def main(address: str, folder: str, *settings: str) -> None:
    seen = swarm.look([address])
    print(f"{seen.name} is in round {seen.round} of {seen.rounds_total}, peers: {len(seen.peers)}")
    rounds = Rounds()
    machine = swarm.load_peer(overrides=settings)
    with swarm.Peer.join([address], folder, config=machine, observer=rounds) as peer:
        rounds.peer = peer
        peer.train()
        print(f"left {peer.run_id} after {rounds.counted} rounds")


if __name__ == "__main__":
    main(*sys.argv[1:])
