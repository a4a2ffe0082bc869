"""Following a run: exported rounds, fetched blobs, and giving up."""

import dataclasses
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.errors import ConfigError, NobodyReachable, SwarmError
from swarm.export.facts import ExportFacts, Form
from swarm.export.manager import LATEST, ExportManager
from swarm.export.model_fetch import idle_sources
from swarm.export.run_follower import LOST_S, STILL_S, Follower, is_ready, next_due
from swarm.network.blobs.blob_store import BlobStore
from swarm.protocol.records.records import PeerRecord, PeerState
from swarm.protocol.values.manifest import Manifest
from tests.export.models import Chain, after, found, toy_run
from tests.fake_time import Time
from tests.peer_records import peer_record


def chain_of(rounds: int, *, each: int = 1) -> Chain:
    run, remote = toy_run(f"run.rounds={rounds}", "merging.alpha=0"), BlobStore()
    manifests = [found(remote, run)]
    while manifests[-1].round < rounds:
        manifests.append(after(remote, run, manifests[-1], each))
    return Chain(run, manifests, remote)


def follow(chain: Chain, folder: Path, *, every: int = 2, keep: int = 9) -> list[str]:
    said, time = list[str](), Time()
    with closing(ExportManager(folder, keep)) as manager:
        Follower(
            chain, manager, every, Form(), say=said.append, sleep=time.sleep, clock=time
        ).follow()
    return said


def rounds_in(folder: Path) -> list[int]:
    return sorted(int(path.name[6:]) for path in folder.glob("round-*"))


def test_a_run_is_looked_at_as_often_as_its_size_allows(tmp_path: Path) -> None:
    chain, pauses = chain_of(2), set[float]()
    chain.pause_s = 16.0
    time = Time()

    def sleep(seconds: float) -> None:
        pauses.add(seconds)
        time.sleep(seconds)

    with closing(ExportManager(tmp_path, 9)) as manager:
        Follower(chain, manager, 2, Form(), sleep=sleep, clock=time).follow()
    assert pauses == {16.0}


@pytest.mark.parametrize(
    ("every", "exported", "rounds", "due"),
    [(2, 0, 9, 2), (2, 2, 9, 4), (2, 3, 9, 4), (2, 8, 9, 9), (1, 0, 9, 1), (50, 0, 9, 9)],
)
def test_the_next_multiple_is_due_or_the_last_round(
    every: int, exported: int, rounds: int, due: int
) -> None:
    assert next_due(every, exported, rounds) == due


def test_a_round_is_exported_once_its_merge_is_done() -> None:
    run = toy_run()  # merges every 12 steps
    before = dataclasses.replace(found(BlobStore(), run), round=2, step=12, merged=0)
    assert not is_ready(before, 2, run)
    assert is_ready(dataclasses.replace(before, merged=1), 2, run)
    assert not is_ready(dataclasses.replace(before, merged=1), 3, run)


def test_every_other_round_and_the_last_are_exported_by_fetching_changes(tmp_path: Path) -> None:
    chain = chain_of(5)
    said = follow(chain, tmp_path)
    assert rounds_in(tmp_path) == [2, 4, 5]
    assert os.readlink(tmp_path / LATEST) == "round-000005"
    first, *later = chain.fetched
    assert len(first) > 8
    for digests, manifest in zip(later, (chain.manifests[4], chain.manifests[5]), strict=True):
        assert digests == {manifest.entries["expert.0"].digest, manifest.blob}
    assert set(chain.store.digests()) == chain.manifests[5].blobs, "nothing older is kept"
    assert [line.split(" (")[0] for line in said[:3]] == [f"exported round {k}" for k in (2, 4, 5)]
    assert said[-1] == "the run's last round 5 is exported"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "round-000004")
    expert = model.model.layers[0].mlp.experts.gate_up_proj[0]
    assert torch.equal(expert, torch.full_like(expert, 4.0))


def test_a_round_that_was_missed_has_the_next_one_in_its_place(tmp_path: Path) -> None:
    said = follow(chain_of(9, each=3), tmp_path)
    assert rounds_in(tmp_path) == [3, 6, 9]
    assert said[0].startswith("exported round 3 instead of 2, which was over")


def test_it_goes_on_after_the_newest_and_fetches_again_what_is_spoiled(tmp_path: Path) -> None:
    chain = chain_of(6)
    chain.store = BlobStore(tmp_path / ".blobs")
    whole, chain.manifests = chain.manifests, chain.manifests[:5]
    with pytest.raises(NobodyReachable, match=r"waited 24\.0 h for round 6: the swarm has not"):
        follow(chain, tmp_path)
    assert rounds_in(tmp_path) == [2, 4]
    spoiled = whole[4].entries["expert.3"].digest
    place = chain.store.file_of(spoiled)
    assert place is not None
    with place.pack.path.open("r+b") as file:
        file.seek(place.offset)
        file.write(b"spoiled")
    chain = Chain(chain.run, whole, chain.remote, BlobStore(tmp_path / ".blobs"), looks=4)
    follow(chain, tmp_path)
    assert rounds_in(tmp_path) == [2, 4, 6]
    (fetched,) = chain.fetched
    assert fetched == {spoiled, whole[6].entries["expert.0"].digest, whole[6].blob}
    looks = chain.looks
    assert follow(chain, tmp_path) == ["the run's last round 6 is exported"]
    assert chain.looks == looks, "nothing is left to ask for"


class Slow(Chain):
    """Agrees on a round each three hours."""

    time: Time

    def newest(self, least_round: int) -> Manifest | None:
        self.looks = int(self.time() // (3 * 3600))
        return super().newest(least_round)


def test_a_run_that_agrees_on_rounds_is_not_given_up_before_one_is_due(tmp_path: Path) -> None:
    chain = chain_of(20)
    slow = Slow(chain.run, chain.manifests, chain.remote)
    slow.time = Time()
    with closing(ExportManager(tmp_path, 2)) as manager:
        Follower(slow, manager, 10, Form(), sleep=slow.time.sleep, clock=slow.time).follow()
    assert rounds_in(tmp_path) == [10, 20]


def test_a_round_that_nobody_has_any_more_gives_way_to_the_next(tmp_path: Path) -> None:
    chain = chain_of(4)
    chain.gone = frozenset({2})
    said = follow(chain, tmp_path)
    assert rounds_in(tmp_path) == [3, 4]
    assert said[0].startswith("round 2 cannot be fetched: round 2 is nowhere; retrying until")


class Losing(Chain):
    """Manifests come at their times. An attempt for a lost one takes five minutes."""

    time: Time
    at_s: dict[int, float]

    def newest(self, least_round: int) -> Manifest | None:
        agreed = [m for m in self.manifests if self.at_s.get(m.round, 0.0) <= self.time()]
        return agreed[-1] if agreed[-1].round >= least_round else None

    def bring(self, manifest: Manifest, form: Form, within_s: float) -> ExportFacts:
        if manifest.round in self.gone:
            self.time.sleep(300.0)
        return super().bring(manifest, form, within_s)


def losing(folder: Path, at_h: dict[int, float], gone: set[int]) -> tuple[Losing, Follower, list]:
    chain, said = chain_of(max(at_h)), list[str]()
    slow = Losing(chain.run, chain.manifests, chain.remote, gone=frozenset(gone))
    slow.time, slow.at_s = Time(), {number: hours * 3600 for number, hours in at_h.items()}
    manager = ExportManager(folder, 9)
    follower = Follower(slow, manager, 2, Form(), say=said.append, sleep=slow.time.sleep,
                        clock=slow.time)  # fmt: skip
    return slow, follower, said


def test_a_model_that_nobody_has_is_given_up_once_and_the_next_is_exported(tmp_path: Path) -> None:
    """Each attempt has its own time limits. Whether another attempt follows is decided here."""
    chain, follower, said = losing(tmp_path, {1: 0.0, 2: 0.0, 3: 20.0, 4: 20.5}, {2})
    with closing(follower.manager):
        follower.follow()
    assert rounds_in(tmp_path) == [3, 4]
    assert 3 <= chain.brought.count(2) <= 12
    (given_up,) = [line for line in said if line.startswith("round 2 is given up")]
    assert "nothing of it came for 1." in given_up and given_up.endswith("round 2 is nowhere")
    assert said.index(given_up) < 100, "about an hour, a line a minute"


def test_the_last_model_of_a_run_that_nobody_has_ends_the_export(tmp_path: Path) -> None:
    chain, follower, _ = losing(tmp_path, {1: 0.0, 2: 0.0}, {2})
    with pytest.raises(NobodyReachable, match=r"round 2 is the run's last, .* is given up"):
        follower.follow()
    follower.manager.close()
    assert 3600 <= chain.time() < 3 * 3600


def test_a_run_of_which_no_model_can_be_fetched_is_given_up(tmp_path: Path) -> None:
    """Each round loses the same blob, and no model is the last to be tried."""
    at_h = {number: number * 2.5 for number in range(40)}
    chain, follower, _ = losing(tmp_path, at_h, set(range(40)))
    with pytest.raises(NobodyReachable, match=r"waited 7\d\.\d h for round 2: round \d+ "):
        follower.follow()
    follower.manager.close()
    assert len(chain.brought) < 1000


def test_a_model_that_comes_too_slowly_has_a_day_however_many_attempts(tmp_path: Path) -> None:
    limits = list[float]()

    class Trickling(Losing):
        def bytes_here(self, manifest: Manifest) -> int:
            return len(self.brought)

        def bring(self, manifest: Manifest, form: Form, within_s: float) -> ExportFacts:
            limits.append(within_s)
            self.time.sleep(3000.0 if manifest.round in self.gone else 0.0)
            return super().bring(manifest, form, within_s)

    chain, follower, said = losing(tmp_path, {1: 0.0, 2: 0.0, 3: 60.0}, {2})
    slow = Trickling(chain.run, chain.manifests, chain.remote, gone=chain.gone)
    slow.time, slow.at_s = chain.time, chain.at_s
    follower.source = slow
    with pytest.raises(NobodyReachable, match=r"waited 24\.\d h for round 2: round 2 is given up"):
        follower.follow()
    follower.manager.close()
    assert limits[0] == 24 * 3600 and limits[1] < 24 * 3600 - 3000
    (given_up,) = [line for line in said if line.startswith("round 2 is given up")]
    assert "it is not whole after 24." in given_up


def test_each_export_is_told_of_and_an_error_of_that_does_not_end_it(tmp_path: Path) -> None:
    told: list[str] = []

    def published(path: Path, facts: ExportFacts) -> None:
        told.append(f"{path.name} {facts.model.manifest.round}")
        raise SwarmError("the hub is away")

    said: list[str] = []
    manager = ExportManager(tmp_path, 1)
    extras, time = (lambda path, _: (path / "more").touch(),), Time()
    Follower(
        chain_of(4), manager, 2, Form(), extras, published, said.append, time.sleep, time
    ).follow()
    manager.close()
    assert told == ["round-000002 2", "round-000004 4"]
    assert said[1] == said[3] == "the hub is away"
    assert (tmp_path / "latest" / "more").exists()


def test_another_runs_exports_are_refused(tmp_path: Path) -> None:
    follow(chain_of(2), tmp_path)
    with pytest.raises(ConfigError, match="not of exact-"):
        follow(chain_of(4), tmp_path)


class Silent(Chain):
    """Nobody answers after the first look."""

    def newest(self, least_round: int) -> Manifest | None:
        if self.looks:
            raise NobodyReachable("no answer within 30 s")
        return super().newest(least_round)


def test_a_run_that_is_gone_is_given_up_with_the_reason(tmp_path: Path) -> None:
    chain = chain_of(2)
    silent = Silent(chain.run, chain.manifests, chain.remote)
    said: list[str] = []
    time, manager = Time(), ExportManager(tmp_path, 1)
    follower = Follower(silent, manager, 2, Form(), say=said.append, sleep=time.sleep, clock=time)
    with pytest.raises(NobodyReachable, match=r"waited 30 min for round 2: no answer .*start ag"):
        follower.follow()
    manager.close()
    assert LOST_S < time.now_s <= LOST_S + 10 < STILL_S
    assert said == 30 * ["waiting for round 2: no answer within 30 s"]


def records(manifest: Manifest, **states: PeerState) -> dict[str, PeerRecord]:
    return {
        name: dataclasses.replace(peer_record(name), state=state, manifest_digest=manifest.digest)
        for name, state in states.items()
    }


def test_those_whose_links_are_idle_are_asked() -> None:
    manifest = found(BlobStore(), toy_run())
    peers = records(
        manifest, a=PeerState.AVERAGING, b=PeerState.TRAINING, c=PeerState.TRAINING,
        d=PeerState.LEAVING, e=PeerState.JOINING,
    )  # fmt: skip
    assert idle_sources(peers, manifest) == ["b", "c"]
    behind = dataclasses.replace(peers["b"], manifest_digest="0" * 64)
    assert idle_sources(peers | {"b": behind}, manifest) == ["c"]
    assert idle_sources(peers | records(manifest, f=PeerState.FINISHED), manifest) == ["f"]
    assert idle_sources(records(manifest, a=PeerState.AVERAGING), manifest) == []
