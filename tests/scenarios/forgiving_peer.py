"""swarm-peer that counts a peer again right after a round without sound values of it.

Policy: withholding exclusion.
"""

from peers.peer import main
from swarm.protocol.rounds import withholding

if __name__ == "__main__":
    withholding.LEFT_OUT_ROUNDS = 0
    main()
