"""The rules of training: the main loop of a peer, to be read in `loop.py` from the top.

`host.py` is what it has done for it, `reading.py` what is read and for how long, `resuming.py` what
a private state is still good for; what becomes of an expert's progress is decided in
`swarm.protocol.adoption`. The same loop runs in a peer (its host is `swarm/peer/trainer.py`) and in
the simulator (`swarm/emulation/simulator/trainer.py`), where mutants replace methods of `Training`.
"""

from swarm.protocol.training.host import Applied, Host, SavedWork, Steps, Work, at_once
from swarm.protocol.training.loop import Training

__all__ = ["Applied", "Host", "SavedWork", "Steps", "Training", "Work", "at_once"]
