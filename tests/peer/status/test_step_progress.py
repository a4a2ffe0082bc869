"""Progress reports of local steps, from the first one on."""

import pytest

from swarm.peer.status.status import StepProgress
from swarm.train.engine.engine import StepStats
from tests.fake_time import Time


def step(cross_entropy: float, *, skipped: bool = False) -> StepStats:
    return StepStats(
        loss=cross_entropy, cross_entropy=cross_entropy, balance=0.0, router_z=0.0, output_z=0.0,
        grad_norm=1.0, tokens=512, expert_tokens=((1,),), skipped=skipped,
    )  # fmt: skip


def test_a_line_has_the_step_of_the_round_the_loss_the_pace_and_what_is_left() -> None:
    clock, said = Time(), list[str]()
    progress = StepProgress(said.append, clock)
    progress.begin(3, 8)
    for done in range(50):
        progress.planned(done, 50 - done)
        clock.now_s += 0.5
        progress.stepped(step(3.0 if done % 2 else 2.0))
    assert said == [
        "round 3/8: step 30 of 50, loss 2.5000, 1,024 tokens/s, 10 s left",
    ]
    assert progress.tokens_per_s == pytest.approx(1024.0)


def test_steps_that_were_done_before_an_interruption_are_counted_and_not_timed() -> None:
    clock, said = Time(), list[str]()
    progress = StepProgress(said.append, clock)
    progress.begin(1, 2)
    progress.planned(40, 10)
    clock.now_s += 20.0
    progress.stepped(step(2.0))
    assert said == ["round 1/2: step 41 of 50, loss 2.0000, 26 tokens/s, 3 min left"]


def test_a_step_without_a_finite_loss_does_not_spoil_the_mean() -> None:
    progress = StepProgress(lambda _: None, Time())
    progress.begin(1, 2)
    progress.planned(0, 2)
    progress.stepped(step(float("nan"), skipped=True))
    assert progress.loss is None
    progress.stepped(step(2.0))
    assert progress.loss == 2.0
