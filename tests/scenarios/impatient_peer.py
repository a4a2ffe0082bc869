"""swarm-peer that waits 10 s instead of 30 for missing moments and for takers of its own."""

from peers.peer import main
from swarm.protocol.exchange import handover

PATIENCE_S = 10.0

if __name__ == "__main__":
    handover.PATIENCE_S = PATIENCE_S
    main()
