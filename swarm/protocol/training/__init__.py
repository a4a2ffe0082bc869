"""The rules of training: the main loop of a peer, to be read in `loop.py` from the top.

`shell.py` is what it has done for it, `reading.py` what is read and for how long, `ahead.py` what
was offered and is not counted while rounds overlap, `resuming.py` what a private state is still
good for; what becomes of an expert's progress is decided in `swarm.protocol.adoption`. The same
loop runs in a peer (with the shell `swarm/peer/trainer.py`) and in the simulator (with
`swarm/emulation/simulator/trainer.py`), where mutants replace its methods.
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
