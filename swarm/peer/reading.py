"""What this peer reads in the round under way, and until when."""

from __future__ import annotations

import time

from swarm.config import RunConfig
from swarm.data.loader import Dealt
from swarm.protocol.deadlines import LocalWork, local_work_left
from swarm.protocol.dealing import num_samples
from swarm.protocol.manifest import Manifest, PeerId
from swarm.train.local_steps import Task

ENDLESS = 2**40
"""Samples: more than are read in a round."""


class Reading:
    """The place in the text: agreed for a common one, this peer's own business for its own."""

    def __init__(self, run: RunConfig, me: PeerId) -> None:
        self.run, self.me = run, me
        self.position = 0
        """Where this round begins in a text of one's own."""
        self.began_s = time.monotonic()
        """When this round began, by `time.monotonic`."""

    def next_round(self, began_s: float, offered_tokens: int) -> None:
        """A round began; of a text of one's own, what was offered in the last is not read again."""
        self.began_s = began_s
        self.position = self.position_after(offered_tokens)

    def position_after(self, tokens: int) -> int:
        """The place in a text of one's own once these tokens of this round were trained on."""
        return self.position + tokens // self.run.data.sequence_length

    def task(self, tip: Manifest, done: int) -> Task:
        """What the local steps on a tip read, of which some are done."""
        return Task(self.me, tip.step, self._dealt(tip), self._batch_tokens(tip), done)

    def work_left(self, tip: Manifest, done: int, step_s: float) -> LocalWork:
        """How many local steps there are to be after those done, of this mean duration."""
        samples, seconds = num_samples(self._dealt(tip)), self.run.round.seconds
        steps = samples * self.run.data.sequence_length // self._batch_tokens(tip)
        if seconds is None:
            most = self.run.phase_at(tip.tokens).local_steps
            return local_work_left(min(steps, most), done, step_s)
        passed_s = time.monotonic() - self.began_s
        return local_work_left(steps, done, step_s, seconds - passed_s)

    def _dealt(self, tip: Manifest) -> Dealt:
        if self.run.data.mode == "common":
            return tip.dealt[self.me]
        return ((self.position, self.position + ENDLESS),)

    def _batch_tokens(self, tip: Manifest) -> int:
        return self.run.phase_at(tip.tokens).batch_tokens
