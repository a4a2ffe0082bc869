"""What a peer reads in the round under way, and until when."""

from __future__ import annotations

from swarm.protocol.deadlines import LocalWork, local_work_left
from swarm.protocol.dealing import Stretches, num_samples, split
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.rounds.deals import most_samples
from swarm.protocol.rounds.rules import Rules


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

    def dealt(self, tip: Manifest, read_tokens: int) -> Stretches:
        """The samples that local steps on a tip read, in this order, after those read already."""
        samples = read_tokens // self.rules.sequence_length
        if self.rules.is_dealt:
            return split(tip.dealt[self.me], samples)[1]
        most = most_samples(self.me, tip, self.rules)
        return ((self.position + samples, self.position + most),) if samples < most else ()

    def goes_on(self, before: Manifest, after: Manifest, tokens: int) -> bool:
        """Whether what was read beyond one tip is the first of this peer's deal at another [T5].

        It is if that follows. On another line it may have been dealt to others, who count it there,
        although no value moved from the one to the other.
        """
        if after.parent == before.digest or not self.rules.is_dealt:
            return True
        samples = tokens // self.rules.sequence_length
        first, there = (split(tip.dealt.get(self.me, ()), samples)[0] for tip in (before, after))
        return first == there

    def work_left(
        self, tip: Manifest, uncounted: int, done: int, step_s: float, passed_s: float
    ) -> LocalWork:
        """How many local steps there are to be after those done [T3].

        Where rounds overlap, the time counts that the steps themselves take.

        Args:
            tip: what they start from.
            uncounted: tokens that were offered, and are not in the tip [V6].
            done: steps since the last offer.
            step_s: mean seconds of one of these; 0 before the first.
            passed_s: since the round began.
        """
        rules = self.rules
        samples = num_samples(self.dealt(tip, uncounted))
        passed_s = done * step_s if rules.overlaps else passed_s
        steps = samples * rules.sequence_length // rules.batch_tokens_at(tip.tokens)
        if rules.round_seconds is None:
            return local_work_left(min(steps, rules.local_steps_at(tip.tokens)), done, step_s)
        return local_work_left(steps, done, step_s, rules.round_seconds - passed_s)
