"""A peer that says nothing of its line, so that averaging is dealt as among equal lines [D3].

Who averages a part of the shared tensors keeps what is left over of its mean [W5]. By measured
lines, which on this machine differ from start to start, another peer would, and bits with it.
"""

from peers.peer import main
from swarm.peer.start.host import Host


def _not_known(self: Host) -> int:
    return 0


if __name__ == "__main__":
    Host.uplink_mbit = _not_known  # type: ignore[method-assign]
    main()
