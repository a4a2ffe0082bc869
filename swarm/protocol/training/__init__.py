"""The rules of training: the main loop of a peer as coroutines that await effects.

`loop.py` is the loop, to be read from the top; `effects.py` what it has others do, `reading.py`
what is read and for how long, `resuming.py` what a private state is still good for. What becomes of
an expert's progress is decided in `swarm.protocol.adoption`. The same loop runs in a peer
(`swarm/peer/trainer.py`) and in the simulator (`swarm/emulation/simulator/trainer.py`), where
mutants replace methods of `Training`.
"""

from swarm.protocol.training.effects import Applied
from swarm.protocol.training.loop import Training

__all__ = ["Applied", "Training"]
