"""swarm-peer that waits 10 s, not 30, for moments that do not come and for who takes its own."""

from peers.peer import main
from swarm.protocol.exchange import handover

PATIENCE_S = 10.0

if __name__ == "__main__":
    handover.PATIENCE_S = PATIENCE_S
    main()
