"""What a peer reads in the round under way, and until when."""

from __future__ import annotations

from swarm.protocol.deadlines import LocalWork, local_work_left
from swarm.protocol.dealing import Stretches, num_samples
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.rounds.rules import Rules

ENDLESS = 2**40
"""Samples: more than are read in a round."""


class Reading:
    """The place in the text: agreed for a common one, this peer's own business for its own."""

    def __init__(self, rules: Rules, me: PeerId) -> None:
        self.rules, self.me = rules, me
        self.position = 0
        """Where this round begins in a text of one's own."""
        self.began_s = 0.0
        """When this round began, by the shell's clock."""

    def next_round(self, began_s: float, offered_tokens: int) -> None:
        """A round began; of a text of one's own, what was offered in the last is not read again."""
        self.began_s = began_s
        self.position = self.position_after(offered_tokens)

    def position_after(self, tokens: int) -> int:
        """The place in a text of one's own once these tokens of this round were trained on."""
        return self.position + tokens // self.rules.sequence_length

    def dealt(self, tip: Manifest) -> Stretches:
        """The samples that local steps on a tip read, in this order."""
        if self.rules.is_dealt:
            return tip.dealt[self.me]
        return ((self.position, self.position + ENDLESS),)

    def work_left(self, tip: Manifest, done: int, step_s: float, passed_s: float) -> LocalWork:
        """How many local steps there are to be after those done [T3].

        Args:
            tip: what they start from.
            done: steps on it so far.
            step_s: mean seconds of one of these; 0 before the first.
            passed_s: since the round began.
        """
        rules = self.rules
        samples = num_samples(self.dealt(tip))
        steps = samples * rules.sequence_length // rules.batch_tokens_at(tip.tokens)
        if rules.round_seconds is None:
            return local_work_left(min(steps, rules.local_steps_at(tip.tokens)), done, step_s)
        return local_work_left(steps, done, step_s, rules.round_seconds - passed_s)
