"""Many lost peers, partitions, and one slow peer: the rest continues, and all meet again.

Rounds take about 2 s: compute is a timed wait, so that twelve peers fit a small machine.
"""

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from swarm.emulation.fault_plan import At, FaultPlan, Slow
from swarm.emulation.fault_runner import FaultRunner
from swarm.emulation.fault_verdict import rounds_of
from swarm.emulation.links import LINKS
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, applied, digests_by_height, tokens_lost
from swarm.emulation.networks import NamespaceLinks, why_not_here
from swarm.experts import expert_unit
from swarm.protocol.values.manifest import is_ancestor
from tests.scenarios.swarms import contributes, has_rounds, read_record, rounds, write_run

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

STEP_S = 0.3
LONG_STEP_S, LONG_REFORM_S = 1.5, 45.0
"""Length of rounds of about 10 s: peers look for lost ones every 30 s, and wait 6 s for late
ones."""
START_S = 120.0
"""Limit for twelve processes that import torch on two cores."""
NEXT_ROUND_S = 60.0
"""A few time-outs of the protocol (6 to 14 s each)."""
REFORM_S = 20.0
BACK_S = 120.0
HEALED_ROUNDS = 3
ROUND_TOKENS = 6 * 128
"""Seconds of one peer's local steps in a round."""
ROOT_ONLY = pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))


@contextmanager
def running(
    folder: Path,
    num_peers: int,
    *,
    reform_after_s: float = 600.0,
    step_s: float = STEP_S,
    links: NamespaceLinks | None = None,
    settings: Sequence[str] = (),
    num_rounds: int = 3,
) -> Iterator[tuple[LocalSwarm, FaultRunner]]:
    """A swarm after some rounds, and the controls of its peers."""
    common = [f"round.reform_after_s={reform_after_s}", "run.rounds=1000000"]
    common += ["model.num_experts=12", "round.local_steps=6"]
    run_file = write_run(folder, [*common, *settings])
    swarm = LocalSwarm(folder / "swarm", run_file, num_peers, links=links)
    runner = FaultRunner(swarm, FaultPlan(step_s=step_s))
    runner.prepare()
    try:
        swarm.start()
        swarm.wait_until(has_rounds(num_rounds), what="first rounds", timeout_s=START_S)
        yield swarm, runner
    finally:
        swarm.kill()
        if links:
            links.close()


def one_chain(swarm: LocalSwarm) -> bool:
    """Whether all peers applied one manifest recently. Two chains have none in common."""
    newest = [{event["digest"] for event in applied(peer.events())[-4:]} for peer in swarm.peers]
    return bool(set.intersection(*newest))


def kill_at_once(peers: Sequence[LocalPeer]) -> float:
    """Kills peers. Returns the seconds between the first and the last kill."""
    began_s = time.monotonic()
    for peer in peers:
        peer.send(signal.SIGKILL)
    took_s = time.monotonic() - began_s
    for peer in peers:
        peer.kill()
    return took_s


def went_on(peers: Sequence[LocalPeer], after: int) -> Callable[[LocalSwarm], bool]:
    """Whether each has a training round later than one."""
    return lambda _: all(rounds(peer)[-1]["round"] > after for peer in peers)


def newest_round(swarm: LocalSwarm) -> int:
    return max(int(rounds(peer)[-1]["round"]) for peer in swarm.peers)


def test_four_of_twelve_killed_in_one_second_roll_nothing_back(tmp_path: Path) -> None:
    with running(tmp_path, 12) as (swarm, _):
        dead, survivors = swarm.peers[2:10:2], [*swarm.peers[:2], *swarm.peers[3::2]]
        before = newest_round(swarm)
        assert kill_at_once(dead) < 1.0
        # The present round may already be decided. The next one certainly excludes the dead.
        swarm.wait_until(
            went_on(survivors, before + 1), what="the next round", timeout_s=NEXT_ROUND_S
        )
        by_height = digests_by_height([peer.events() for peer in swarm.peers])
        assert {len(digests) for digests in by_height.values()} == {1}
        assert {rounds(peer)[-1]["generation"] for peer in survivors} == {"0"}


@pytest.mark.parametrize("num_peers", [4, 6])
def test_survivors_of_a_lost_majority_go_on_and_the_others_return_to_them(
    tmp_path: Path, num_peers: int
) -> None:
    """Three are killed: the majority of four, or half of six."""
    with running(tmp_path, num_peers, reform_after_s=REFORM_S) as (swarm, runner):
        dead, survivors = swarm.peers[-3:], swarm.peers[:-3]
        before = newest_round(swarm)
        kill_at_once(dead)
        swarm.wait_until(
            went_on(survivors, before + 2), what="rounds without", timeout_s=REFORM_S + BACK_S
        )
        kept = read_record(survivors[0]).tip
        for peer in dead:
            runner.actions.start_again(peer)
        for peer in dead:
            swarm.wait_until(contributes(peer), what="its return", timeout_s=BACK_S)
        swarm.wait_until(one_chain, what="one chain", timeout_s=BACK_S)
        tips = [read_record(peer).tip for peer in swarm.peers]
    assert {tip.generation for tip in tips} == {kept.generation}
    assert all(is_ancestor(kept.code, tip.code) for tip in tips), "their agreement was dropped"


@ROOT_ONLY
@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1, 2), (3, 4, 5))])
def test_a_partition_that_heals_ends_in_one_chain(
    tmp_path: Path, groups: tuple[tuple[int, ...], ...]
) -> None:
    num_peers = sum(map(len, groups))
    links = NamespaceLinks(LINKS["datacentre"])
    long = {"reform_after_s": LONG_REFORM_S, "step_s": LONG_STEP_S}
    with running(tmp_path, num_peers, **long, links=links) as (swarm, _):
        before = newest_round(swarm)
        links.partition(groups)
        parts = [[swarm.peers[index] for index in group] for group in groups]
        for part in parts:
            swarm.wait_until(
                went_on(part, before + 2), what="rounds of a part", timeout_s=LONG_REFORM_S + BACK_S
            )
        links.heal()
        at = [applied(peer.events())[-1] for peer in swarm.peers]
        swarm.wait_until(one_chain, what="one chain", timeout_s=BACK_S)
        now = [applied(peer.events())[-1] for peer in swarm.peers]
        # The peers that are still in the generation of the healing have won.
        won = [i for i, event in enumerate(at) if event["generation"] == now[i]["generation"]]
        assert won, "one side rolls nothing back"
        assert max(now[i]["round"] - at[i]["round"] for i in won) <= HEALED_ROUNDS
        for peer in swarm.peers:
            swarm.wait_until(contributes(peer), what="its return", timeout_s=BACK_S)
        assert one_chain(swarm)
        for i, peer in enumerate(swarm.peers):
            counted, trained = (0, 0) if i in won else tokens_of(peer, at[i]["generation"])
            # Steps in progress when its chain gave way are lost as well.
            assert counted <= tokens_lost(peer.events()) <= trained + ROUND_TOKENS * (i not in won)


def tokens_of(peer: LocalPeer, generation: str) -> tuple[int, int]:
    """A peer's tokens in the rounds of a generation: counted ones, and all trained ones."""
    found = [event for event in rounds(peer) if event["generation"] == generation]
    counted = sum(int(event["trained_tokens"]) for event in found if event["counted"])
    return counted, sum(int(event["trained_tokens"]) for event in found)


@ROOT_ONLY
def test_a_joiner_whose_sources_die_one_after_another_arrives(tmp_path: Path) -> None:
    """The download takes twelve seconds. After each further part, another source is killed.

    A round of the others takes half a minute, most of it on the line.
    """
    links = NamespaceLinks(LINKS["home-20"])
    large = [
        "model.hidden_size=256", "model.moe_intermediate_size=256", "model.num_hidden_layers=3",
        "train.batch_tokens=32", "train.micro_batch_sequences=1", "wire.part_bytes=1048576",
    ]  # fmt: skip
    slow = {"step_s": LONG_STEP_S, "links": links, "settings": large, "num_rounds": 1}
    with running(tmp_path, 5, **slow) as (swarm, runner):
        sources, address = swarm.peers[1:4], swarm.peers[0].join_address()
        joiner = swarm.add(["--initial-peers", address])
        for number, source in enumerate(sources):
            more_than = (number + 1) * 5_000_000
            swarm.wait_until(
                lambda _, more_than=more_than: num_bytes(joiner) > more_than,
                what="some of the state",
                timeout_s=BACK_S,
            )
            assert not applied(joiner.events()), "it has not all of it yet"
            source.kill()
            if number:
                runner.actions.start_again(sources[number - 1])
        runner.actions.start_again(sources[-1])
        for peer in (joiner, *sources):
            swarm.wait_until(contributes(peer), what="its arrival", timeout_s=2 * BACK_S)
        assert one_chain(swarm)


def num_bytes(peer: LocalPeer) -> int:
    """Bytes on a peer's disk."""
    sizes = []
    for path in peer.folder.rglob("*"):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


@pytest.mark.alone
def test_a_peer_four_times_slower_costs_the_others_nothing_and_its_experts_advance(
    tmp_path: Path,
) -> None:
    """The others' own pace is that of their rounds before one peer became slow."""
    with running(tmp_path, 4, step_s=LONG_STEP_S) as (swarm, runner):
        swarm.wait_until(has_rounds(8), what="quiet rounds", timeout_s=START_S)
        quiet = rounds_of([peer.events() for peer in swarm.peers])
        slow = swarm.peers[-1]
        fault = Slow(kind="slow", peer=slow.index, factor=4.0, at=At(after_s=0.0))
        runner.actions.carry_out(fault, slow)
        swarm.wait_until(has_rounds(quiet[-1].number + 12), what="rounds", timeout_s=4 * START_S)
        after = rounds_of([peer.events() for peer in swarm.peers])[len(quiet) + 2 :]
        usual_s = statistics.median(found.seconds for found in quiet)
        pace = len(after) * usual_s / sum(found.seconds for found in after)
        owned = rounds(slow)[-1]["owned"]
        tip = read_record(slow).tip
    assert pace >= 0.95
    assert owned
    versions = {expert: tip.entries[expert_unit(expert)].version for expert in owned}
    assert min(versions.values()) >= tip.round - 2, "its experts advance with each round"
    assert "rounds in a row went on without this peer" in slow.log_path.read_text()
