"""A peer without a declared line, so that reducers are assigned as for equal lines.

Policy: balanced uploads.

The reducer of a shared part keeps the remainder of its mean (delta means). Measured lines differ
between starts on this machine, and would assign another reducer and so change bits.
"""

from peers.peer import main
from swarm.peer.start.host import Host


def _not_known(self: Host) -> int:
    return 0


if __name__ == "__main__":
    Host.uplink_mbit = _not_known  # type: ignore[method-assign]
    main()
