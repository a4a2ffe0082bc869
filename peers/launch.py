"""The program `swarm-peer`: sets up how OpenMP's threads wait, then becomes the peer."""

from __future__ import annotations

import os

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads without work sleep. By default those of GNU's OpenMP, which torch brings, spin some
milliseconds first, on cores that other peers of the machine could use."""


def main() -> None:
    """Runs swarm-peer; what the person has set about OpenMP stays."""
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)
    from peers.peer import main as peer  # OpenMP reads its environment when torch is imported

    peer()


if __name__ == "__main__":
    main()
