"""The check that a decided manifest is not fetched a second time [X1]."""

from __future__ import annotations

from typing import Literal

import pytest

from swarm.emulation.simulator.peers.bulk_transfers import CatchUp

Step = Literal["next", "end"] | tuple[Literal["a", "b"], bool]

A, AGAIN = ("a", True), ("a", False)
STORIES: dict[str, tuple[Step, ...]] = {
    "a duplicate restarts it": (A, "next", AGAIN),
    "it continues after another event and is restarted": (A, "next", "next", AGAIN),
    "one event gives it up and begins it": (A, "next", "end", AGAIN),
    "it is begun after it was given up": (A, "next", "end", "next", A),
    "giving it up twice is giving it up": (A, "next", "end", "next", "end", A),
    "another manifest": (A, "next", ("b", True), "next", A),
    # A reform: the first Fetch was for the old tip's manifest, but now the machine wants another.
    "two within one event": ("next", A, "end", A),
    "two within one event, then a duplicate": ("next", A, "end", A, "next", AGAIN),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_manifest_is_begun_anew_only_after_an_earlier_event_gave_it_up(
    story: tuple[Step, ...],
) -> None:
    catch_up = CatchUp()
    for step in story:
        if step == "next":
            catch_up.event += 1
        elif step == "end":
            catch_up.end()
        else:
            digest, may = step
            assert catch_up.may_begin(digest) is may
            catch_up.begin(digest)
