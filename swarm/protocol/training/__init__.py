"""The rules of training: the main loop of a peer, to be read in `loop.py` from the top.

`shell.py` lists what the loop asks of its shell. `local_progress.py` decides which samples a peer
reads and for how long, which early offers are in flight while rounds overlap, and which parts of a
private state are still valid. `adoption.py` decides what becomes of local progress. The same loop
runs in a peer (with the shell `swarm/peer/training/trainer.py`) and in the simulator (with
`swarm/emulation/simulator/peers/symbol_trainer.py`), where mutants replace its methods.
"""

from swarm.protocol.training.loop import Training
from swarm.protocol.training.shell import (
    Applied,
    Assignment,
    SavedWork,
    TrainingShell,
    WhyPaused,
    Work,
    at_once,
)

__all__ = [
    "Applied",
    "Assignment",
    "SavedWork",
    "Training",
    "TrainingShell",
    "WhyPaused",
    "Work",
    "at_once",
]
