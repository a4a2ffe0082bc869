"""swarm-peer that joins, reports work, and never ends a step."""

import time
from collections.abc import Callable
from typing import Any

import swarm.peer.training.trainer
from peers.peer import main
from swarm.train.engine.local_steps import LocalStats

LOOK_S = 0.2


def idle(*given: Any, stop: Callable[[], bool], **more: Any) -> LocalStats:
    while not stop():
        time.sleep(LOOK_S)
    return work(*given, stop=stop, **more)


if __name__ == "__main__":
    work = swarm.peer.training.trainer.train_local_steps
    swarm.peer.training.trainer.train_local_steps = idle
    main()
